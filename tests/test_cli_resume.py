"""The same command again and again, until it ends: how people run under preemption."""

import csv
import signal
import subprocess
import sys

import pytest
import yaml

from safetrain_core.cli import main

TINY = ["--layers", "1", "--width", "16", "--heads", "2", "--context", "16", "--batch-size", "4", "--dropout", "0.1"]
OPTIONS = [
    "--steps",
    "40",
    "--checkpoint-every-n-steps",
    "6",
    "--eval-every-n-steps",
    "15",
    "--max-rolling-checkpoints",
    "2",
]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    return str(path)


def argv(out, text, *more):
    return ["train", "--out", str(out), "--corpus", text, *TINY, *OPTIONS, *more]


def killed_at(step, command):
    """Run until the row of ``step`` is printed, then SIGKILL; what was printed."""
    with subprocess.Popen(
        [sys.executable, "-m", "safetrain_core", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        lines = []
        for line in child.stdout:
            lines.append(line)
            if line.startswith(f"STEP step={step:3d}"):
                child.send_signal(signal.SIGKILL)
        child.wait(60)
    return lines


def test_killed_and_run_again_it_ends_with_the_same_weights_byte_for_byte_and_a_whole_log(tmp_path, text, capsys):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert main(argv(whole, text, "--resume", "auto")) == 0
    assert "starting fresh" in capsys.readouterr().out
    assert "starting fresh\n" in killed_at(3, argv(broken, text, "--resume", "auto"))
    first = killed_at(21, argv(broken, text, "--resume", "auto"))
    assert "starting fresh\n" in first  # the first kill came before the first checkpoint
    assert main(argv(broken, text, "--resume", "auto")) == 0
    out = capsys.readouterr().out
    assert f"resumed from step 18: {broken / 'step_00000018.pt'}" in out
    assert "completed" in out
    assert (whole / "final.pt").read_bytes() == (broken / "final.pt").read_bytes()
    logs = []
    for folder in (whole, broken):
        rows = list(csv.DictReader((folder / "metrics.csv").open(newline="")))
        assert [int(row["step"]) for row in rows] == list(range(1, 41))
        logs.append([(row["loss"], row["learning_rate"], row["val_loss"]) for row in rows])
        assert [p.name for p in folder.glob("metrics.*.csv")] == []
        assert list(folder.glob(".*.tmp")) == []
    assert logs[0] == logs[1]
    # Once more: it is done, and stays what it is.
    before = (broken / "final.pt").read_bytes()
    assert main(argv(broken, text, "--resume", "auto")) == 0
    assert (broken / "final.pt").read_bytes() == before


def test_a_path_can_be_resumed_and_a_broken_one_is_refused_with_status_1(tmp_path, text, capsys):
    out = tmp_path / "a"
    assert main(argv(out, text)) == 0
    path = next(out.glob("step_*.pt"))
    assert main(["verify", str(out)]) == 0
    told = capsys.readouterr().out
    assert "whole" in told
    assert "checkpoint ckpt.v1, step 40, 40 updates" in told
    assert "weights alone" in told
    assert main(argv(tmp_path / "b", text, "--resume", str(path))) == 0
    assert f"resumed from step {int(path.stem[5:])}" in capsys.readouterr().out
    data = bytearray(path.read_bytes())
    data[900] ^= 1
    path.write_bytes(data)
    assert main(["verify", str(path)]) == 1
    assert "BROKEN" in capsys.readouterr().out
    assert main(["verify", str(out)]) == 1
    capsys.readouterr()
    assert main(argv(tmp_path / "c", text, "--resume", str(path))) == 1
    err = capsys.readouterr().err
    assert "altered" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--width", "32"], "build the model with the sizes, and from the data, that it was saved with"),
        (["--heads", "1"], "is of another run: its model is"),
        (["--optimizer-class", "adafactor"], "holds the optimizer"),
        (["--steps", "50"], "another schedule"),
    ],
)
def test_resuming_into_another_run_is_refused_and_the_folder_is_as_before(tmp_path, text, capsys, more, told):
    out = tmp_path / "a"
    assert main(argv(out, text, "--steps", "8")) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.name != ".lock"}
    capsys.readouterr()
    assert main(argv(out, text, "--steps", "8", "--resume", "auto", *more)) == 2
    err = capsys.readouterr().err
    assert told in err
    assert len(err.splitlines()) == 1
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.name != ".lock"} == before


def test_a_second_run_into_a_folder_in_use_is_refused_and_the_first_goes_on(tmp_path, text, capsys):
    out = tmp_path / "a"
    command = [
        sys.executable,
        "-m",
        "safetrain_core",
        *argv(out, text, "--steps", "100000", "--scheduler-type", "constant"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        for line in child.stdout:
            if line.startswith("STEP step= 10"):
                break
        for more in (["--overwrite"], ["--resume", "auto"]):
            assert main(argv(out, text, *more)) == 2
            err = capsys.readouterr().err
            assert "is in use by another run" in err
            assert len(err.splitlines()) == 1
        child.send_signal(signal.SIGINT)
        rest, _ = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "interrupted" in rest
    steps = [int(row["step"]) for row in csv.DictReader((out / "metrics.csv").open(newline=""))]
    assert steps == list(range(1, len(steps) + 1))


def test_the_checkpoints_learning_rate_stands_through_a_chain_of_resumes(tmp_path, text):
    out, options = tmp_path / "a", ["--scheduler-type", "constant", "--max-rolling-checkpoints", "9"]
    for more in (
        ["--steps", "5", "--learning-rate", "0.003"],
        ["--steps", "6", "--resume"],
        ["--steps", "7", "--resume"],
    ):
        assert main(argv(out, text, *options, *more)) == 0
        assert yaml.safe_load((out / "config.yaml").read_text())["learning_rate"] == 0.003
    assert main(argv(out, text, *options, "--steps", "8", "--learning-rate", "0.003", "--resume")) == 0
    rates = {float(row["learning_rate"]) for row in csv.DictReader((out / "metrics.csv").open(newline=""))}
    assert rates == {0.003}


def test_another_corpus_is_another_run_and_other_settings_are_warned_of(tmp_path, text, capsys):
    out = tmp_path / "a"
    assert main(argv(out, text, "--steps", "8")) == 0
    other = tmp_path / "other.txt"
    other.write_text("a lazy dog jumps over the quick brown fox. the " * 60)
    capsys.readouterr()
    assert main(argv(out, str(other), "--steps", "8", "--resume")) == 2
    err = capsys.readouterr().err
    assert "is of another run" in err or "does not fit" in err
    assert main(argv(out, text, "--steps", "8", "--resume", "--batch-size", "3")) == 0
    assert "warning: resumed with other settings than it was saved with (batch_size 4 -> 3)" in capsys.readouterr().err


def test_a_branch_from_an_older_checkpoint_is_what_goes_on_and_the_other_is_set_aside(tmp_path, text, capsys):
    out = tmp_path / "a"
    assert main(argv(out, text, "--max-rolling-checkpoints", "9")) == 0
    killed_at(21, argv(out, text, "--resume", str(out / "step_00000018.pt"), "--checkpoint-every-n-steps", "1"))
    assert (out / "step_00000040.pt.abandoned").exists()
    assert main(argv(out, text, "--resume")) == 0
    step = int(capsys.readouterr().out.split("resumed from step ")[-1].split(":")[0])
    assert 18 <= step <= 25
    steps = [int(row["step"]) for row in csv.DictReader((out / "metrics.csv").open(newline=""))]
    assert steps == list(range(1, 41))


def test_checkpoints_of_which_none_is_whole_are_no_fresh_start(tmp_path, text, capsys):
    out = tmp_path / "a"
    assert main(argv(out, text, "--steps", "8")) == 0
    for path in out.glob("step_*.pt"):
        path.write_bytes(path.read_bytes() + b"x")
    assert main(argv(out, text, "--steps", "8", "--resume", "auto")) == 1
    assert "is whole; move them away to start fresh" in capsys.readouterr().err
    assert len((out / "metrics.csv").read_text().splitlines()) == 9


def test_a_config_file_of_a_run_does_not_lead_another_run_into_its_log(tmp_path, text):
    assert main(argv(tmp_path / "a", text, "--steps", "3")) == 0
    before = (tmp_path / "a" / "metrics.csv").read_text()
    assert main(argv(tmp_path / "b", text, "--config", str(tmp_path / "a" / "config.yaml"))) == 0
    assert (tmp_path / "a" / "metrics.csv").read_text() == before
    assert (tmp_path / "b" / "metrics.csv").exists()


def test_a_log_path_that_is_somebody_elses_file_is_refused(tmp_path, text, capsys):
    assert main(argv(tmp_path / "a", text, "--csv-log-path", text)) == 2
    assert "holds something that is no log" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on file sizes, to have a full disk")
def test_a_full_disk_is_one_line_and_leaves_no_temporary(tmp_path, text):
    out = tmp_path / "a"
    command = " ".join([sys.executable, "-m", "safetrain_core", *argv(out, text, "--width", "64")])
    done = subprocess.run(["bash", "-c", f"trap '' XFSZ; ulimit -f 40; {command}"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "File too large" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "step_00000006.pt" in done.stderr
    assert list(out.glob(".*.tmp")) == []


def test_verify_of_nothing_is_a_mistake(tmp_path, capsys):
    assert main(["verify", str(tmp_path / "none")]) == 2
    assert main(["verify", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_run_that_has_its_steps_says_so_when_it_is_resumed(tmp_path, capsys):
    flags = ["train", "--steps", "2", *TINY, "--corpus", __file__, "--scheduler-type", "constant"]
    assert main([*flags, "--out", str(tmp_path)]) == 0
    capsys.readouterr()
    config = (tmp_path / "config.yaml").read_text()
    assert main([*flags, "--out", str(tmp_path), "--steps", "1", "--resume"]) == 0
    assert "nothing to do: 2 updates are behind, max_steps=1" in capsys.readouterr().out
    assert (tmp_path / "config.yaml").read_text() == config


def test_a_refused_log_leaves_the_run_that_was_to_be_replaced_or_resumed(tmp_path, text, capsys):
    out, other = tmp_path / "a", tmp_path / "log.csv"
    assert main(argv(out, text, "--steps", "8")) == 0
    other.write_text("a,b\n1,2\n")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for how in ("--overwrite", "--resume"):
        assert main(argv(out, text, "--steps", "9", how, "--csv-log-path", str(other))) == 2
        assert "holds something that is no log" in capsys.readouterr().err
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert other.read_text() == "a,b\n1,2\n"


def test_a_folder_of_checkpoints_is_no_checkpoint_and_the_newest_is_named(tmp_path, text, capsys):
    assert main(argv(tmp_path / "a", text, "--steps", "8")) == 0
    assert main(argv(tmp_path / "b", text, "--steps", "8", "--resume", str(tmp_path / "a"))) == 2
    assert "the newest in it is" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="there is no SIGUSR1 here")
def test_a_request_to_save_while_a_run_starts_or_ends_does_not_kill_it(tmp_path, text):
    code = (
        "import os, signal, sys; from safetrain_core import cli; run = cli._run\n"
        "def asked(): os.kill(os.getpid(), signal.SIGUSR1)\n"
        "def slow(args): asked(); status = run(args); asked(); return status\n"
        "cli._run = slow; sys.exit(cli.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, *argv(tmp_path / "a", text, "--steps", "2")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")

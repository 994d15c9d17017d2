"""The same command again and again, until it ends: how people run under preemption."""

import csv
import signal
import subprocess
import sys

import pytest

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
        (["--width", "32"], "does not fit the model"),
        (["--optimizer-class", "adafactor"], "holds the optimizer"),
        (["--steps", "50"], "another schedule"),
    ],
)
def test_resuming_into_another_run_is_refused_and_the_folder_is_as_before(tmp_path, text, capsys, more, told):
    out = tmp_path / "a"
    assert main(argv(out, text, "--steps", "8")) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.name != ".lock"}
    capsys.readouterr()
    assert main(argv(out, text, "--steps", "8", "--resume", "auto", *more)) == 1
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


def test_verify_of_nothing_is_a_mistake(tmp_path, capsys):
    assert main(["verify", str(tmp_path / "none")]) == 2
    assert main(["verify", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2

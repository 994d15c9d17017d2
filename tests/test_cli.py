"""The command line, run as a user runs it."""

import contextlib
import csv
import os
import re
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from safetrain_core.cli import main

PLAN = ["plan", "--layers", "2", "--hidden", "64", "--seq", "3", "--budget-gb", "1"]
TINY = ["--layers", "1", "--width", "16", "--heads", "2", "--context", "16", "--batch-size", "4"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    return str(path)


def command(*argv):
    return [sys.executable, "-m", "safetrain_core", *map(str, argv)]


def run(*argv, **options):
    return subprocess.run(command(*argv), capture_output=True, text=True, timeout=120, **options)


def test_the_main_job_on_real_text_prints_rows_writes_the_log_and_sums_up(tmp_path):
    out = tmp_path / "first"
    done = run("train", "--steps", 50, "--out", out)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    rows = [line for line in done.stdout.splitlines() if line.startswith("STEP")]
    assert len(rows) == 50
    assert re.fullmatch(
        r"STEP step= 50 lr=\d\.\d{6} pre_clip=[ \d.]{10} post_clip=[ \d.]{10} loss=\d\.\d{6} scale=- reason=-",
        rows[-1],
    )
    summary = dict(re.findall(r"^  ([\w ]+?)  +(.+)$", done.stdout, flags=re.MULTILINE))
    assert (summary["updates"], summary["skips"], summary["skip rate"]) == ("50", "0 of 50 steps", "0.0%")
    assert float(summary["last loss"]) < float(summary["first loss"]) - 1
    assert 0 < float(summary["validation loss"]) < float(summary["first loss"])
    log = list(csv.DictReader((out / "metrics.csv").open(newline="")))
    assert [int(row["step"]) for row in log] == list(range(1, 51))
    assert all(float(row["gradient_norm"]) > 0 for row in log)


def test_flags_win_over_the_file_and_the_file_over_the_defaults(tmp_path, capsys):
    path = tmp_path / "c.yaml"
    path.write_text("learning_rate: 3e-4\nbatch_size: 8\ngpu_temp_guard: true\n")
    argv = [
        "train",
        "--config",
        str(path),
        "--batch-size",
        "2",
        "--grad-clip-max-norm",
        "0.5",
        "--no-gpu-temp-guard",
    ]
    assert main([*argv, "--print-config"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["learning_rate"], shown["batch_size"], shown["grad_clip_max_norm"]) == (3e-4, 2, 0.5)
    assert (shown["gpu_temp_guard"], shown["weight_decay"], shown["max_steps"]) == (False, 0.01, None)


def test_the_printed_config_can_be_read_back(tmp_path, capsys):
    assert main(["train", "--steps", "7", "--learning-rate", "1e-5", "--print-config"]) == 0
    first = capsys.readouterr().out
    (tmp_path / "c.yaml").write_text(first)
    assert main(["train", "--config", str(tmp_path / "c.yaml"), "--print-config"]) == 0
    assert capsys.readouterr().out == first


def test_the_run_folder_holds_the_config_that_was_used(tmp_path, text):
    out = tmp_path / "r"
    assert main(["train", "--steps", "2", "--seed", "3", "--out", str(out), "--corpus", text, *TINY]) == 0
    kept = yaml.safe_load((out / "config.yaml").read_text())
    assert (kept["max_steps"], kept["seed"], kept["batch_size"]) == (2, 3, 4)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--batch-sise", "4"], "unknown argument --batch-sise; did you mean --batch-size?"),
        (["--batch-size", "0"], "batch_size=0 is out of range; allowed: whole number >= 1"),
        (["--batch-size", "four"], "batch_size='four' is of the wrong type; allowed: whole number >= 1"),
        (["--scheduler-warmup-ratio", "2"], "allowed: number >= 0 and <= 1"),
        (["--optimizer-class", "sgd"], "allowed: adamw, adam,"),
        (["--config", "missing.yaml"], "config file missing.yaml cannot be read"),
        (["--corpus", "missing.txt"], "corpus missing.txt does not exist"),
        (["--corpus", "."], "corpus . is a folder"),
        (["--width", "30"], "width=30 is not a multiple of heads=4"),
        (["--width", "wide"], "invalid int value: 'wide'"),
        (["--device", "cuda:99"], "--device cuda:99 is not available"),
        (["--device", "gpu"], "--device gpu is not available"),
        (["--device", "meta"], "--device meta is not available"),
        (["--width", "1000000", "--heads", "1"], "does not fit"),
        (["--corpus", "x" * 300], "cannot be read"),
        (["--resume", "nope.pt"], "there is no checkpoint nope.pt"),
        (["--seed", "99999999999999999999"], "is out of range"),
        (["--gpu-temp-guard"], "gpu_temp_guard has no source of temperatures"),
        (["--resume", "--overwrite"], "say one of them"),
        (["extra"], "unknown argument extra"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_status_2(argv, told, tmp_path, text, capsys):
    corpus = [] if "--corpus" in argv else ["--corpus", text]
    try:
        status = main(["train", *argv, "--steps", "1", "--out", str(tmp_path / "o"), *corpus])
    except SystemExit as stop:
        status = stop.code
    err = capsys.readouterr().err
    assert status == 2
    assert told in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "o").exists(), "a folder is left of a run that was refused"


def test_a_refused_run_leaves_a_folder_that_was_there_before(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    assert main(["train", "--out", str(tmp_path / "mine" / "a" / "b"), "--corpus", "missing.txt"]) == 2
    assert list((tmp_path / "mine").iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["train", "--world-size", "two"], "argument --world-size: invalid int value: 'two'"),
        (["train", "--config", "."], "config file . cannot be read: Is a directory"),
        (["diagnose"], "name a LOG"),
        (["diagnose", "nowhere.csv"], "nowhere.csv does not exist; name a log, or a folder with one"),
        (["diagnose", "EMPTY"], "holds no log"),
        (["diagnose", "EMPTY", "--jsn"], "unknown argument --jsn; did you mean --json?"),
        (["verify"], "the following arguments are required: path"),
        (["verify", "nowhere"], "nowhere does not exist; name a checkpoint or a folder with some"),
        (["verify", "EMPTY"], "holds no checkpoint"),
        (["verify", "EMPTY", "--world-size", "0"], "world_size=0 must be at least 1"),
        (["plan"], "the following arguments are required: --layers, --hidden, --seq, --budget-gb"),
        ([*PLAN, "--layers", "0"], "layers=0 must be a whole number of at least 1"),
        ([*PLAN, "--vocab", "-3"], "vocab=-3 must be a whole number of at least 0"),
        ([*PLAN, "--heads", "5"], "hidden=64 is not a multiple of heads=5"),
        ([*PLAN, "--budget-gb", "nan"], "--budget-gb nan must be a number above 0"),
        ([*PLAN, "--dtype", "int8"], "invalid choice: 'int8'"),
        (["watch", "--device", "banana"], "--device banana names no NVIDIA GPU"),
        (["watch", "--interval", "0"], "--interval 0 must be above 0"),
        (["watch", "--gpu-temp-resume-threshold-c", "90"], "resume 90 C < pause 85 C < critical 95 C does not hold"),
        (["watch", "--replay", "nowhere.csv"], "nowhere.csv"),
        (["watch", "--nvml-device-index", "-1"], "nvml_device_index=-1 must be at least 0"),
    ],
)
def test_a_mistake_with_any_verb_is_one_line_on_stderr_and_status_2(argv, told, tmp_path, capsys):
    try:
        status = main([str(tmp_path) if word == "EMPTY" else word for word in argv])
    except SystemExit as stop:
        status = stop.code
    out, err = capsys.readouterr()
    assert status == 2
    assert told in err
    assert (out, len(err.splitlines())) == ("", 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["train", "diagnose", "verify", "plan", "watch"])
def test_the_help_of_each_verb_says_what_it_does_and_tells_of_its_exit_status(verb, capsys):
    for argv in ([verb, "--help"], ["--help"]):
        with pytest.raises(SystemExit) as stop:
            main(argv)
        assert stop.value.code == 0
        out, err = capsys.readouterr()
        assert err == ""
        assert verb in out
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert f"usage: safetrain {verb}" in words
    assert "xit status" in words


@pytest.mark.parametrize("argv", [["train", "--batch-size", "0"], ["verify", "nowhere"], ["plan"]])
@pytest.mark.parametrize(("local_rank", "lines"), [("0", 1), ("1", 0)])
def test_of_several_ranks_the_first_of_a_machine_tells_of_a_mistake(argv, local_rank, lines):
    place = {"RANK": local_rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    done = run(*argv, env={**os.environ, **place})
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == lines, done.stderr


def test_no_verb_and_an_unknown_verb_are_mistakes(capsys):
    for argv in ([], ["trian"]):
        with pytest.raises(SystemExit) as stop:
            main(argv)
        assert stop.value.code == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_help_shows_every_field_and_exits_0(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    for flag in (
        "--grad-clip-max-norm",
        "--gpu-temp-guard",
        "--no-gpu-temp-guard",
        "--steps",
        "--corpus",
        "--print-config",
    ):
        assert flag in shown


@pytest.mark.parametrize("content", [b"", b"abc\0", b"\xff\xfe", b"short"])
def test_a_corpus_that_is_no_text_or_too_short_is_refused(tmp_path, content, capsys):
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    assert main(["train", "--steps", "1", "--out", str(tmp_path / "o"), "--corpus", str(path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_folder_that_holds_a_run_is_left_alone_until_overwrite_is_said(tmp_path, text, capsys):
    out = tmp_path / "r"
    argv = ["train", "--out", str(out), "--corpus", text, *TINY]
    assert main([*argv, "--steps", "3"]) == 0
    (out / "mine.txt").write_text("keep")
    before = (out / "metrics.csv").read_text()
    assert main([*argv, "--steps", "2"]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([*argv, "--steps", "2", "--overwrite", "--corpus", "missing.txt"]) == 2
    assert (out / "metrics.csv").read_text() == before
    assert main([*argv, "--steps", "2", "--overwrite"]) == 0
    assert len((out / "metrics.csv").read_text().splitlines()) == 3
    assert (out / "mine.txt").read_text() == "keep"


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, text, capsys):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "deeper"):
        assert main(["train", "--steps", "1", "--out", str(out), "--corpus", text, *TINY]) == 2
        err = capsys.readouterr().err
        assert "cannot be written" in err
        assert len(err.splitlines()) == 1


def test_a_run_that_fails_says_why_sums_up_and_exits_1(tmp_path, text, capsys):
    argv = [
        "--learning-rate",
        "1e30",
        "--grad-clip-max-norm",
        "0",
        "--max-nan-retries",
        "1",
        "--scheduler-type",
        "constant",
    ]
    assert main(["train", "--steps", "20", "--out", str(tmp_path / "r"), "--corpus", text, *TINY, *argv]) == 1
    out, err = capsys.readouterr()
    assert re.search(r"at step \d+ \(\w+\), 1 of 1 retries used", err)
    assert "SKIP" in out
    assert "failed: " in out


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_ends_after_the_present_step_with_summary_whole_csv_and_its_status(tmp_path, text, number, status):
    out = tmp_path / "r"
    argv = command("train", "--steps", 100000, "--out", out, "--corpus", text, *TINY)
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        for line in child.stdout:
            if line.startswith("STEP step= 20"):
                break
        child.send_signal(number)
        rest, err = child.communicate(timeout=60)
    assert child.returncode == status, err
    assert err == ""
    assert "interrupted: " in rest
    lines = (out / "metrics.csv").read_text().splitlines()
    last = int(re.findall(r"^STEP step= *(\d+)", "STEP step= 20\n" + rest, flags=re.MULTILINE)[-1])
    assert len(lines) == last + 1
    assert len({line.count(",") for line in lines}) == 1
    assert f"  updates          {last}\n" in rest


def test_a_reader_that_leaves_early_causes_no_traceback(tmp_path, text):
    shell = " ".join(command("train", "--steps", 200, "--out", tmp_path / "r", "--corpus", text, *TINY)) + " | head -2"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=120)
    assert len(done.stdout.splitlines()) == 2
    assert done.stderr == ""


def test_a_progress_bar_is_shown_on_a_terminal_only(tmp_path, text):
    fcntl, pty, termios = (pytest.importorskip(name) for name in ("fcntl", "pty", "termios"))
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    argv = command("train", "--steps", 5, "--out", tmp_path / "r", "--corpus", text, *TINY)
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=follower, text=True) as child:
        out, _ = child.communicate(timeout=120)
    os.close(follower)
    shown = b""
    with contextlib.suppress(OSError):  # Linux ends a pty with an error
        while piece := os.read(leader, 4096):
            shown += piece
    os.close(leader)
    assert b"5/5" in shown
    assert out.count("STEP step=") == 5
    assert "\r" not in out


def test_the_console_script_is_the_module(tmp_path):
    script = Path(sys.executable).with_name("safetrain")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("safetrain ")
    assert run("--version").stdout == done.stdout

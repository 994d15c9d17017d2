"""``safetrain watch``: beside someone else's training, on fake cards, and on a recorded trace."""

import csv
import signal
import subprocess
import sys

import pytest

from safetrain_core.cli import main

TRACE = "seconds,gpu_temperature_c\n0,70\n5,86\n10,80\n15,74\n20,90\n"


def replay(tmp_path, text, *argv):
    (tmp_path / "t.csv").write_text(text)
    return main(["watch", "--replay", str(tmp_path / "t.csv"), *argv])


def test_a_replay_says_of_each_reading_what_the_guard_would_do(tmp_path, capsys):
    assert replay(tmp_path, TRACE) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ", 1)[1] for line in lines[:5]] == [
        "normal",
        "would pause (86 C is above pause 85 C)",
        "would pause",
        "normal (74 C is below resume 75 C)",
        "would pause (90 C is above pause 85 C)",
    ]
    assert lines[5] == "5 readings: 2 pauses of 10.0 s in all, no abort"


@pytest.mark.parametrize(
    ("text", "argv", "status", "told"),
    [
        (TRACE, ["--gpu-temp-critical-threshold-c", "88"], 75, "would abort (90 C is above critical 88 C)"),
        ('gpu_temperature_c\n70\n""\nnan\n""\n', [], 75, "the sensor was lost (3 readings in a row"),
        ("gpu_power_w,gpu_temperature_c\n100,\n", [], 1, "temperature unknown, 100 W: cannot tell"),
        ("gpu_temperature_c\n96\n20\n", [], 75, "96 C: would abort"),
    ],
)
def test_its_status_is_75_for_an_abort_and_1_where_no_temperature_was_told(tmp_path, capsys, text, argv, status, told):
    assert replay(tmp_path, text, *argv) == status
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--replay", "missing.csv"], "trace missing.csv cannot be read"),
        (["--interval", "0"], "--interval 0 must be above 0"),
        (["--gpu-temp-pause-threshold-c", "70"], "thresholds must rise"),
        (["--gpu-temp-critical-threshold-c", "130"], "is out of range; allowed: 0..120 C"),
        (["--nvml-device-index", "-1"], "nvml_device_index=-1 must be at least 0"),
        (["--onec"], "unknown argument --onec; did you mean --once?"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(argv, told, capsys):
    try:
        status = main(["watch", *argv])
    except SystemExit as stop:
        status = stop.code
    err = capsys.readouterr().err
    assert (status, len(err.splitlines())) == (2, 1)
    assert told in err


def test_a_csv_that_is_there_is_left_alone(tmp_path, capsys):
    (tmp_path / "t.csv").write_text(TRACE)
    assert main(["watch", "--replay", str(tmp_path / "t.csv"), "--csv", str(tmp_path / "t.csv")]) == 2
    assert "cannot be made: File exists; name another file" in capsys.readouterr().err
    assert (tmp_path / "t.csv").read_text() == TRACE


def command(*argv):
    return [sys.executable, "-m", "safetrain_core", "watch", *map(str, argv)]


def test_live_readings_are_shown_and_written_and_can_be_replayed(fake, tmp_path, capsys):
    path = tmp_path / "live.csv"
    argv = command("--interval", "0.02", "--csv", path)
    with subprocess.Popen(argv, env=fake.env(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "Fake A, slows itself down at 90 C, switches itself off at 100 C\n"
        for celsius, told in ((61, ": normal"), (86, "would pause ("), (74, "normal ("), (97, "would abort (")):
            fake.set(gpu0_temperature=celsius)
            assert any(f"{celsius} C" in line and told in line for line in child.stdout)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=30)
    assert (child.returncode, err) == (130, "")
    rows = list(csv.DictReader(path.open(newline="")))
    assert {row["gpu_power_w"] for row in rows} == {"123.456"}
    assert {"normal", "paused", "aborted"} == {row["guard_state"] for row in rows}
    assert main(["watch", "--replay", str(path)]) == 75
    assert "1 pause of" in capsys.readouterr().out


def test_once_is_one_reading_and_needs_no_torch(fake):
    code = "import sys; from safetrain_core.cli import main; print(main(['watch', '--once']), 'torch' in sys.modules)"
    run = {"env": fake.env(), "capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run([sys.executable, "-c", code], **run)
    assert "61 C, 123 W, 98 %, 3072 MiB, 1980 MHz: normal" in done.stdout
    assert done.stdout.splitlines()[-1] == "0 False"
    assert subprocess.run(command("--once"), **{**run, "env": fake.set(gpu0_temperature=99).env()}).returncode == 75


def test_without_a_card_it_says_why_in_one_line_and_its_status_is_1(fake):
    done = subprocess.run(command("--once"), env=fake.set(count=0).env(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "warning: GPU readings: NVML finds no GPU in this machine; see what nvidia-smi -L says"
    ]


def test_a_pause_threshold_above_the_cards_slowdown_is_warned_of(fake):
    done = subprocess.run(
        command("--once"), env=fake.set(gpu0_slowdown=80).env(), capture_output=True, text=True, timeout=60
    )
    assert "slows itself down at 80 C, below the pause threshold of 85 C" in done.stderr

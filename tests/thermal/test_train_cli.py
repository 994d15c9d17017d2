"""``safetrain train --gpu-temp-guard`` on a fake card under the real pynvml: pause, signals, abort, calls counted."""

import csv
import os
import re
import signal
import subprocess
import sys
import time

import pytest

TINY = ["--layers", "1", "--width", "16", "--heads", "2", "--context", "16", "--batch-size", "4"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    return str(path)


class Run:
    """A training process; ``until`` reads its output up to a line."""

    def __init__(self, fake, out, text, *argv, steps=100000, **env):
        self.out = out
        command = [sys.executable, "-m", "safetrain_core", "train", "--steps", steps, "--out", out, "--corpus", text]
        command += [*TINY, "--gpu-temp-guard", "--gpu-metrics-backend", "nvml", "--nvml-device-index", "0"]
        command += ["--gpu-temp-poll-interval-seconds", "0.02", "--telemetry-log-interval", "1"]
        command += ["--scheduler-type", "constant", *argv]
        self.child = subprocess.Popen(
            list(map(str, command)),
            env={**fake.env(**env), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.child.kill()
        self.child.communicate()

    def until(self, start):
        for line in self.child.stdout:
            if line.startswith(start):
                return
        raise AssertionError(self.child.stderr.read())

    def checkpoint(self):
        """Wait for a checkpoint; its step."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            found = sorted(self.out.glob("step_*.pt"))
            if found:
                return int(found[-1].stem[5:])
            time.sleep(0.01)
        raise AssertionError("no checkpoint came")

    def end(self):
        out, err = self.child.communicate(timeout=120)
        return self.child.returncode, out, err


def rows(out):
    return list(csv.DictReader((out / "metrics.csv").open(newline="")))


def test_a_hot_card_pauses_the_run_cools_and_the_run_goes_on(fake, tmp_path, text):
    with Run(fake, tmp_path / "r", text, steps=2000) as run:
        run.until("STEP step=  5")
        fake.set(gpu0_temperature=86)
        step = run.checkpoint()
        fake.set(gpu0_temperature=70)
        status, out, err = run.end()
    assert status == 0, err
    assert re.search(r"  paused           1 times, \d+\.\d s, by the thermal guard", out)
    assert "GPU (Fake A) paused: 86 C is above pause 85 C" in err
    log = rows(tmp_path / "r")
    assert len(log) == 2000
    assert [int(row["step"]) for row in log if row["thermal_event"]] == [step]
    assert re.fullmatch(r"paused 86 C; resumed 70 C after [\d.]+ s", log[step - 1]["thermal_event"])
    assert {"61.0", "86.0", "70.0"} >= {row["gpu_temperature_c"] for row in log} >= {"61.0", "70.0"}
    assert {row["gpu_power_w"] for row in log} == {"123.456"}


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_paused_ends_the_program_promptly_with_a_checkpoint(fake, tmp_path, text, number, status):
    with Run(fake, tmp_path / "r", text, "--gpu-temp-poll-interval-seconds", "0.5") as run:
        run.until("STEP step=  5")
        fake.set(gpu0_temperature=86)
        step = run.checkpoint()
        run.child.send_signal(number)
        start = time.monotonic()
        got, out, err = run.end()
    assert got == status, err
    assert time.monotonic() - start < 20
    assert "interrupted: " in out
    assert [int(path.stem[5:]) for path in (tmp_path / "r").glob("step_*.pt")] == [step]
    assert len(rows(tmp_path / "r")) == step


def test_critical_ends_with_status_75_and_a_checkpoint_to_resume_from(fake, tmp_path, text):
    with Run(fake, tmp_path / "r", text) as run:
        run.until("STEP step=  5")
        fake.set(gpu0_temperature=96)
        status, out, err = run.end()
    assert status == 75
    step = int(re.search(r"resume from \S*step_0*(\d+)\.pt", err)[1])
    assert "safetrain: GPU (Fake A): 96 C is above critical 95 C; let it cool" in err
    assert "aborted: " in out
    assert rows(tmp_path / "r")[-1]["thermal_event"] == "aborted 96 C"
    assert not (tmp_path / "r" / "final.pt").exists()
    fake.set(gpu0_temperature=60)
    with Run(fake, tmp_path / "r", text, "--resume", steps=step + 5) as run:
        status, out, err = run.end()
    assert status == 0, err
    assert f"resumed from step {step}" in out
    assert [int(row["step"]) for row in rows(tmp_path / "r")] == list(range(1, step + 6))


@pytest.mark.parametrize("code", [15, 3])
def test_a_lost_card_ends_with_status_75_and_a_checkpoint(fake, tmp_path, text, code):
    with Run(fake, tmp_path / "r", text) as run:
        run.until("STEP step=  5")
        fake.values["gpu0.error"] = code
        fake.set()
        status, _, err = run.end()
    assert status == 75
    assert "the sensor was lost (3 readings in a row without a temperature, the last one was 61 C)" in err
    assert err.count("warning: GPU readings:") == 1
    assert list((tmp_path / "r").glob("step_*.pt"))


def test_a_guard_without_a_card_is_refused_and_says_why(fake, tmp_path, text):
    with Run(fake.set(count=0), tmp_path / "r", text) as run:
        status, _, err = run.end()
    assert status == 2
    assert "safetrain: gpu_temp_guard got no temperature of cpu: NVML finds no GPU in this machine" in err
    assert not (tmp_path / "r" / "metrics.csv").exists()


def test_no_call_into_nvml_is_made_in_the_thread_that_trains_after_the_start(fake, tmp_path, text):
    calls = {}
    for steps in (5, 100):
        fake.log.unlink(missing_ok=True)
        with Run(fake, tmp_path / str(steps), text, steps=steps) as run:
            assert run.end()[0] == 0
        made = fake.calls()
        main = made[0][2]  # the thread that began
        assert made[0][0] == "nvmlInitWithFlags"
        assert made[-1][0] == "nvmlShutdown"
        assert sum(name == "nvmlInitWithFlags" for name, _, _ in made) == 1
        calls[steps] = sum(thread == main for _, _, thread in made)
        assert os.getpid() not in {pid for _, pid, _ in made}
    assert calls[5] == calls[100]

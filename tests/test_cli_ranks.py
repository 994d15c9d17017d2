"""``safetrain train`` on several ranks, as a user starts it: ``--world-size``, torchrun, signals, mistakes."""

import csv
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import needs
import pytest

SMALL = [
    *("--layers", "1", "--width", "16", "--heads", "2", "--context", "16", "--batch-size", "4"),
    *("--corpus", __file__, "--scheduler-type", "constant"),
]
TRAIN = ["-m", "safetrain_core", "train", *SMALL]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def safetrain(*flags, launcher=(sys.executable,), timeout=120):
    return subprocess.run(
        [*launcher, *TRAIN, *map(str, flags)], capture_output=True, text=True, timeout=timeout, env=ENVIRONMENT
    )


def rows(folder):
    with open(folder / "metrics.csv") as file:
        return [{k: row[k] for k in ("step", "loss", "gradient_norm", "skip_reason")} for row in csv.DictReader(file)]


RUN = ("--max-steps", 6, "--gradient-accumulation-steps", 2, "--checkpoint-every-n-steps", 3, "--verify-resume")


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    out = tmp_path_factory.mktemp("launched")
    return out, safetrain(*RUN, "--world-size", 2, "--out", out)


@needs.fsdp2
def test_a_run_on_two_ranks_shows_rows_once_a_table_of_ranks_and_proves_its_resume(launched):
    out, done = launched
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines() if "pre_clip=" in line] == ["STEP"] * 6
    assert "2 ranks" in done.stdout
    assert "RESUME VERIFIED: from step 3 to 6 the losses are equal, 2 of 2 shards reloaded byte-equal" in done.stdout
    table = re.findall(r"^ +(\d) +([\d,]+) +([\d,]+) +([\d,]+) +([\d.]+)$", done.stdout, re.M)
    assert [row[0] for row in table] == ["0", "1"]
    assert table[0][4] == table[1][4], "the parameter norm is the same on each rank"
    held, ideal = ([int(row[i].replace(",", "")) for row in table] for i in (2, 3))
    assert sum(held) == sum(ideal), "12 P in sum"
    assert {path.name for path in out.iterdir()} >= {"step_00000003", "step_00000006", "final.pt", "metrics.csv"}


@needs.fsdp2
def test_torchrun_makes_the_same_run(launched, tmp_path):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    done = safetrain(*RUN, "--out", tmp_path / "run", launcher=torchrun)
    assert done.returncode == 0, done.stderr
    assert "RESUME VERIFIED" in done.stdout
    assert rows(tmp_path / "run") == rows(launched[0])
    shown = [
        [line for line in text.splitlines() if line.startswith("STEP")] for text in (done.stdout, launched[1].stdout)
    ]
    assert shown[0] == shown[1]


def test_a_resume_that_is_not_the_same_run_is_told(tmp_path):
    from safetrain_core.records import StepLog, TrainState
    from safetrain_core.train.ranks import RankFacts
    from safetrain_core.train.result import FitResult
    from safetrain_core.train.resume_check import verdict
    from safetrain_core.train.worker import Report

    def report(losses, digests):
        kept = [StepLog(step, 0.1, 1.0, 1.0, loss, None) for step, loss in losses.items()]
        result = FitResult(status="completed", state=TrainState(step=4), rows=kept)
        return Report(0, result, RankFacts(0, 1, 1, 4, 8, 1.0), 0, digests)

    first = [report({3: 0.5, 4: 0.25}, {2: "a", 4: "b"})]
    assert verdict(first, first, 2)[0] is True
    for again, words in (
        (report({3: 0.5, 4: 0.25}, {2: "x", 4: "b"}), "the state of rank 0 reloaded from step 2 differs"),
        (report({3: 0.5, 4: 0.26}, {2: "a", 4: "b"}), "step 4 has loss 0.26, uninterrupted 0.25"),
        (report({3: 0.5}, {2: "a", 4: "b"}), "step 4 has loss None"),
        (report({3: 0.5, 4: 0.25}, {2: "a", 4: "c"}), "the final state at step 4 is not"),
    ):
        holds, told = verdict(first, [again], 2)
        assert not holds
        assert words in told


def started(out, *flags):
    """A long run on two ranks that has made steps, in a process group of its own."""
    process = subprocess.Popen(
        [sys.executable, *TRAIN, "--world-size", "2", "--max-steps", "100000", "--out", str(out), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
    )
    until = time.monotonic() + 60
    while not ((out / "metrics.csv").exists() and len(rows(out)) > 5):
        assert time.monotonic() < until, process.communicate()
        time.sleep(0.1)
    return process


@needs.fsdp2
@pytest.mark.parametrize("to", ["the launching process", "the whole group"])
def test_sigterm_ends_all_ranks_at_one_step_with_a_checkpoint_and_status_143(tmp_path, to):
    process = started(tmp_path)
    (os.kill if to == "the launching process" else os.killpg)(process.pid, signal.SIGTERM)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    assert "interrupted" in out
    last = int(rows(tmp_path)[-1]["step"])
    assert (tmp_path / f"step_{last:08d}" / "manifest.json").exists()
    assert not alive(tmp_path)


@needs.fsdp2
def test_a_rank_that_is_killed_ends_the_run_with_its_name_and_the_last_checkpoint_is_whole(tmp_path):
    process = started(tmp_path, "--checkpoint-every-n-steps", "2")
    victim = next(
        int(pid) for pid in os.listdir("/proc") if pid.isdigit() and parent_is_server_of(int(pid), process.pid)
    )
    os.kill(victim, signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.search(r"safetrain: rank \d was killed by SIGKILL", errors), errors
    assert "Traceback" not in errors
    done = subprocess.run(
        [sys.executable, "-m", "safetrain_core", "verify", str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert "BROKEN" not in done.stdout
    assert not alive(tmp_path)


def parent_is_server_of(pid, launching):
    """Whether ``pid`` is a rank: its parent is the server that the launching process has started."""
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        grandparent = int(Path(f"/proc/{parent}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except (OSError, ValueError):
        return False
    return grandparent == launching


def alive(out):
    """Processes that still name this run on their command line."""
    time.sleep(0.5)
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if str(out).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--world-size", 0), "--world-size 0 must be at least 1"),
        pytest.param(("--world-size", 2, "--async-save"), "async_save=true is for one process", marks=needs.fsdp2),
        (("--world-size", 2, "--use-galore"), "use_galore=true is for one process"),
        (("--world-size", 2, "--corpus", "no-such-file"), "corpus no-such-file does not exist"),
        (("--world-size", 2, "--device", "cuda:7"), "--device cuda:7 is not available"),
        (
            ("--world-size", 2, "--verify-resume", "--max-steps", 2),
            "--verify-resume needs a checkpoint before the run's end",
        ),
    ],
)
def test_a_mistake_is_told_in_one_line_with_status_2(tmp_path, flags, words):
    done = safetrain("--out", tmp_path / "new", *flags)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "STEP" not in done.stdout, "refused after the run, not before it"


@needs.fsdp2
def test_a_resume_that_does_not_fit_is_the_users_mistake_on_ranks_too(launched):
    done = safetrain("--world-size", 2, "--resume", "--max-steps", 9, "--width", 32, "--out", launched[0])
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "does not fit" in done.stderr


@needs.fsdp2
def test_a_folder_that_holds_a_run_is_refused_on_all_ranks_in_one_line(launched):
    done = safetrain("--world-size", 2, "--max-steps", 2, "--out", launched[0])
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "holds a run already" in done.stderr


@needs.fsdp2
def test_overwrite_replaces_the_folders_of_the_old_run(launched, tmp_path):
    import shutil

    shutil.copytree(launched[0], tmp_path / "run")
    done = safetrain("--world-size", 2, "--max-steps", 2, "--out", tmp_path / "run", "--overwrite")
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in (tmp_path / "run").glob("step_*")) == ["step_00000002"]


@needs.fsdp2
@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on file sizes, to have a full disk")
def test_a_full_disk_is_told_of_in_words(tmp_path):
    limit = ("bash", "-c", """trap '' XFSZ; ulimit -f 60; exec "$0" "$@" """, sys.executable)
    done = safetrain(
        *("--width", 64, "--max-steps", 4, "--checkpoint-every-n-steps", 2, "--world-size", 2, "--out", tmp_path / "a"),
        launcher=limit,
    )
    assert done.returncode == 1
    assert re.search(r"safetrain: rank \d could not write .*step_00000002.*; is the disk full", done.stderr)
    assert "Traceback" not in done.stderr

"""What a checkpoint costs, against torch.save and torch.load of the same state on the same disk."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from measure import paired_ratio

from safetrain_core import Checkpoints, atomic_save
from safetrain_core.checkpoint.single import read_checkpoint

AREA = "checkpoint"


@pytest.fixture
def disk():
    folder = Path(tempfile.mkdtemp(dir=os.environ.get("SAFETRAIN_BENCH_DIR", ".")))
    os.sync()  # what others have written is on the disk, and does not wait in line before ours
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def state():
    generator = torch.Generator().manual_seed(0)
    return {"schema": "ckpt.v1", "model": {f"w{i}": torch.randn(1000, 1000, generator=generator) for i in range(100)}}


def plain_save(state, path):
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def test_saving_400_mb_with_its_sum(claim, disk, state):
    ratio = paired_ratio(
        lambda: atomic_save(state, disk / "ours.pt"), lambda: plain_save(state, disk / "theirs.pt"), rounds=15, warmup=2
    )
    claim("atomic_save / torch.save + fsync, 400 MB", ratio, "<=", 1.10, "x")


def test_verify_and_load(claim, disk, state):
    atomic_save(state, disk / "a.pt")
    ratio = paired_ratio(
        lambda: read_checkpoint(disk / "a.pt"),
        lambda: torch.load(disk / "a.pt", map_location="cpu", weights_only=True),
        rounds=15,
        warmup=2,
    )
    claim("verify and load / torch.load, 400 MB", ratio, "<=", 1.35, "x")


def test_an_asynchronous_save_stalls_for_a_part_of_the_synchronous(claim, disk, state):
    beside, now = Checkpoints(disk / "async", keep_last=1, async_save=True), Checkpoints(disk / "sync", keep_last=1)
    stalls, saves = [], []
    for step in range(1, 8):
        start = time.perf_counter()
        beside.save(state, step)
        stalls.append(time.perf_counter() - start)
        beside.wait()
        start = time.perf_counter()
        now.save(state, step)
        saves.append(time.perf_counter() - start)
    claim("asynchronous save's stall / synchronous save", sorted(stalls)[3] / sorted(saves)[3], "<=", 0.25, "x")


def test_a_save_holds_no_second_copy(claim, disk, state):
    code = rf"""
import re, torch
from safetrain_core import atomic_save
def memory(what):
    return int(re.search(what + r":\s+(\d+) kB", open("/proc/self/status").read())[1]) / 1024
state = {{f"w{{i}}": torch.randn(1000, 1000) for i in range(100)}}
atomic_save({{"w": torch.ones(1)}}, r"{disk}/small.pt")
open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far
before = memory("VmRSS")
atomic_save(state, r"{disk}/a.pt")
print(memory("VmHWM") - before)
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    claim("extra peak memory of a 400 MB save", float(told), "<=", 64, "MiB")


def test_five_hundred_kills(claim, tmp_path):
    script = Path(__file__).parents[1] / "checkpoint" / "kill_saver.py"
    done = subprocess.run(
        [sys.executable, script, str(tmp_path), "500"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    claim("kills that lost the previous checkpoint", 500 - int(done.stdout.split()[2]), "<=", 0, "of 500")

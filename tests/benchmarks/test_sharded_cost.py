"""What a sharded checkpoint costs, against plain torch.save and torch.load of the same states, one after the other."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from measure import Measured, paired_ratio

from safetrain_core import load_sharded, save_sharded

AREA = "sharded"
RANKS = 4


@pytest.fixture
def disk():
    folder = Path(tempfile.mkdtemp(dir=os.environ.get("SAFETRAIN_BENCH_DIR", ".")))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def states():
    """64 MB for each of 4 ranks: a piece of the flat parameter, and three more of its length."""
    generator = torch.Generator().manual_seed(0)
    names = ("param_shard", "exp_avg", "exp_avg_sq", "master")
    return [{name: torch.randn(4_000_000, generator=generator) for name in names} for _ in range(RANKS)]


def plain_saves(states, folder):
    for rank, state in enumerate(states):
        with open(folder / f"plain{rank}.bin", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())


def test_saving_four_shards_of_64_mb_with_their_sums(claim, disk, states):
    ratio = paired_ratio(
        lambda: save_sharded(states, disk / "ours", step=1), lambda: plain_saves(states, disk), rounds=15, warmup=2
    )
    claim("save_sharded / four torch.save + fsync in turn, 4 x 64 MB", ratio, "<=", 1.15, "x")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_loading_and_verifying_four_shards_of_64_mb(claim, disk, states):
    """In a process that has loaded nothing before, as one that resumes: memory used again halves the time of a load."""
    save_sharded(states, disk / "ours", step=1)
    plain_saves(states, disk)

    def plain_loads():
        return [torch.load(disk / f"plain{r}.bin", map_location="cpu", weights_only=True) for r in range(RANKS)]

    ratios = []
    for i in range(16):
        pair = (plain_loads, lambda: load_sharded(disk / "ours", RANKS))
        first, second = map(seconds_in_a_child, pair if i % 2 else pair[::-1])
        ratios.append(second / first if i % 2 else first / second)
    claim("load_sharded / four torch.load, 4 x 64 MB", Measured.of(ratios), "<=", 1.35, "x")


def seconds_in_a_child(load):
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        start = time.perf_counter()
        loaded = load()
        os.write(tell, str(time.perf_counter() - start).encode())
        os._exit(len(loaded) == 0)
    os.close(tell)
    assert os.waitpid(child, 0)[1] == 0
    with os.fdopen(told) as file:
        return float(file.read())


def test_a_sharded_save_holds_no_second_copy(claim, disk):
    code = rf"""
import re, torch
from safetrain_core import save_sharded
def memory(what):
    return int(re.search(what + r":\s+(\d+) kB", open("/proc/self/status").read())[1]) / 1024
flat = torch.randn(4 * 16_000_000)
states = [{{"param_shard": piece}} for piece in flat.chunk(4)]  # each is a part of one tensor
save_sharded([{{"param_shard": torch.ones(9)}}] * 4, r"{disk}/small", step=1)
open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far
before = memory("VmRSS")
manifest = save_sharded(states, r"{disk}/large", step=1)
print(memory("VmHWM") - before, sum(s.size_bytes for s in manifest.shards) / flat.nbytes)
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    claim("extra peak memory of save_sharded, 4 x 64 MB", float(told[0]), "<=", 64, "MiB")
    claim("bytes on the disk / bytes of the state", float(told[1]), "<=", 1.001, "x")

"""What a sharded checkpoint costs, against plain torch.save and torch.load of the same states, one after the other."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from measure import Measured, paired_ratio

from safetrain_core import save_sharded

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
    save_sharded(states, disk / "ours", step=1)
    plain_saves(states, disk)
    script = Path(__file__).parents[1] / "checkpoint" / "time_loads.py"
    argv = [sys.executable, script, disk / "ours", "16", *(disk / f"plain{rank}.bin" for rank in range(RANKS))]
    told = subprocess.run(list(map(str, argv)), capture_output=True, text=True, check=True).stdout
    claim("load_sharded / four torch.load, 4 x 64 MB", Measured.of(json.loads(told)), "<=", 1.35, "x")


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

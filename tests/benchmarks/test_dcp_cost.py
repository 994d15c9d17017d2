"""Verified DCP and shards beside torch.distributed.checkpoint as it is, which checks nothing; on one process."""

import hashlib
import logging
import os
import shutil
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
from measure import paired_ratio, ratios_to

from safetrain_core import CheckpointError, load_dcp, load_sharded, save_dcp, save_sharded

AREA = "sharded"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def disk():
    folder = Path(tempfile.mkdtemp(dir=os.environ.get("SAFETRAIN_BENCH_DIR", ".")))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def dcp():
    import torch.distributed.checkpoint as module

    logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.CRITICAL)  # pytest would print it by the page
    return module


@pytest.fixture(scope="module")
def state():
    """256 MB: the four tensors of each of four ranks, as one nested state."""
    generator = torch.Generator().manual_seed(0)
    names = ("param_shard", "exp_avg", "exp_avg_sq", "master")
    return {f"rank{r}": {n: torch.randn(4_000_000, generator=generator) for n in names} for r in range(4)}


def flat(state):
    return {f"{rank}/{name}": tensor for rank, named in state.items() for name, tensor in named.items()}


def sums(folder):
    """A sha256 of each file, as whoever wants to know what DCP has written has to make them."""
    made = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                made.append(hashlib.file_digest(file, "sha256").hexdigest())
    assert made
    return made


class Plain:
    """DCP as its documentation has it, into a new folder each time; the one before goes once the new one is there."""

    def __init__(self, dcp, state, disk):
        self.dcp, self.state, self.disk, self.count = dcp, state, disk, 0

    @property
    def folder(self):
        return self.disk / f"plain{self.count}"

    def save(self):
        self.count += 1
        self.dcp.save(flat(self.state), checkpoint_id=self.folder, no_dist=True)
        shutil.rmtree(self.disk / f"plain{self.count - 1}", ignore_errors=True)

    def load(self, into):
        self.dcp.load(flat(into), checkpoint_id=self.folder, no_dist=True)


def test_saving_256_mb(claim, compare, disk, dcp, state):
    plain = Plain(dcp, state, disk)

    def with_sums():
        plain.save()
        sums(plain.folder)

    def ours():
        save_dcp(state, disk / "ours", step=1)

    def shards():
        save_sharded(list(state.values()), disk / "shards", step=1)

    ratios = ratios_to({"ours": ours, "shards": shards, "sums": with_sums}, plain.save, rounds=15, warmup=2)
    compare("save_dcp / DCP save, which has no sums, 256 MB", ratios["ours"], "x")
    compare("save_sharded / DCP save, which has no sums, 4 x 64 MB", ratios["shards"], "x")
    compare("DCP save and sums of its files / DCP save", ratios["sums"], "x")
    claim("save_dcp / DCP save and sums of its files", paired_ratio(ours, with_sums, rounds=15), "<=", 1.15, "x")


def test_verifying_and_loading_256_mb_in_place(claim, compare, disk, dcp, state):
    plain = Plain(dcp, state, disk)
    plain.save()
    save_dcp(state, disk / "ours", step=1)
    into = {rank: {name: torch.zeros_like(tensor) for name, tensor in named.items()} for rank, named in state.items()}

    def theirs():
        plain.load(into)

    def with_sums():
        sums(plain.folder)
        plain.load(into)

    def ours():
        load_dcp(disk / "ours", into)

    for load in (theirs, ours):
        for tensor in flat(into).values():
            tensor.zero_()
        load()
        assert all(torch.equal(tensor, flat(state)[name]) for name, tensor in flat(into).items())
    compare("load_dcp / DCP load, which verifies nothing, 256 MB", paired_ratio(ours, theirs, rounds=15), "x")
    claim("load_dcp / sums of the files and DCP load", paired_ratio(ours, with_sums, rounds=15), "<=", 1.15, "x")


def flip(folder):
    """One bit in the middle of a tensor of the largest file."""
    largest = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(largest.stat().st_size * 15 // 32)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0x10]))


@pytest.mark.parametrize("name", ["DCP", "load_dcp", "load_sharded"])
def test_one_flipped_bit_in(claim, compare, disk, dcp, state, name):
    into = {rank: {name: torch.zeros_like(tensor) for name, tensor in named.items()} for rank, named in state.items()}
    if name == "DCP":
        plain = Plain(dcp, state, disk)
        plain.save()
        flip(plain.folder)
        plain.load(into)  # it raises nothing
        differ = sum(not torch.equal(tensor, flat(state)[name]) for name, tensor in flat(into).items())
        compare("tensors that a flipped bit spoiled unseen: DCP", differ)
        return
    if name == "load_dcp":
        save_dcp(state, disk, step=1)
        load = partial(load_dcp, disk, into)
    else:
        save_sharded(list(state.values()), disk, step=1)
        load = partial(load_sharded, disk, 4)
    flip(disk)
    with pytest.raises(CheckpointError, match="sha256"):
        load()
    claim(
        f"tensors that a flipped bit spoiled unseen: {name}", sum(t.any().item() for t in flat(into).values()), "<=", 0
    )

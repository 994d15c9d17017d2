"""What the processes of lesson 04 do: save until they are killed, save one shard each, write at the same time.

``launch`` starts them, so they are functions of a module; what they found is what they return.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from safetrain_core import (
    CheckpointError,
    atomic_save,
    load_shard,
    load_sharded,
    save_shard,
    save_sharded,
)
from safetrain_core.checkpoint.sharded_read import read_manifest

from . import sharded_resume as lab


def die() -> None:
    """SIGKILL: nothing in the process can see or delay it."""
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))


# --- shown in the lesson --------------------------------------------------------------------------------------


def save_raw(states, folder, step):
    sizes = [state["param_shard"].numel() for state in states]
    manifest = {"step": step, "world_size": len(states), "numel": sizes}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for rank, state in enumerate(states):
        with open(folder / f"rank{rank}.raw", "wb") as file:
            file.write(lab.raw_bytes(state))  # weights, then the two moments


# --- killed ---------------------------------------------------------------------------------------------------


class _Dying:
    """A file that lets all but the last ``CUT`` bytes of a piece through, and then kills the process."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: bytes) -> None:
        self._file.write(data[: -lab.CUT])
        self._file.flush()
        die()

    def __enter__(self) -> _Dying:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.close()


def save_raw_and_die(source: str, folder: str) -> None:
    """``save_raw`` of the states in ``source``; the kill comes just before the last shard's end."""
    manifest, states = load_sharded(source, read_manifest(source).world_size)
    last, opened = f"rank{len(states) - 1}.raw", open

    def opening(path: Path, mode: str) -> Any:
        file = opened(path, mode)
        return _Dying(file) if path.name == last else file

    globals()["open"] = opening
    Path(folder).mkdir()
    save_raw(states, Path(folder), manifest.step)


def save_and_die(how: str, source: str, folder: str, renames: int) -> None:
    """Save the states in ``source`` over the checkpoint in ``folder``; the kill comes after that many renames."""
    manifest, states = load_sharded(source, read_manifest(source).world_size)
    one_at_a_time, done, replace = threading.Lock(), 0, os.replace

    def replacing(*names: Any) -> None:
        nonlocal done
        with one_at_a_time:
            if done == renames:
                die()
            replace(*names)
            done += 1
            if done == renames == len(states) + 1:  # all are done: before anything else is
                die()

    os.replace = replacing
    save = {"in place": lab.publish_in_place, "save_sharded": save_sharded}[how]
    save(states, Path(folder), manifest.step)


# --- one rank, one file ---------------------------------------------------------------------------------------


def save_own(source: str, folder: str, full_rank: int | None = None) -> tuple[int, str]:
    """This rank loads its own shard from ``source`` and saves it into ``folder``, together with the other ranks.

    Args:
        full_rank: this rank's disk is full: no file of its process may grow beyond 4 KB.

    Returns:
        This rank's elements; and the error, or an empty text.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    manifest, state = load_shard(source, rank, world_size)
    if rank == full_rank:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    try:
        save_shard(state, folder, rank=rank, world_size=world_size, step=manifest.step)
    except CheckpointError as error:
        return state["param_shard"].numel(), str(error)
    return state["param_shard"].numel(), ""


# --- how long -------------------------------------------------------------------------------------------------


def _plain(data: torch.Tensor, path: Path, link_mb_s: float | None = None) -> None:
    view, piece = memoryview(data.numpy()).cast("B"), 1 << 18
    start = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for begin in range(0, len(view), piece):
            file.write(view[begin : begin + piece])
            if link_mb_s is not None:  # as if each rank had a network link of its own
                ahead = (begin + piece) / (link_mb_s * 1e6) - (time.perf_counter() - start)
                time.sleep(max(0.0, ahead))
        if (
            link_mb_s is None
        ):  # else the wait is for the link, not for the disk of this machine
            os.fsync(file.fileno())


#: The link that each rank has in the last of these, as a node has one to its storage.
LINK_MB_S = 20
WAYS: dict[str, tuple[Callable[[torch.Tensor, Path], Any], int]] = {
    "write, fsync": (_plain, 1),
    "atomic_save": (atomic_save, 1),
    "a link each": (lambda data, path: _plain(data, path, LINK_MB_S), 4),
}


def write_times(folder: str, megabytes: int, times: int) -> dict[str, tuple[float, float]]:
    """For each way: seconds in which rank 0 writes it all, and in which each rank writes its part; medians, in turn.

    Args:
        megabytes: in all; a quarter of it through the links.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = Path(folder, f"rank{rank}.bin")
    found = {}
    for name, (write, less) in WAYS.items():
        numbers = megabytes * 250_000 // less
        taken: dict[int, list[float]] = {1: [], ranks: []}
        for turn in range(times + 1):
            for writers in taken:
                data = torch.zeros(numbers // writers if rank < writers else 0)
                dist.barrier()
                start = time.perf_counter()
                if rank < writers:
                    write(data, mine)
                dist.barrier()
                if turn > 0:
                    taken[writers].append(time.perf_counter() - start)
        found[name] = (median(taken[1]), median(taken[ranks]))
    with contextlib.suppress(FileNotFoundError):
        mine.unlink()
    return found

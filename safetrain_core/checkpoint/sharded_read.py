"""Flat shards read back: the manifest first, then that every file is there, then each one verified as it is read."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import CheckpointError
from .atomic import StrPath, load_while
from .checks import shown
from .manifest import MANIFEST, SHARD_SCHEMA, Shard, ShardManifest, read_json
from .summed import sum_of

__all__ = ["FLAT", "load_shard", "load_sharded", "read_manifest", "verify_sharded"]

#: The key of a rank's piece of the flat parameter.
FLAT = "param_shard"

#: Files written or read at a time by one process.
AT_ONCE = 8


def numel_of(state: Mapping[str, Any]) -> int:
    """Elements of a rank's ``param_shard``; 0 where it has none."""
    return state[FLAT].numel() if state.get(FLAT) is not None else 0


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def beside_one_another(work: Callable[[int], Any], count: int) -> list[Any]:
    """What ``work`` returns for 0 to ``count`` - 1, a few at a time in threads, in order."""
    with ThreadPoolExecutor(min(count, AT_ONCE)) as pool:
        return list(pool.map(work, range(count)))


def read_manifest(src_dir: StrPath, expected_world_size: int | None = None) -> ShardManifest:
    """The manifest of ``src_dir``, checked; no shard is opened.

    Raises:
        CheckpointError: none, damaged, hostile, ``unknown schema``, ``world_size mismatch``.

    >>> read_manifest("no-such-folder")
    Traceback (most recent call last):
    ...
    safetrain_core.errors.CheckpointError: no-such-folder has no manifest.json: no checkpoint, or one that was never ...
    """
    folder = Path(src_dir)
    manifest = ShardManifest.from_json(read_json(folder), folder / MANIFEST)
    if expected_world_size is not None and manifest.world_size != expected_world_size:
        raise CheckpointError(
            f"world_size mismatch: {folder} was saved on {manifest.world_size} ranks, {expected_world_size} are to "
            f"load it; resume on {manifest.world_size}, or reshard() it first"
        )
    return manifest


def verify_sharded(src_dir: StrPath) -> ShardManifest:
    """The manifest, once every shard was found whole; nothing is unpickled.

    Raises:
        CheckpointError: see ``load_sharded``.
    """
    manifest = read_manifest(src_dir)
    for shard in manifest.shards:
        _check_file(shard, Path(src_dir))
    beside_one_another(
        lambda rank: _check_sum(manifest.shards[rank], Path(src_dir) / manifest.shards[rank].path), manifest.world_size
    )
    return manifest


def load_sharded(src_dir: StrPath, expected_world_size: int) -> tuple[ShardManifest, list[dict[str, Any]]]:
    """Load and verify every rank's state; tensors on the CPU.

    Returns:
        The manifest, and the states in order of rank.

    Raises:
        CheckpointError: ``world_size mismatch``, ``shard file missing``, ``sha256 mismatch on rank`` (a truncated shard
            too), ``unknown schema``, or another reason not to trust it; nothing was unpickled but plain types.

    >>> import tempfile, torch
    >>> from safetrain_core import save_sharded
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save_sharded([{"param_shard": torch.ones(2)}, {"param_shard": torch.zeros(2)}], folder, step=10)
    ...     manifest, states = load_sharded(folder, expected_world_size=2)
    ...     _ = load_sharded(folder, expected_world_size=4)
    Traceback (most recent call last):
    ...
    safetrain_core.errors.CheckpointError: world_size mismatch: ... was saved on 2 ranks, 4 are to load it; ...
    >>> manifest.step, torch.cat([state["param_shard"] for state in states])
    (10, tensor([1., 1., 0., 0.]))
    """
    manifest, folder = read_manifest(src_dir, expected_world_size), Path(src_dir)
    for shard in manifest.shards:  # all of them are there, before the first is read
        _check_file(shard, folder)
    # The sums are made beside the loads, by as many threads as there are processors left for them: one more made it a
    # fourth slower. The loads stay in one thread: glibc gives memory of this size back to the system in any thread but
    # the main one, and clearing new pages took longer than the load itself.
    with ThreadPoolExecutor(min(manifest.world_size, AT_ONCE, max(1, processors() - 1))) as pool:
        checks = [pool.submit(_check_sum, shard, folder / shard.path) for shard in manifest.shards]
        try:
            states = [_read(manifest, rank, folder, check.result) for rank, check in enumerate(checks)]
        finally:
            pool.shutdown(cancel_futures=True)
    return manifest, states


def load_shard(src_dir: StrPath, rank: int, expected_world_size: int) -> tuple[ShardManifest, dict[str, Any]]:
    """Load and verify one rank's own state; tensors on the CPU.

    Returns:
        The manifest, and the state of ``rank``.

    Raises:
        ValueError: there is no such rank. CheckpointError: see ``load_sharded``.

    >>> import tempfile, torch
    >>> from safetrain_core import save_sharded
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save_sharded([{"param_shard": torch.ones(2)}, {"param_shard": torch.zeros(2)}], folder, step=10)
    ...     load_shard(folder, rank=1, expected_world_size=2)[1]
    {'param_shard': tensor([0., 0.])}
    """
    manifest = read_manifest(src_dir, expected_world_size)
    if not 0 <= rank < manifest.world_size:
        raise ValueError(f"rank={rank} must be from 0 to {manifest.world_size - 1}")
    shard, folder = manifest.shards[rank], Path(src_dir)
    _check_file(shard, folder)
    return manifest, _read(manifest, rank, folder, lambda: _check_sum(shard, folder / shard.path))


def _check_file(shard: Shard, folder: Path) -> None:
    path = folder / shard.path
    try:
        about = os.lstat(path)
    except FileNotFoundError:
        raise CheckpointError(f"shard file missing: {path} of rank {shard.rank}; take an older checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"{path} of rank {shard.rank} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(about.st_mode):
        raise CheckpointError(f"{path} of rank {shard.rank} is no regular file (a link?); it is refused unopened")
    if about.st_size != shard.size_bytes:
        raise CheckpointError(
            f"sha256 mismatch on rank {shard.rank}: {path} has {about.st_size} bytes of {shard.size_bytes}; it is "
            "torn, take an older checkpoint"
        )


def _read(manifest: ShardManifest, rank: int, folder: Path, check: Callable[[], None]) -> dict[str, Any]:
    shard = manifest.shards[rank]
    path = folder / shard.path
    payload = load_while(path, check)
    schema, *belongs, state = (
        (payload.get(key) if isinstance(payload, dict) else None) for key in ("schema", "rank", "step", "state")
    )
    if not (isinstance(schema, str) and schema == SHARD_SCHEMA):
        raise CheckpointError(f"unknown schema {shown(schema)} in {path} of rank {rank}: not a shard of this version")
    if [type(x) for x in belongs] != [int, int] or belongs != [rank, manifest.step] or not isinstance(state, dict):
        raise CheckpointError(
            f"{path} is the shard of rank {shown(belongs[0])} at step {shown(belongs[1])}, expected rank {rank} at "
            f"step {manifest.step}; it belongs to another checkpoint"
        )
    flat = state.get(FLAT)
    if flat is not None and not (isinstance(flat, Tensor) and flat.dim() == 1):
        raise CheckpointError(f"{path}: {FLAT} is {shown(flat)}, expected a 1-D tensor")
    if numel_of(state) != shard.param_shard_numel:
        raise CheckpointError(
            f"{path}: {FLAT} has {numel_of(state)} elements, the manifest says {shard.param_shard_numel}"
        )
    return state


def _check_sum(shard: Shard, path: Path) -> None:
    try:
        with open(path, "rb") as file:
            found = sum_of(file, shard.size_bytes)
    except OSError as error:
        raise CheckpointError(f"{path} of rank {shard.rank} cannot be read: {error.strerror}") from error
    if found != shard.sha256:
        raise CheckpointError(
            f"sha256 mismatch on rank {shard.rank}: {path} has {found[:12]}..., the manifest {shard.sha256[:12]}...; "
            "it is altered, take an older checkpoint"
        )

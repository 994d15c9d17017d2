"""One file per rank and a manifest over them: ``rank<r>.bin``, ``manifest.json``, in a folder ``step_<n>``.

For state that each rank holds a part of, where bandwidth adds up over ranks. A rank's state is a dict of plain types
and tensors. Its 1-D tensor ``param_shard``, where it has one, is its piece of a flat parameter (ZeRO-1, FSDP1): those
pieces, in order of rank, are the whole, and ``reshard`` cuts them anew. For FSDP2's DTensors see ``dcp``.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..distributed import everyones, mains
from ..distributed import rank as this_rank
from ..distributed import world_size as this_world_size
from ..errors import CheckpointError, type_of
from .atomic import StrPath, atomic_open
from .checks import LARGEST_NUMBER
from .folders import alone_in, sweep
from .manifest import MANIFEST, SHARD_SCHEMA, Shard, ShardManifest, publish, read_json
from .plain import ordinary, plain
from .sharded_read import FLAT, beside_one_another, numel_of
from .summed import write_summed

__all__ = ["save_shard", "save_sharded"]

PerRank = Mapping[int, Mapping[str, Any]] | Sequence[Mapping[str, Any]]


def save_sharded(per_rank_state: PerRank, dest_dir: StrPath, step: int) -> ShardManifest:
    """Save the states of all ranks into ``dest_dir`` itself, from one process, the files beside one another.

    Of two processes that save into one folder the second waits for the first.

    Args:
        per_rank_state: state of each rank, as a list, or a dict with keys 0 to n - 1.
        step: the attempt that it was saved after.

    Raises:
        ValueError: no state, ranks that are not 0 to n - 1, a negative step, or something that could not be read
            back; nothing is written then.
        OSError: see ``atomic_save``; a checkpoint that ``dest_dir`` held still loads.

    >>> import tempfile
    >>> from safetrain_core import load_sharded
    >>> states = [{"param_shard": torch.full((2,), float(r))} for r in range(2)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     manifest = save_sharded(states, folder, step=10)
    ...     loaded, again = load_sharded(folder, expected_world_size=2)
    ...     loaded == manifest, again[1]["param_shard"], sorted(os.listdir(folder))
    (True, tensor([1., 1.]), ['manifest.json', 'rank0.bin', 'rank1.bin'])
    """
    states = _in_order(per_rank_state)
    payloads = [_payload(state, rank, step) for rank, state in enumerate(states)]
    folder = Path(dest_dir)
    with alone_in(folder):
        names = _fresh_names(folder, len(states))
        with _removing_after(BaseException, folder, names):
            written = beside_one_another(lambda rank: _write(payloads[rank], folder / names[rank]), len(states))
            return _publish(folder, names, written, [numel_of(state) for state in states], step)


def save_shard(state: Mapping[str, Any], dest_dir: StrPath, *, rank: int, world_size: int, step: int) -> ShardManifest:
    """Save this rank's own state; every rank calls it, and rank 0 publishes the manifest once all have landed.

    Args:
        state: this rank's. rank, world_size: as the process group has them.

    Raises:
        ValueError: they are not the process group's, or as for ``save_sharded``.
        CheckpointError: a rank could not write; told on every rank, with its error. An older checkpoint still loads.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_shard({"param_shard": torch.ones(3)}, folder, rank=0, world_size=1, step=4).shards[0].param_shard_numel
    3
    """
    if (rank, world_size) != (this_rank(), this_world_size()):
        raise ValueError(
            f"rank={rank} of world_size={world_size}, but this process is rank {this_rank()} of {this_world_size()}; "
            "start it with torchrun or launch, or use save_sharded from one process"
        )
    folder = Path(dest_dir)
    names = mains(_fresh_names(folder, world_size) if rank == 0 else None)
    # Only after a failure that all have heard of: where the connection is lost, rank 0 may publish yet.
    with _removing_after(CheckpointError, folder, [names[rank]]):
        written, error = _without_raising(lambda: _write(_payload(state, rank, step), folder / names[rank]))
        landed = everyones((error, step, written, numel_of(state) if error is None else 0))
        for number, (failed, at, *_) in enumerate(landed):
            if failed is not None:
                raise CheckpointError(
                    f"rank {number} could not write its shard into {folder} ({failed}); nothing is published"
                )
            if at != landed[0][1]:
                raise CheckpointError(
                    f"rank {number} saves step {at} and rank 0 step {landed[0][1]}; nothing is published"
                )
        sums, numels = [sums for *_, sums, _ in landed], [numel for *_, numel in landed]
        manifest, failed = mains(
            _without_raising(lambda: _publish(folder, names, sums, numels, step)) if rank == 0 else None
        )
        if failed is not None:
            raise CheckpointError(f"rank 0 could not publish the manifest in {folder} ({failed})")
        return manifest


def _without_raising(work: Callable[[], Any]) -> tuple[Any, str | None]:
    """What ``work`` returns, or what it raises, as text: the other ranks wait to hear of either."""
    try:
        return work(), None
    except Exception as failure:  # noqa: BLE001  raised again on every rank
        return None, f"{type(failure).__name__}: {failure}"


@contextlib.contextmanager
def _removing_after(failure: type[BaseException], folder: Path, names: list[str]) -> Iterator[None]:
    """Take back the files of a save that fails, so that they do not fill a full disk; not those that are published."""
    try:
        yield
    except failure:
        with contextlib.suppress(CheckpointError, OSError):
            published = json.dumps(read_json(folder)) if os.path.lexists(folder / MANIFEST) else ""
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    if name not in published:
                        os.unlink(folder / name)
        raise


def _in_order(per_rank_state: PerRank) -> list[Mapping[str, Any]]:
    if not isinstance(per_rank_state, Mapping):
        states = list(per_rank_state)
    elif sorted(per_rank_state) == list(range(len(per_rank_state))):
        states = [per_rank_state[rank] for rank in range(len(per_rank_state))]
    else:
        raise ValueError(
            f"per_rank_state has ranks {list(per_rank_state)[:9]}, expected 0 to {len(per_rank_state) - 1}"
        )
    if not states:
        raise ValueError("per_rank_state is empty; give the state of at least one rank")
    return states


def _payload(state: Mapping[str, Any], rank: int, step: int) -> dict[str, Any]:
    if not isinstance(state, Mapping):
        raise ValueError(f"the state of rank {rank} is {type_of(state)}, expected a dict")
    if type(step) is not int or not 0 <= step <= LARGEST_NUMBER:
        raise ValueError(f"step={step!r} must be an integer from 0 to {LARGEST_NUMBER}")
    flat = state.get(FLAT)
    if flat is not None and not (isinstance(flat, Tensor) and flat.dim() == 1):
        raise ValueError(f"{FLAT} of rank {rank} must be a 1-D tensor; flatten it")
    where = f"state of rank {rank}"
    return {"schema": SHARD_SCHEMA, "rank": rank, "step": step, "state": _without_the_rest(plain(dict(state), where))}


def _without_the_rest(state: dict[str, Any]) -> dict[str, Any]:
    """``state`` without the memory around its tensors, which torch.save would write, too; nothing is copied.

    A piece of a flat tensor (``flat.chunk(4)``) shares the memory of the whole, and each rank would save all of it.
    """
    used: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        if not ordinary(tensor):
            return tensor
        at = tensor.untyped_storage()._cdata
        used[at] = used.get(at, 0) + tensor.nbytes
        return tensor

    def alone(tensor: Tensor) -> Tensor:
        if not ordinary(tensor):  # its memory alone does not say what is in it
            return tensor
        memory, size = tensor.untyped_storage(), tensor.element_size()
        if memory.nbytes() <= used[memory._cdata]:
            return tensor
        span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
        begin = tensor.storage_offset() * size
        piece = memory[begin : begin + span * size]
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(piece, 0, tensor.shape, tensor.stride())

    plain(state, tensor=count)
    return plain(state, tensor=alone)


def _fresh_names(folder: Path, world_size: int) -> list[str]:
    """Names that no manifest has: plain ones in a new folder, with a nonce where a checkpoint is to be replaced."""
    nonce = f".{secrets.token_hex(6)}" if os.path.lexists(folder / MANIFEST) else ""
    return [f"rank{rank}{nonce}.bin" for rank in range(world_size)]


def _write(payload: dict[str, Any], path: Path) -> tuple[str, int]:
    with atomic_open(path) as file:
        return write_summed(payload, file)


def _publish(
    folder: Path, names: list[str], written: list[tuple[str, int]], numels: list[int], step: int
) -> ShardManifest:
    offsets = [sum(numels[:rank]) for rank in range(len(numels))]
    shards = tuple(
        Shard(rank, name, digest, size, offset, numel)
        for rank, (name, (digest, size), offset, numel) in enumerate(zip(names, written, offsets, numels, strict=True))
    )
    manifest = ShardManifest(SHARD_SCHEMA, len(shards), step, time.time(), shards)
    publish(manifest.to_json(), folder)
    sweep(folder, keep=set(names))
    return manifest

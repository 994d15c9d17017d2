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
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..distributed import everyones, mains
from ..distributed import rank as this_rank
from ..distributed import world_size as this_world_size
from ..errors import CheckpointError
from .atomic import StrPath, atomic_open, load_while, plain, sum_of, write_summed
from .manifest import LARGEST_NUMBER, MANIFEST, SHARD_SCHEMA, Shard, ShardManifest, publish, read_json, shown, sweep

__all__ = ["FLAT", "load_shard", "load_sharded", "read_manifest", "reshard", "save_shard", "save_sharded"]

#: The key of a rank's piece of the flat parameter.
FLAT = "param_shard"

#: Files written or read at a time by one process.
AT_ONCE = 8

PerRank = Mapping[int, Mapping[str, Any]] | Sequence[Mapping[str, Any]]


def save_sharded(per_rank_state: PerRank, dest_dir: StrPath, step: int) -> ShardManifest:
    """Save the states of all ranks into ``dest_dir`` itself, from one process, the files beside one another.

    Args:
        per_rank_state: state of each rank, as a list, or a dict with keys 0 to n - 1.
        step: the attempt that it was saved after.

    Raises:
        ValueError: no state, ranks that are not 0 to n - 1, a negative step, or something that could not be read
            back; nothing is written then.
        OSError: see ``atomic_save``; a checkpoint that ``dest_dir`` held still loads.

    >>> import tempfile
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
    names = _fresh_names(folder, len(states))
    with _removing_after(BaseException, folder, names):
        written = _beside_one_another(lambda rank: _write(payloads[rank], folder / names[rank]), len(states))
        return _publish(folder, names, written, [_numel(state) for state in states], step)


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
        landed = everyones((error, step, written, _numel(state) if error is None else 0))
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
        raise ValueError(f"the state of rank {rank} is a {type(state).__name__}, expected a dict")
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
        at = tensor.untyped_storage()._cdata
        used[at] = used.get(at, 0) + tensor.nbytes
        return tensor

    def alone(tensor: Tensor) -> Tensor:
        memory, size = tensor.untyped_storage(), tensor.element_size()
        if memory.nbytes() <= used[memory._cdata]:
            return tensor
        span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
        begin = tensor.storage_offset() * size
        piece = memory[begin : begin + span * size]
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(piece, 0, tensor.shape, tensor.stride())

    plain(state, tensor=count)
    return plain(state, tensor=alone)


def _numel(state: Mapping[str, Any]) -> int:
    return state[FLAT].numel() if state.get(FLAT) is not None else 0


def _fresh_names(folder: Path, world_size: int) -> list[str]:
    """Names that no manifest has: plain ones in a new folder, with a nonce where a checkpoint is to be replaced."""
    nonce = f".{secrets.token_hex(6)}" if os.path.lexists(folder / MANIFEST) else ""
    return [f"rank{rank}{nonce}.bin" for rank in range(world_size)]


def _beside_one_another(work: Callable[[int], Any], count: int) -> list[Any]:
    with ThreadPoolExecutor(min(count, AT_ONCE)) as pool:
        return list(pool.map(work, range(count)))


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


# --- loading ----------------------------------------------------------------------------------------------------


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


def load_sharded(src_dir: StrPath, expected_world_size: int) -> tuple[ShardManifest, list[dict[str, Any]]]:
    """Load and verify every rank's state; tensors on the CPU.

    Returns:
        The manifest, and the states in order of rank.

    Raises:
        CheckpointError: ``world_size mismatch``, ``shard file missing``, ``sha256 mismatch on rank`` (a truncated shard
            too), ``unknown schema``, or another reason not to trust it; nothing was unpickled but plain types.
    """
    manifest, folder = read_manifest(src_dir, expected_world_size), Path(src_dir)
    for shard in manifest.shards:  # all of them are there, before the first is read
        _check_file(shard, folder)
    # The sums are made beside one another, and beside the loads. These stay in one thread: glibc gives memory of this
    # size back to the system in any thread but the main one, and clearing new pages took longer than the load itself.
    with ThreadPoolExecutor(min(manifest.world_size, AT_ONCE)) as pool:
        checks = [pool.submit(_check_sum, shard, folder / shard.path) for shard in manifest.shards]
        try:
            states = [_read(manifest, rank, folder, check.result) for rank, check in enumerate(checks)]
        finally:
            pool.shutdown(cancel_futures=True)
    return manifest, states


def load_shard(src_dir: StrPath, rank: int, expected_world_size: int) -> tuple[ShardManifest, dict[str, Any]]:
    """Load and verify one rank's own state.

    Raises:
        ValueError: there is no such rank. CheckpointError: see ``load_sharded``.
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
    if _numel(state) != shard.param_shard_numel:
        raise CheckpointError(
            f"{path}: {FLAT} has {_numel(state)} elements, the manifest says {shard.param_shard_numel}"
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


# --- another world size ---------------------------------------------------------------------------------------------


def reshard(src_dir: StrPath, dest_dir: StrPath, new_world_size: int, *, drop: Sequence[str] = ()) -> ShardManifest:
    """Cut the flat shards of ``src_dir`` anew for ``new_world_size`` ranks, into ``dest_dir``.

    A 1-D tensor as long as its rank's ``param_shard``, on every rank, is a shard too, as Adam's moments are: pieces are
    joined in order of rank and cut into pieces that differ by at most one element, the longer ones first. Everything
    else has to be equal on all ranks, and goes to each.

    Args:
        drop: keys of the state that are each rank's own (random states, say) and are left out.

    Raises:
        ValueError: ``new_world_size`` below 1, or ``dest_dir`` is ``src_dir``.
        CheckpointError: see ``load_sharded``; no ``param_shard``; something that differs between ranks, by name.

    >>> import tempfile
    >>> states = [{"param_shard": torch.arange(3.0) + 3 * r, "lr": 0.1} for r in range(4)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save_sharded(states, folder + "/four", step=10)
    ...     manifest = reshard(folder + "/four", folder + "/two", 2)
    ...     [s.param_shard_numel for s in manifest.shards], load_shard(folder + "/two", 1, 2)[1]["param_shard"]
    ([6, 6], tensor([ 6.,  7.,  8.,  9., 10., 11.]))
    """
    if new_world_size < 1:
        raise ValueError(f"new_world_size={new_world_size} must be at least 1")
    if os.path.realpath(src_dir) == os.path.realpath(dest_dir):
        raise ValueError(
            f"dest_dir is src_dir, {src_dir}; name another folder, and keep the old one until it is proved"
        )
    manifest, states = load_sharded(src_dir, read_manifest(src_dir).world_size)
    numels = [shard.param_shard_numel for shard in manifest.shards]
    if sum(numels) == 0:
        raise CheckpointError(f"{src_dir} holds no {FLAT}: only flat shards can be cut anew; for FSDP2 see load_dcp")
    kept = [{key: value for key, value in state.items() if key not in drop} for state in states]
    return save_sharded(_cut_anew(kept, numels, new_world_size, "state"), dest_dir, manifest.step)


def _cut_anew(values: list[Any], numels: list[int], count: int, where: str) -> list[Any]:
    """What each of ``count`` ranks gets of the values that the old ranks had at one place of their state."""
    first = values[0]
    if all(isinstance(v, Tensor) and v.shape == (n,) for v, n in zip(values, numels, strict=True)):
        return list(torch.tensor_split(torch.cat(values), count))
    if all(isinstance(v, dict) and v.keys() == first.keys() for v in values):
        made = {key: _cut_anew([v[key] for v in values], numels, count, f"{where}[{key!r}]") for key in first}
        return [{key: pieces[rank] for key, pieces in made.items()} for rank in range(count)]
    if all(type(v) is type(first) and isinstance(v, list | tuple) and len(v) == len(first) for v in values):
        parts = [_cut_anew([v[i] for v in values], numels, count, f"{where}[{i}]") for i in range(len(first))]
        return [type(first)(piece[rank] for piece in parts) for rank in range(count)]
    for rank, value in enumerate(values):
        if not _alike(first, value):
            raise CheckpointError(
                f"{where} differs between rank 0 and rank {rank} and is no flat shard; it cannot be cut anew. "
                "Name its key in drop=(...) to leave it out"
            )
    return [first] * count


def _alike(a: Any, b: Any) -> bool:
    """Whether two leaves are equal, or two containers have the same places."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys()
    if isinstance(a, list | tuple):
        return len(a) == len(b)
    return bool(a == b or (a != a and b != b))

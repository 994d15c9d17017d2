"""Flat shards for another number of ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from .atomic import StrPath
from .manifest import ShardManifest
from .sharded import save_sharded
from .sharded_read import FLAT, load_sharded, read_manifest

__all__ = ["reshard"]


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
    >>> from safetrain_core import load_shard
    >>> states = [{"param_shard": torch.arange(3.0) + 3 * r, "lr": 0.1} for r in range(4)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save_sharded(states, folder + "/four", step=10)
    ...     manifest = reshard(folder + "/four", folder + "/two", 2)
    ...     [s.param_shard_numel for s in manifest.shards], load_shard(folder + "/two", 1, 2)[1]["param_shard"]
    ([6, 6], tensor([ 6.,  7.,  8.,  9., 10., 11.]))
    """
    if type(new_world_size) is not int or new_world_size < 1:
        raise ValueError(f"new_world_size={new_world_size!r} must be a whole number, at least 1")
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

"""States to save, and what a stranger could do to a sharded checkpoint."""

import hashlib
import json
import os

import torch
from rank_workers import shard_of


def states(count, length=5):
    return [shard_of(rank, length) for rank in range(count)]


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


def names(folder):
    return sorted(os.listdir(folder))


def edit(folder, change):
    """Rewrite the manifest of ``folder``."""
    told = json.loads((folder / "manifest.json").read_text())
    change(told)
    (folder / "manifest.json").write_text(json.dumps(told))


def rewrite(folder, rank, payload):
    """Another payload for a rank, with its right sum in the manifest: what a stranger could make."""
    path = folder / json.loads((folder / "manifest.json").read_text())["shards"][rank]["path"]
    torch.save(payload, path)
    data = path.read_bytes()
    about = {"sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}
    edit(folder, lambda told: told["shards"][rank].update(about))

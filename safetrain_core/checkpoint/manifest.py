"""The manifest of a checkpoint that is a folder: what is part of it, and the sum of each file.

A folder is a checkpoint when it has a ``manifest.json``, and only what that names is part of it. Files are written
first, under names that no manifest has yet; then the manifest takes the old one's place by one rename; then what it
does not name is removed. So at each moment the old checkpoint or the new one is whole.

A manifest is read as if a stranger had written it: its size, its types, its numbers and its paths are checked before
anything else is opened.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .atomic import StrPath, atomic_write_bytes, sync_folder
from .checks import checked_fields, checked_sha256, count, listed, no_key_twice, seconds, shown

__all__ = [
    "CHECKPOINT_STEP",
    "MANIFEST",
    "Shard",
    "ShardManifest",
    "is_checkpoint",
    "publish",
    "read_json",
]

MANIFEST = "manifest.json"

#: The step at which the lessons' sharded runs save, and from which their second halves resume.
CHECKPOINT_STEP = 10

#: Of flat shards. A schema starts with ``ckpt``, as that of a one-file checkpoint does.
SHARD_SCHEMA = "ckpt.shards.v1"

#: A manifest of 200,000 files is smaller than this; a larger one is refused unread.
LARGEST_MANIFEST = 64 * 2**20

SHARD_NAME = re.compile(r"rank(0|[1-9][0-9]{0,6})(\.[0-9a-f]{12})?\.bin")
#: Where DCP's files are, inside a checkpoint folder.
PART_FOLDER = re.compile(r"dcp\.[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's file.

    Args:
        path: bare file name. sha256: of the whole file, 64 hexadecimal digits. size_bytes: of the file.
        param_shard_offset, param_shard_numel: where its ``param_shard`` lies in the flat parameter, in elements.
    """

    rank: int
    path: str
    sha256: str
    size_bytes: int
    param_shard_offset: int
    param_shard_numel: int


@dataclass(frozen=True, slots=True)
class ShardManifest:
    """What a sharded checkpoint consists of.

    Args:
        schema: starts with ``ckpt``. world_size: number of shards. step: the attempt that it was saved after.
        wall_clock_seconds: when, in seconds since 1970.
        shards: one per rank, in order of rank.

    >>> shard = Shard(0, "rank0.bin", "0" * 64, 10, 0, 2)
    >>> manifest = ShardManifest(SHARD_SCHEMA, 1, 7, 0.0, (shard,))
    >>> ShardManifest.from_json(manifest.to_json(), "here") == manifest
    True
    """

    schema: str
    world_size: int
    step: int
    wall_clock_seconds: float
    shards: tuple[Shard, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain types."""
        return {**asdict(self), "shards": [asdict(shard) for shard in self.shards]}

    @classmethod
    def from_json(cls, told: Any, where: StrPath) -> ShardManifest:
        """The manifest that ``told`` holds, or ``CheckpointError`` with what is wrong in it."""
        fields = checked_fields(told, SHARD_SCHEMA, ("world_size", "step", "shards", "wall_clock_seconds"), where)
        world_size, step = (
            count(fields["world_size"], "world_size", where, least=1),
            count(fields["step"], "step", where),
        )
        entries = listed(fields["shards"], "shards", where)
        if len(entries) != world_size:
            raise CheckpointError(f"{where} names {len(entries)} shards for world_size={world_size}; it is damaged")
        shards, offset = [], 0
        for number, entry in enumerate(entries):
            shard = _shard(entry, number, where)
            if shard.param_shard_offset != offset:
                raise CheckpointError(
                    f"{where}: rank {number} begins at element {shard.param_shard_offset}, expected {offset}"
                )
            offset += shard.param_shard_numel
            shards.append(shard)
        return cls(SHARD_SCHEMA, world_size, step, seconds(fields["wall_clock_seconds"], where), tuple(shards))


def _shard(entry: Any, number: int, where: StrPath) -> Shard:
    names = tuple(Shard.__dataclass_fields__)
    if not isinstance(entry, dict) or set(entry) != set(names):
        raise CheckpointError(f"{where}: shard {number} must have exactly {', '.join(names)}; it is damaged")
    rank = count(entry["rank"], f"rank of shard {number}", where)
    if rank != number:
        raise CheckpointError(f"{where}: rank {number} is missing or rank {rank} is there twice; it is damaged")
    path = entry["path"]
    match = SHARD_NAME.fullmatch(path) if isinstance(path, str) else None
    if match is None or int(match[1]) != rank:
        raise CheckpointError(
            f"{where}: the path {shown(path)} of rank {rank} is not a file name of this kind (rank{rank}.bin); "
            "it is refused unopened"
        )
    numbers = {
        key: count(entry[key], f"{key} of rank {rank}", where)
        for key in ("size_bytes", "param_shard_offset", "param_shard_numel")
    }
    return Shard(rank, path, checked_sha256(entry["sha256"], f"rank {rank}", where), **numbers)


def read_json(folder: Path) -> Any:
    """``manifest.json`` of ``folder``, decoded.

    Raises:
        CheckpointError: there is none, it is a link or no file, too large, or not JSON in UTF-8.
    """
    path = folder / MANIFEST
    try:
        about = os.lstat(path)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {MANIFEST}: no checkpoint, or one that was never finished") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not stat.S_ISREG(about.st_mode):
        raise CheckpointError(f"{path} is no regular file (a link?); it is refused unopened")
    if about.st_size > LARGEST_MANIFEST:
        raise CheckpointError(
            f"{path} has {about.st_size} bytes, at most {LARGEST_MANIFEST} are read; it is no manifest"
        )
    try:
        return json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=no_key_twice)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a manifest: {str(error)[:100]}; it is damaged") from error


def publish(told: dict[str, Any], folder: Path) -> None:
    """Make ``told`` the manifest of ``folder``, by one rename, durably."""
    with contextlib.suppress(PermissionError):  # the folder may have been made, and not synced, by somebody else
        sync_folder(folder.parent)
    atomic_write_bytes((json.dumps(told, indent=1, allow_nan=False) + "\n").encode(), folder / MANIFEST)


def is_checkpoint(folder: Path) -> bool:
    """Whether ``folder`` has a manifest of ours; what it names may still be broken."""
    try:
        told = read_json(folder)
    except CheckpointError:
        return False
    return isinstance(told, dict) and str(told.get("schema")).startswith("ckpt")

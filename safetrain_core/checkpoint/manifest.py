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
import math
import os
import re
import shutil
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .atomic import StrPath, atomic_write_bytes, sync_folder

__all__ = [
    "CHECKPOINT_STEP",
    "MANIFEST",
    "Shard",
    "ShardManifest",
    "all_checkpoints",
    "read_json",
    "remove_checkpoint",
    "rotate_checkpoints",
]

MANIFEST = "manifest.json"

#: The step at which the lessons' sharded runs save, and from which their second halves resume.
CHECKPOINT_STEP = 10

#: Of flat shards. A schema starts with ``ckpt``, as that of a one-file checkpoint does.
SHARD_SCHEMA = "ckpt.shards.v1"

#: A manifest of a million files is smaller than this; a larger one is refused unread.
LARGEST_MANIFEST = 64 * 2**20

#: No size, offset or step is larger.
LARGEST_NUMBER = 2**62

SHARD_NAME = re.compile(r"rank(0|[1-9]\d{0,6})(\.[0-9a-f]{12})?\.bin")
FOLDER_NAME = re.compile(r"step_(\d{1,18})")
#: Where DCP's files are, inside a checkpoint folder.
PART_FOLDER = re.compile(r"dcp\.[0-9a-f]{12}")
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{12}\.tmp")


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
        fields = checked_fields(told, ("world_size", "step", "shards", "wall_clock_seconds"), where)
        if fields["schema"] != SHARD_SCHEMA:
            raise CheckpointError(
                f"unknown schema {fields['schema'][:40]!r} in {where}: expected {SHARD_SCHEMA}; another kind of folder"
            )
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
            f"{where}: the path {str(path)[:60]!r} of rank {rank} is not a file name of this kind (rank{rank}.bin); "
            "it is refused unopened"
        )
    numbers = {
        key: count(entry[key], f"{key} of rank {rank}", where)
        for key in ("size_bytes", "param_shard_offset", "param_shard_numel")
    }
    return Shard(rank, path, checked_sha256(entry["sha256"], f"rank {rank}", where), **numbers)


# --- reading what a stranger may have written -----------------------------------------------------------------


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
        return json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=_no_key_twice)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a manifest: {str(error)[:100]}; it is damaged") from error


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key is there twice")
    return made


def checked_fields(told: Any, names: tuple[str, ...], where: StrPath) -> dict[str, Any]:
    """``told`` as a dict with exactly ``names`` and a ``schema`` that starts with ckpt."""
    if not isinstance(told, dict):
        raise CheckpointError(f"{where} holds a {type(told).__name__}, expected an object; it is no manifest")
    schema = told.get("schema")
    if not isinstance(schema, str) or not schema.startswith("ckpt"):
        raise CheckpointError(f"unknown schema {str(schema)[:40]!r} in {where}: not a safetrain checkpoint")
    missing, more = set(names) - told.keys(), told.keys() - {*names, "schema"}
    if missing or more:
        what = f"lacks {min(missing)}" if missing else f"has an unknown {str(min(more))[:40]!r}"
        raise CheckpointError(f"{where} {what}; it is damaged")
    return told


def count(value: Any, name: str, where: StrPath, least: int = 0) -> int:
    """``value`` as an integer from ``least`` to ``LARGEST_NUMBER``."""
    if type(value) is not int or not least <= value <= LARGEST_NUMBER:
        raise CheckpointError(f"{where}: {name} is {str(value)[:40]}, expected an integer of at least {least}")
    return value


def seconds(value: Any, where: StrPath) -> float:
    """``value`` as a finite number."""
    if type(value) not in (int, float) or not abs(value) < 1e18 or not math.isfinite(value):
        raise CheckpointError(f"{where}: wall_clock_seconds is {str(value)[:40]}, expected seconds since 1970")
    return float(value)


def listed(value: Any, name: str, where: StrPath) -> list[Any]:
    """``value`` as a list."""
    if not isinstance(value, list):
        raise CheckpointError(f"{where}: {name} is a {type(value).__name__}, expected a list; it is damaged")
    return value


def checked_sha256(value: Any, whose: str, where: StrPath) -> str:
    """``value`` as 64 lower-case hexadecimal digits."""
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{64}", value):
        raise CheckpointError(f"{where}: the sha256 of {whose} is {str(value)[:20]!r}, expected 64 hexadecimal digits")
    return value


# --- folders ----------------------------------------------------------------------------------------------------


def publish(told: dict[str, Any], folder: Path) -> None:
    """Make ``told`` the manifest of ``folder``, by one rename, durably."""
    atomic_write_bytes((json.dumps(told, indent=1, allow_nan=False) + "\n").encode(), folder / MANIFEST)


def is_checkpoint(folder: Path) -> bool:
    """Whether ``folder`` has a manifest of ours; what it names may still be broken."""
    try:
        told = read_json(folder)
    except CheckpointError:
        return False
    return isinstance(told, dict) and str(told.get("schema")).startswith("ckpt")


def all_checkpoints(parent: StrPath) -> list[Path]:
    """The folders ``step_<n>`` of ``parent`` that have a manifest, oldest first by number; links are not followed.

    >>> all_checkpoints("no-such-folder")
    []
    """
    return [folder for folder in _step_folders(Path(parent)) if is_checkpoint(folder)]


def step_of(folder: Path) -> int:
    """The number in ``step_<n>``."""
    match = FOLDER_NAME.fullmatch(folder.name)
    return int(match[1]) if match else -1


def _step_folders(parent: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(parent) as entries:
        found = [
            Path(parent, e.name) for e in entries if FOLDER_NAME.fullmatch(e.name) and e.is_dir(follow_symlinks=False)
        ]
        return sorted(found, key=lambda folder: (step_of(folder), folder.name))
    return []


def ours(name: str) -> bool:
    """Whether a file or folder of this name in a checkpoint folder was written by a save."""
    return any(pattern.fullmatch(name) for pattern in (SHARD_NAME, PART_FOLDER, TEMPORARY)) or name == MANIFEST


def sweep(folder: Path, keep: set[str]) -> None:
    """Remove shards and temporaries that no manifest names: of an older checkpoint here, or of a save that was cut."""
    gone = [folder / name for name in os.listdir(folder) if ours(name) and name != MANIFEST and name not in keep]
    for path in gone:
        with contextlib.suppress(FileNotFoundError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                os.unlink(path)
    if gone:
        sync_folder(folder)


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint, its manifest first, so that it is never one with files missing. What is not ours stays."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(folder / MANIFEST)
        sync_folder(folder)
    sweep(folder, keep=set())
    with contextlib.suppress(OSError):  # something of somebody else's is in it
        os.rmdir(folder)
        sync_folder(folder.parent)


def cut_saves(parent: StrPath) -> list[Path]:
    """Folders ``step_<n>`` that a save has left unfinished: older than the newest checkpoint, and nothing but ours."""
    whole = all_checkpoints(parent)
    newest = step_of(whole[-1]) if whole else -1
    unfinished = [f for f in _step_folders(Path(parent)) if not (f / MANIFEST).exists() and step_of(f) < newest]
    return [folder for folder in unfinished if all(map(ours, os.listdir(folder)))]


def rotate_checkpoints(parent_dir: StrPath, keep_last: int = 5) -> list[str]:
    """Remove all but the newest ``keep_last`` checkpoint folders ``step_<n>`` of ``parent_dir``, by number.

    What is not a checkpoint stays, links are not followed, and a folder without a manifest is left alone where it is
    newer than the newest checkpoint: somebody may be writing it. An older one is what a cut save has left, and goes
    with the checkpoints, if it holds nothing but such files.

    Returns:
        The names of the folders that were removed, oldest first.

    Raises:
        ValueError: ``keep_last`` is below 0.

    >>> rotate_checkpoints(".", keep_last=-1)
    Traceback (most recent call last):
    ...
    ValueError: keep_last=-1 must be at least 0
    """
    if keep_last < 0:
        raise ValueError(f"keep_last={keep_last} must be at least 0")
    whole = all_checkpoints(parent_dir)
    gone = sorted([*whole[: len(whole) - keep_last], *cut_saves(parent_dir)], key=step_of)
    for folder in gone:
        remove_checkpoint(folder)
    return [folder.name for folder in gone]

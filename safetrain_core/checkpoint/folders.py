"""Checkpoint folders ``step_<n>`` in one place: which there are, what belongs to them, which go."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from .atomic import StrPath, make_folder, sync_folder
from .manifest import MANIFEST, PART_FOLDER, SHARD_NAME, is_checkpoint

__all__ = [
    "FOLDER_NAME",
    "all_checkpoints",
    "alone_in",
    "cut_saves",
    "remove_checkpoint",
    "rotate_checkpoints",
    "step_folders",
    "step_of",
    "sweep",
    "unfinished",
]

FOLDER_NAME = re.compile(r"step_([0-9]{1,18})")
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{12}\.tmp")


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process of this machine saves into ``folder`` in this way, and keep others waiting inside.

    Two saves at once would each sweep away what the other has written. A file system without locks goes without.

    >>> with alone_in(Path(".")):
    ...     pass
    """
    if os.name == "nt":
        yield
        return
    import fcntl

    make_folder(folder)
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # a process that was forked meanwhile has the folder open, too
        os.close(handle)


def all_checkpoints(parent: StrPath) -> list[Path]:
    """The folders ``step_<n>`` of ``parent`` that have a manifest, oldest first by number; links are not followed.

    >>> all_checkpoints("no-such-folder")
    []
    """
    return [folder for folder in step_folders(parent) if is_checkpoint(folder)]


def step_of(folder: Path) -> int:
    """The number in ``step_<n>``."""
    match = FOLDER_NAME.fullmatch(folder.name)
    return int(match[1]) if match else -1


def step_folders(parent: StrPath) -> list[Path]:
    """The folders ``step_<n>`` of ``parent``, whatever is in them, oldest first by number; links are not followed.

    >>> step_folders("no-such-folder")
    []
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(parent) as entries:
        found = [
            Path(parent, e.name) for e in entries if FOLDER_NAME.fullmatch(e.name) and e.is_dir(follow_symlinks=False)
        ]
        return sorted(found, key=lambda folder: (step_of(folder), folder.name))
    return []


def unfinished(parent: StrPath) -> list[Path]:
    """The folders ``step_<n>`` without a manifest: of saves that were cut, or copied without it.

    >>> unfinished("no-such-folder")
    []
    """
    return [folder for folder in step_folders(parent) if not os.path.lexists(folder / MANIFEST)]


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
    older = [folder for folder in unfinished(parent) if step_of(folder) < newest]
    return [folder for folder in older if all(map(ours, os.listdir(folder)))]


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
    ValueError: keep_last=-1 must be a whole number, at least 0
    """
    if type(keep_last) is not int or keep_last < 0:
        raise ValueError(f"keep_last={keep_last!r} must be a whole number, at least 0")
    whole = all_checkpoints(parent_dir)
    gone = sorted([*whole[: max(0, len(whole) - keep_last)], *cut_saves(parent_dir)], key=step_of)
    for folder in gone:
        remove_checkpoint(folder)
    return [folder.name for folder in gone]

"""What lies in a folder of checkpoints: those, saves that were cut, and what killed saves have left."""

from __future__ import annotations

import os
from pathlib import Path

from .folders import FOLDER_NAME, TEMPORARY, step_folders
from .manifest import MANIFEST, PART_FOLDER, SHARD_NAME

__all__ = ["checkpoints_in", "leftovers_in"]


def checkpoints_in(path: Path) -> list[Path]:
    """``path`` itself, where it is a checkpoint; else the checkpoints in it, files and folders, by name.

    >>> checkpoints_in(Path("a.pt"))
    [PosixPath('a.pt')]
    """
    if not path.is_dir() or (path / MANIFEST).exists() or FOLDER_NAME.fullmatch(path.name):
        return [path]
    return sorted([*path.glob("*.pt"), *_with_manifest(path)])


def leftovers_in(path: Path) -> list[Path]:
    """Files and folders that a killed save has left in ``path`` and its checkpoint folders; no checkpoint needs them.

    >>> leftovers_in(Path("no-such-folder"))
    []
    """
    if not path.is_dir():
        return []
    here = [entry for entry in path.iterdir() if TEMPORARY.fullmatch(entry.name)]
    folders = [path] if (path / MANIFEST).exists() else _with_manifest(path)
    for folder in folders:
        try:
            named = (folder / MANIFEST).read_text(encoding="utf-8", errors="replace")
        except OSError:  # a link to nowhere, or no file: nobody knows what it named
            continue
        for entry in folder.iterdir():
            unnamed = (SHARD_NAME.fullmatch(entry.name) or PART_FOLDER.fullmatch(entry.name)) and (
                f'"{entry.name}"' not in named
            )
            if unnamed or (folder != path and TEMPORARY.fullmatch(entry.name)):
                here.append(entry)
    return sorted(here)


def _with_manifest(path: Path) -> list[Path]:
    return [folder for folder in step_folders(path) if os.path.lexists(folder / MANIFEST)]

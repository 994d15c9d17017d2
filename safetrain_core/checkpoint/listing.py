"""What lies in a folder of checkpoints: those, saves that were cut, and what killed saves have left."""

from __future__ import annotations

from pathlib import Path

from .folders import FOLDER_NAME, TEMPORARY
from .manifest import MANIFEST, PART_FOLDER, SHARD_NAME

__all__ = ["checkpoints_in", "leftovers_in", "unfinished_in"]


def checkpoints_in(path: Path) -> list[Path]:
    """``path`` itself, where it is a checkpoint; else the checkpoints in it, files and folders, by name.

    >>> checkpoints_in(Path("a.pt"))
    [PosixPath('a.pt')]
    """
    if not path.is_dir() or (path / MANIFEST).exists() or FOLDER_NAME.fullmatch(path.name):
        return [path]
    return sorted([*path.glob("*.pt"), *(folder for folder in _step_folders(path) if (folder / MANIFEST).exists())])


def unfinished_in(path: Path) -> list[Path]:
    """Folders of saves that were cut before their manifest was there: they never were checkpoints.

    >>> unfinished_in(Path("a.pt"))
    []
    """
    return [folder for folder in _step_folders(path) if not (folder / MANIFEST).exists()]


def leftovers_in(path: Path) -> list[Path]:
    """Files and folders that a killed save has left in ``path`` and its checkpoint folders; no checkpoint needs them.

    >>> leftovers_in(Path("no-such-folder"))
    []
    """
    if not path.is_dir():
        return []
    here = [entry for entry in path.iterdir() if TEMPORARY.fullmatch(entry.name)]
    folders = [path] if (path / MANIFEST).exists() else [f for f in _step_folders(path) if (f / MANIFEST).exists()]
    for folder in folders:
        named = (folder / MANIFEST).read_text(encoding="utf-8", errors="replace")
        for entry in folder.iterdir():
            unnamed = (SHARD_NAME.fullmatch(entry.name) or PART_FOLDER.fullmatch(entry.name)) and (
                f'"{entry.name}"' not in named
            )
            if unnamed or (folder != path and TEMPORARY.fullmatch(entry.name)):
                here.append(entry)
    return sorted(here)


def _step_folders(path: Path) -> list[Path]:
    return sorted(folder for folder in path.glob("step_*") if folder.is_dir() and FOLDER_NAME.fullmatch(folder.name))

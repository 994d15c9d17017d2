"""Files in a folder and a few levels below it: a log is looked for there, and not on the whole disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["DEEP", "files_in"]

#: Levels of folders that are looked through: Lightning's and Hugging Face's logs are 2 below the folder that is named.
DEEP = 4

#: Files looked at, at most; the nearest come first.
MOST = 20_000


def files_in(folder: Path, deep: int = DEEP, most: int = MOST) -> Iterator[Path]:
    """The files in ``folder`` and in ``deep`` levels of folders below it, the nearest first; links are not followed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as top:
    ...     for name in ("a/b/c/far.csv", "a/near.csv"):
    ...         Path(top, name).parent.mkdir(parents=True, exist_ok=True)
    ...         Path(top, name).touch()
    ...     [path.name for path in files_in(Path(top), deep=2)]
    ['near.csv']
    """
    level, seen = [folder], 0
    for _ in range(deep + 1):
        below: list[Path] = []
        for place in level:
            with contextlib.suppress(OSError), os.scandir(place) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    if entry.is_dir(follow_symlinks=False):
                        below.append(Path(entry.path))
                        continue
                    seen += 1
                    if seen > most:
                        return
                    yield Path(entry.path)
        level = below

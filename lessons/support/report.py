"""What a lesson says: claims that are checked, tables, and the closing line with the exit status.

A number that starts with ``~`` was measured; it may differ elsewhere, so the notebook check passes over it.
"""

from __future__ import annotations

import csv
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Run:
    """The lesson being run in this process."""

    out: Path | None = None
    held: int = 0
    failed: list[str] = field(default_factory=list)
    saved: list[Path] = field(default_factory=list)

    def path_for(self, file_name: str) -> Path | None:
        """Where a script saves ``file_name``; None in a notebook, which keeps its pictures in itself."""
        if in_notebook() or self.out is None:
            return None
        self.out.mkdir(parents=True, exist_ok=True)
        path = self.out / file_name
        if path not in self.saved:
            self.saved.append(path)
        return path


current = Run()


def in_notebook() -> bool:
    """True in a Jupyter kernel, False in a script or a plain Python prompt.

    >>> in_notebook()
    False
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


def about(value: float, digits: int = 2) -> str:
    """A measured number, with ``digits`` significant digits, marked as one that may differ elsewhere.

    >>> about(0.123456), about(1300.0), about(float("nan"))
    ('~0.12', '~1300', '~nan')
    """
    text = f"{value:.{digits}g}"
    return "~" + (f"{float(text):.0f}" if "e+" in text else text)


def claim(holds: bool, sentence: str) -> None:
    """Say whether ``sentence`` held. A script in which one did not ends with exit status 1."""
    if holds:
        current.held += 1
    else:
        current.failed.append(sentence)
    print(f"{'HELD  ' if holds else 'FAILED'} {sentence}")


def say(text: str) -> None:
    """Print a sentence in lines that fit a notebook's width."""
    print(textwrap.fill(text, width=92, break_long_words=False, break_on_hyphens=False))


def not_shown(needs: str) -> None:
    """Say that a run was too short to show something."""
    print(f"(too short a run to show this: {needs})")


def table(name: str, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table, numbers to the right; a script also saves it as ``name.csv``.

    >>> table("demo", ["what", "bytes"], [["small", 5], ["large", "~1200"]])
    what   bytes
    small      5
    large  ~1200
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    numeric = [
        all(_is_number(cell) for cell in column) for column in zip(*cells, strict=True)
    ]
    for row in [list(header), *cells]:
        padded = (
            c.rjust(w) if n else c.ljust(w)
            for c, w, n in zip(row, widths, numeric, strict=True)
        )
        print("  ".join(padded).rstrip())
    if path := current.path_for(f"{name}.csv"):
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(header)
            writer.writerows([cell.removeprefix("~") for cell in row] for row in cells)
        print(f"saved {path}")


def _is_number(cell: str) -> bool:
    text = cell.removeprefix("~").rstrip("%x ").replace(",", "")
    if text == "-":
        return True
    try:
        float(text)
    except ValueError:
        return False
    return True


def finish() -> None:
    """Close the lesson: how many claims held, where the files are. A script exits 1 if a claim failed."""
    if current.saved:
        print(f"{len(current.saved)} files are in {current.out}")
    if current.failed:
        print(
            f"{len(current.failed)} of {current.held + len(current.failed)} claims failed:"
        )
        for sentence in current.failed:
            print(f"  {sentence}")
        if not in_notebook():
            raise SystemExit(1)
    else:
        print("Every claim of this lesson held.")

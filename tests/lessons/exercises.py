"""Takes a lesson's exercises out of the lesson itself, so that what is tested is what a learner sees."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jupytext

LESSONS = Path(__file__).resolve().parents[2] / "lessons"

SOLUTION = re.compile(r"<summary>Solution</summary>\n\n```python\n(?P<code>.+?)```", re.DOTALL)
HINT = re.compile(r"<summary>Hint \d</summary>")


def exercise_cells(script: Path) -> list[tuple[str, str]]:
    """(stub cell, the Markdown below it with hints and solution), for each exercise."""
    cells = jupytext.read(script, fmt="py:percent").cells
    return [
        (cell.source, cells[number + 1].source)
        for number, cell in enumerate(cells)
        if "exercise" in cell.metadata.get("tags", [])
    ]


def solution_of(markdown: str) -> str:
    found = SOLUTION.search(markdown)
    assert found, "no solution below the exercise"
    return found["code"]


def defined(code: str, name: str, names: dict[str, Any]) -> Callable[..., Any]:
    """The function ``name`` after running ``code`` with ``names`` around it."""
    space = dict(names)
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(code, f"<{name}>", "exec"), space)
    return space[name]

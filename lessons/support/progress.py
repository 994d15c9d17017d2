"""Which exercises have been passed in this checkout: a small file beside the lessons, read by lesson 00 alone.

Nothing is sent anywhere. Only an answer that passes its check in a notebook is remembered. A file that is damaged, or
cannot be written, is never a learner's problem: it counts as empty, and the lesson goes on.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from . import index, report

#: Git ignores this folder. Delete the file to start over.
FILE = Path(os.environ.get("SAFETRAIN_PROGRESS", index.FOLDER / "runs" / "progress.json"))

_CHECKED = re.compile(r"^say\((check_\w+)\(", re.MULTILINE)


def exercise(check: Callable[..., str]) -> Callable[..., str]:
    """Make ``check``, a function of ``checks_NN.py``, remember that an answer has passed in a notebook.

    >>> @exercise
    ... def check_sum(answer):
    ...     return "Right: 4." if answer == 4 else "Not yet: count again."
    >>> check_sum(5)
    'Not yet: count again.'
    """

    @functools.wraps(check)
    def checked(*answer: object) -> str:
        verdict = check(*answer)
        if verdict.startswith("Right: ") and report.in_notebook():
            remember(check.__module__[-2:], check.__name__)
        return verdict

    return checked


def remember(number: str, check: str) -> None:
    """Add an exercise of lesson ``number`` to the file, by the name of its check."""
    now = passed()
    if check in now.get(number, ()):
        return
    now[number] = sorted([*now.get(number, ()), check])
    with contextlib.suppress(OSError):
        FILE.parent.mkdir(parents=True, exist_ok=True)
        whole = FILE.with_suffix(f".{os.getpid()}.tmp")
        whole.write_text(json.dumps(now, indent=1), encoding="utf-8")
        os.replace(whole, FILE)


def passed() -> dict[str, list[str]]:
    """The names of the checks that were passed, by the number of their lesson."""
    try:
        told = json.loads(FILE.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(told, dict):
        return {}
    return {
        number: [name for name in names if isinstance(name, str)]
        for number, names in told.items()
        if isinstance(names, list)
    }


def exercises(lesson: str) -> list[str]:
    """The names of the checks in a lesson, in order.

    >>> exercises("01_clipping_amp")
    ['check_clip', 'check_next_scale', 'check_loop']
    """
    script = (index.FOLDER / f"{lesson}.py").read_text(encoding="utf-8")
    return _CHECKED.findall(script)


def progress() -> list[str]:
    """A line for each lesson that has exercises: how many of them have been passed here.

    >>> len(progress())
    8
    """
    now, lines = passed(), []
    for lesson in index.LESSONS:
        names = exercises(lesson.name) if index.exists(lesson.name) else []
        if names:
            done = len(set(names) & set(now.get(lesson.number, ())))
            lines.append(
                f"{lesson.number}  {lesson.title:<29} {done} of {len(names)} exercises passed here"
            )
    return lines

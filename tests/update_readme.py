"""Rewrite the generated parts of the README, and its picture: ``make readme``."""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from quoted import measured_table, with_present_figures
from results import read

from safetrain_core.config import reference_table

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "lessons" / "support" / "first_minute.png"


def lesson_table() -> str:
    """The lessons with their questions and minutes."""
    sys.path.insert(0, str(ROOT / "lessons"))
    from support.index import LESSONS

    rows = [
        f"| [{lesson.number} {lesson.title}](lessons/{lesson.name}.ipynb) | {lesson.question} | {lesson.minutes} |"
        for lesson in LESSONS
    ]
    return "\n".join(["| lesson | its question | minutes |", "|---|---|---|", *rows])


MADE: dict[str, Callable[[], str]] = {
    "lessons": lesson_table,
    "config table": reference_table,
    "measured": measured_table,
}


def rewritten(text: str) -> str:
    """The README with each generated part written anew, and the measured figures in its prose.

    Raises:
        ValueError: a part has no place, or more than one.
    """
    for name, make in MADE.items():
        if name == "measured" and "## Measured" not in text:
            continue
        block = f"<!-- {name}: made by `make readme` -->\n{make()}\n<!-- end of {name} -->"
        text, found = re.subn(rf"<!-- {name}: .*?end of {name} -->", lambda _, b=block: b, text, flags=re.DOTALL)
        if found != 1:
            raise ValueError(f"README.md has {found} places for the {name}; it must have one")
    return with_present_figures(text, read())


def main() -> None:
    path = ROOT / "README.md"
    path.write_text(rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, str(ROOT / "lessons" / "00_start_here.py"), "--out", folder]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        shutil.copyfile(Path(folder) / "first_minute.png", PICTURE)


if __name__ == "__main__":
    main()

"""Which exercises were passed is remembered: right answers in a notebook alone, and never at a lesson's cost."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from build_notebooks import run
from exercises import exercise_cells, solution_of
from support import index, progress, report


@progress.exercise
def check_sum(answer: object) -> str:
    return "Right: 4." if answer == 4 else "Not yet: count again."


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of progress, somewhere else, as if in a notebook."""
    path = tmp_path / "runs" / "progress.json"
    monkeypatch.setattr(progress, "FILE", path)
    monkeypatch.setattr(report, "in_notebook", lambda: True)
    return path


def as_in(lesson: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[object], str]:
    monkeypatch.setattr(check_sum.__wrapped__, "__module__", f"support.checks_{lesson}")
    return progress.exercise(check_sum.__wrapped__)


def test_a_wrong_answer_is_not_remembered_and_a_right_one_is(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = as_in("01", monkeypatch)
    assert check(5).startswith("Not yet: ")
    assert not file.exists()
    assert check(4).startswith("Right: ")
    assert progress.passed() == {"01": ["check_sum"]}
    assert check(5).startswith("Not yet: ")
    assert progress.passed() == {"01": ["check_sum"]}, "what was passed once stays so"
    assert [path.name for path in file.parent.iterdir()] == ["progress.json"]


def test_outside_of_a_notebook_nothing_is_written(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "in_notebook", lambda: False)
    assert check_sum(4).startswith("Right: ")
    assert not file.parent.exists()


@pytest.mark.parametrize(
    "damage", ["", "{", "[1, 2]", "null", '{"01": 7}', '{"01": [1, null]}', '{"01": {"a": 1}}', "\x00\x01", "\udc80"]
)
def test_a_damaged_file_counts_as_empty_and_is_written_anew(
    damage: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.parent.mkdir()
    file.write_bytes(damage.encode("utf-8", "surrogateescape"))
    assert all(" 0 of " in line for line in progress.progress())
    assert as_in("02", monkeypatch)(4) == "Right: 4."
    assert progress.passed()["02"] == ["check_sum"]
    json.loads(file.read_text(encoding="utf-8"))


def test_a_place_that_cannot_be_written_breaks_no_lesson(tmp_path: Path, file: Path) -> None:
    (tmp_path / "runs").write_text("a file where a folder should be")
    assert check_sum(4) == "Right: 4."
    assert progress.passed() == {}


def test_a_write_that_fails_leaves_the_old_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_in("01", monkeypatch)(4)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert as_in("02", monkeypatch)(4) == "Right: 4."
    assert progress.passed() == {"01": ["check_sum"]}


def test_lesson_00_counts_what_was_passed(file: Path) -> None:
    progress.remember("02", "check_shares")
    progress.remember("02", "check_loop")
    progress.remember("02", "check_that_is_no_more")
    lines = progress.progress()
    assert lines[1] == "02  Gradient accumulation         2 of 3 exercises passed here"
    assert " 0 of 3 " in lines[0]


@pytest.mark.parametrize("lesson", [lesson.name for lesson in index.LESSONS[1:]])
def test_each_check_that_a_lesson_calls_remembers(lesson: str) -> None:
    names = progress.exercises(lesson)
    assert len(names) == len(exercise_cells(index.FOLDER / f"{lesson}.py"))
    checks = importlib.import_module(f"support.checks_{lesson[:2]}")
    for name in names:
        check = getattr(checks, name)
        assert check.__code__ is progress.exercise(check).__code__, f"@exercise is missing above {name}"
        assert check.__module__[-2:] == lesson[:2]


def test_in_a_notebook_the_stub_leaves_no_file_and_the_solution_is_remembered(tmp_path: Path) -> None:
    """The lesson's own cells, in a kernel, beside a copy of ``support``."""
    lessons = tmp_path / "lessons"
    shutil.copytree(index.FOLDER / "support", lessons / "support", ignore=shutil.ignore_patterns("__pycache__"))
    for script in index.FOLDER.glob("0*.py"):
        shutil.copy(script, lessons)
    stub, markdown = exercise_cells(lessons / "01_clipping_amp.py")[0]
    last = [line for line in stub.splitlines() if line.startswith("say(")][-1]
    begin = "import math\nfrom support import say\nfrom support.checks_01 import check_clip\n"

    def executed(code: str) -> str:
        cells = [nbformat.v4.new_code_cell(begin + code), nbformat.v4.new_code_cell("print()")]
        notebook = nbformat.v4.new_notebook(cells=cells)
        run(notebook, lessons, timeout_s=120)
        return notebook.cells[0].outputs[0].text

    assert executed(stub).startswith("Not yet: ")
    assert not (lessons / "runs").exists()
    assert executed(f"{solution_of(markdown)}\n{last}").startswith("Right: ")
    assert json.loads((lessons / "runs" / "progress.json").read_text()) == {"01": ["check_clip"]}
    assert "support" not in os.listdir(tmp_path), sys.path

"""Takes a lesson's exercises out of the lesson itself, so that what is tested is what a learner sees."""

from __future__ import annotations

import ast
import contextlib
import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jupytext
import pytest

LESSONS = Path(__file__).resolve().parents[2] / "lessons"

SOLUTION = re.compile(r"<summary>Solution</summary>\n\n```python\n(?P<code>.+?)```", re.DOTALL)
HINT = re.compile(r"<summary>Hint \d</summary>")
#: Code that defines the functions, or the one function itself, or changes to the solution: old text, new text, ...
Answer = str | Callable[..., Any] | tuple[str, ...]
#: The last line of an exercise's cell: its check, and the functions that an answer defines.
CHECKED = re.compile(r"^say\((?P<check>check_\w+)\((?P<functions>.+)\)\)$", re.MULTILINE)


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


@dataclass(frozen=True, eq=False)
class Exercise:
    """An exercise: its lesson, its cell, the Markdown below, and the names that the lesson has imported around it."""

    script: Path
    stub: str
    below: str
    names: Mapping[str, Any]

    @property
    def solution(self) -> str:
        return solution_of(self.below)

    @property
    def functions(self) -> list[str]:
        """What an answer defines."""
        return CHECKED.search(self.stub)["functions"].split(", ")

    def spoiled(self, *texts: str) -> str:
        """The solution with changes: each old text, which must be there once, gives place to the new."""
        code = self.solution
        for old, new in zip(texts[::2], texts[1::2], strict=True):
            assert code.count(old) == 1, f"the solution has changed: {old!r} is not in it once"
            code = code.replace(old, new)
        return code

    def defined(self, code: str) -> list[Callable[..., Any]]:
        """The functions of an answer, after running its code."""
        space = dict(self.names)
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(code, "<answer>", "exec"), space)
        return [space[name] for name in self.functions]

    def verdict(self, answer: Answer) -> str:
        """What the check says."""
        answer = self.spoiled(*answer) if isinstance(answer, tuple) else answer
        functions = self.defined(answer) if isinstance(answer, str) else [answer]
        return self.names[CHECKED.search(self.stub)["check"]](*functions)


def exercises_of(lesson: str, **more: Any) -> tuple[Exercise, ...]:
    """The exercises of ``lesson``, with what it imports, and ``more`` names that it has when they come."""
    script = LESSONS / f"{lesson}.py"
    tree = ast.parse(script.read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names: dict[str, Any] = {}
    exec(compile(ast.Module(imports, []), str(script), "exec"), names)
    return tuple(Exercise(script, *cells, names | more) for cells in exercise_cells(script))


class Exercises:
    """What is proved of a lesson's exercises. A subclass has, for each, wrong answers with words that should help."""

    wrong: ClassVar[dict[Exercise, list[tuple[Answer, str]]]]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        exercises = {exercise: exercise.functions[-1] for exercise in metafunc.cls.wrong}
        if "answer" in metafunc.fixturenames:
            cases = [(e, *case) for e, answers in metafunc.cls.wrong.items() for case in answers]
            ids = [f"{exercises[e]}-{helps}" for e, _, helps in cases]
            metafunc.parametrize(("exercise", "answer", "helps"), cases, ids=ids)
        elif "exercise" in metafunc.fixturenames:
            metafunc.parametrize("exercise", list(exercises), ids=list(exercises.values()))

    def test_stub_is_turned_away_and_solution_accepted_below_two_hints(self, exercise: Exercise) -> None:
        assert exercise.verdict(exercise.stub).startswith("Not yet: ")
        assert exercise.verdict(exercise.solution).startswith("Right: ")
        assert len(HINT.findall(exercise.below)) == 2

    def test_wrong_answer_is_turned_away_in_words_that_help(
        self, exercise: Exercise, answer: Answer, helps: str
    ) -> None:
        verdict = exercise.verdict(answer)
        assert verdict.startswith("Not yet: ")
        assert helps in verdict, verdict

    def test_lesson_has_two_or_three_one_of_them_a_loop_to_repair_each_with_wrong_answers(self) -> None:
        (script,) = {exercise.script for exercise in self.wrong}
        assert [exercise.stub for exercise in self.wrong] == [stub for stub, _ in exercise_cells(script)]
        assert len(self.wrong) in (2, 3)
        headings = re.findall(r"^# ### ([A-C])\. (.*)", script.read_text(encoding="utf-8"), re.MULTILINE)
        assert [letter for letter, _ in headings] == list("ABC")[: len(self.wrong)]
        assert headings[-1][1] in ("Repair a loop", "Repair a step")
        assert all(len(answers) >= 2 for answers in self.wrong.values())

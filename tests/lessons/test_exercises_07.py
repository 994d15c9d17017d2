"""Lesson 07's exercises: a check rejects its stub and wrong answers in words that help, and takes the solution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exercises import HINT, LESSONS, defined, exercise_cells, solution_of
from support import checks_07

SCRIPT = LESSONS / "07_low_rank_gradients.py"
NAMES = {"torch": torch, "say": lambda verdict: None, "__name__": "exercise"}
EXERCISES = [
    ("numbers", checks_07.check_numbers),
    ("rank_for", checks_07.check_rank_for),
    ("step", checks_07.check_step),
]


@pytest.mark.parametrize(
    ("number", "name", "check"), [(i, name, check) for i, (name, check) in enumerate(EXERCISES)], ids=["A", "B", "C"]
)
def test_stub_is_rejected_and_solution_accepted(number: int, name: str, check: Callable[..., str]) -> None:
    stub, markdown = exercise_cells(SCRIPT)[number]
    names = {**NAMES, **{other.__name__: other for _, other in EXERCISES}}
    assert check(defined(stub, name, names)).startswith("Not yet: ")
    assert check(defined(solution_of(markdown), name, NAMES)).startswith("Right: ")
    assert len(HINT.findall(markdown)) == 2


def test_lesson_has_the_three_exercises() -> None:
    assert len(exercise_cells(SCRIPT)) == len(EXERCISES)


@pytest.mark.parametrize(
    ("wrong", "helps"),
    [
        (lambda m, n, r: 2 * r * max(m, n), "the basis has to be kept"),
        (lambda m, n, r: r * (m + n), "two moments"),
        (lambda m, n, r: r * max(m, n) + 2 * r * min(m, n), "stands on the smaller side"),
        (lambda m, n, r: m * r + 2 * r * n, "256 x 64"),
        (lambda m, n, r: min(m, n) * r + 2 * r * max(m, n), "not above this rank"),
        (lambda m, n, r: 2 * m * n, "Which shapes"),
        (lambda m, n, r: None, "you said None"),
        (lambda m, n, r: 1 // 0, "ZeroDivisionError"),
    ],
)
def test_check_numbers_says_what_is_wrong(wrong: Callable[..., Any], helps: str) -> None:
    verdict = checks_07.check_numbers(wrong)
    assert verdict.startswith("Not yet: ")
    assert helps in verdict, verdict


def held(gradient: torch.Tensor, *, square: bool = True) -> torch.Tensor:
    values = torch.linalg.svdvals(gradient)
    values = values.square() if square else values
    return values.cumsum(0) / values.sum()


@pytest.mark.parametrize(
    ("wrong", "helps"),
    [
        (lambda g, share: int((held(g) < share).sum()), "count from 1"),
        (lambda g, share: int((held(g, square=False) < share).sum()) + 1, "square the singular values first"),
        (lambda g, share: int((torch.linalg.svdvals(g).square().cumsum(0) < share).sum()) + 1, "divide by their sum"),
        (lambda g, share: min(g.shape), "add them up"),
        (lambda g, share: None, "TypeError"),
    ],
)
def test_check_rank_for_says_what_is_wrong(wrong: Callable[..., Any], helps: str) -> None:
    verdict = checks_07.check_rank_for(wrong)
    assert verdict.startswith("Not yet: ")
    assert helps in verdict, verdict


SOUND = solution_of(exercise_cells(SCRIPT)[2][1])
GUARD = "    if not all(W.grad.isfinite().all() for W in weights):\n        return False\n"
LATE_GUARD = "        if not W.grad.isfinite().all():\n            return False\n"
WIDE = "        wide = W.shape[0] <= W.shape[1]\n"


def spoiled(old: str, new: str) -> str:
    assert SOUND.count(old) == 1, f"the solution has changed: {old!r} is not in it once"
    return SOUND.replace(old, new)


@pytest.mark.parametrize(
    ("code", "helps"),
    [
        (spoiled("lr * scale * s", "lr * s"), "4 times too long"),
        (spoiled("lr * scale * s", "lr * scale**2 * s"), "the first step of a wide weight is not"),
        (spoiled(WIDE, "        wide = True\n"), "belongs on the smaller side"),
        (spoiled("change if wide else change.T", "change"), "one step of a tall weight"),
        (spoiled(" % interval == 0", " == 0"), "is used for ever"),
        (spoiled(" % interval == 0", " % 2 == 0"), "after 4 steps the weight is not"),
        (spoiled(" % interval == 0", " % (interval + 1) == 0"), "is used for ever"),
        (spoiled(" % interval == 0", " in (0, interval + 1)"), "is used for ever"),
        (spoiled('s.get("m", 0.0)', "0.0"), "kept from step to step"),
        (spoiled('0.9 * s.get("m", 0.0) + 0.1 * R', "R"), "the first step of a wide weight is not"),
        (spoiled(GUARD, ""), "where a basis is due"),
        (spoiled(GUARD, "").replace(WIDE, LATE_GUARD + WIDE), "left a trace"),
        (spoiled("return False", "return None"), "yours returned None"),
        (spoiled("return True", "return None"), "a step that was taken returns True"),
        (spoiled("(v.sqrt() + 1e-8)", "v"), "the first step of a wide weight is not"),
        (spoiled("interval == 0", "intervall == 0"), "NameError"),
    ],
)  # fmt: skip
def test_check_step_says_what_is_wrong(code: str, helps: str) -> None:
    verdict = checks_07.check_step(defined(code, "step", NAMES))
    assert verdict.startswith("Not yet: ")
    assert helps in verdict, verdict


def test_a_nan_refused_at_a_basis_and_not_between_two_is_told() -> None:
    code = spoiled(
        GUARD,
        '    if not states[0].get("t") and not all(W.grad.isfinite().all() for W in weights):\n        return False\n',
    )
    verdict = checks_07.check_step(defined(code, "step", NAMES))
    assert "between two bases, reached the weights" in verdict

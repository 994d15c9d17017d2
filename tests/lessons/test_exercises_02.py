"""Lesson 02's checks turn away the stub and plausible wrong answers, each with a helpful sentence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exercises import HINT, LESSONS, defined, exercise_cells, solution_of
from support import checks_02

from safetrain_core import clip_global_l2_norm
from safetrain_core.step.accumulate import window_weights, windows

SCRIPT = LESSONS / "02_accumulation.py"
NAMES = {
    **vars(checks_02),
    "say": print,
    "torch": torch,
    "clip_global_l2_norm": clip_global_l2_norm,
    "windows": windows,
}
EXERCISES = [
    ("shares", checks_02.check_shares),
    ("updates", checks_02.check_updates),
    ("loop", checks_02.check_loop),
]


@pytest.mark.parametrize(("number", "name", "check"), [(i, *e) for i, e in enumerate(EXERCISES)])
def test_check_turns_away_the_stub_and_accepts_the_solution(number: int, name: str, check: Callable[..., str]) -> None:
    stub, markdown = exercise_cells(SCRIPT)[number]
    assert check(defined(stub, name, NAMES)).startswith("Not yet: ")
    assert check(defined(solution_of(markdown), name, NAMES)).startswith("Right: ")
    assert len(HINT.findall(markdown)) == 2


def test_lesson_has_the_three_exercises() -> None:
    assert len(exercise_cells(SCRIPT)) == len(EXERCISES)


def counts(targets: list[torch.Tensor]) -> list[int]:
    return [int((y != -100).sum()) for y in targets]


@pytest.mark.parametrize(
    ("wrong", "helps"),
    [
        (lambda targets: [1 / len(targets)] * len(targets), "times as much as one of the last"),
        (lambda targets: [1.0] * len(targets), "add up to 4"),
        (counts, "add up to"),
        (lambda targets: [y.numel() / sum(t.numel() for t in targets) for y in targets], "counted padding too"),
        (lambda targets: [n / sum(counts(targets)) for n in reversed(counts(targets))], "off that of the one big"),
        (lambda targets: [max(n, 1) / sum(counts(targets)) for n in counts(targets)], "has nothing to add"),
        (lambda targets: [0.5, 0.5], "you returned 2 shares"),
        (lambda targets: None, "Return a list of numbers"),
    ],
)  # fmt: skip
def test_check_shares_says_what_is_wrong(wrong: Callable[..., Any], helps: str) -> None:
    verdict = checks_02.check_shares(wrong)
    assert verdict.startswith("Not yet: ")
    assert helps in verdict


def test_the_shares_that_are_taught_are_those_of_the_package() -> None:
    shares = defined(solution_of(exercise_cells(SCRIPT)[0][1]), "shares", {})
    targets = [torch.tensor([1, 2, -100]), torch.tensor([3, -100, -100]), torch.full((3,), -100)]
    assert shares(targets) == window_weights(targets, "tokens")[0]


def test_the_counted_updates_are_those_of_torchs_own_sampler_and_loader() -> None:
    assert checks_02.counted_updates(41, 4, 4, 2, 1) == 2
    assert checks_02.counted_updates(40, 4, 4, 1, 3) == 9


@pytest.mark.parametrize(
    ("wrong", "helps"),
    [
        (lambda s, m, k, r, e: e * s // (m * k * r), "last 2 is a step too"),
        (lambda s, m, k, r, e: e * math.ceil(s // m / k), "counts as a batch"),
        (lambda s, m, k, r, e: math.ceil(e * math.ceil(s / m) / k), "no window spans two"),
        (lambda s, m, k, r, e: e * math.ceil(math.ceil(s / m) / k), "all ranks step together"),
        (lambda s, m, k, r, e: 1 // 0, "ZeroDivisionError"),
        (lambda s, m, k, r, e: None, "you said None"),
    ],
)
def test_check_updates_says_what_is_wrong(wrong: Callable[..., Any], helps: str) -> None:
    verdict = checks_02.check_updates(wrong)
    assert verdict.startswith("Not yet: ")
    assert helps in verdict


SOUND = solution_of(exercise_cells(SCRIPT)[2][1])
CLIP = "        norm, _ = clip_global_l2_norm(model, max_norm=1.0)\n"
STEP = "        optimizer.step()\n"
SCHEDULE = "        schedule.step()\n"


def spoiled(old: str, new: str) -> str:
    assert SOUND.count(old) == 1, f"the solution has changed: {old!r} is not in it once"
    return SOUND.replace(old, new)


@pytest.mark.parametrize(
    ("code", "helps"),
    [
        (spoiled(" / len(window)", ""), "Each micro-batch's loss is used whole"),
        (spoiled(" / len(window)", " / accum_steps"), "its losses were divided by 4"),
        (spoiled(CLIP, "").replace("            mean +=", "    " + CLIP + "            mean +="), "Clip once"),
        (spoiled(SCHEDULE, "").replace("            mean +=", "    " + SCHEDULE + "            mean +="), "Its unit"),
        (spoiled("        optimizer.zero_grad()\n", ""), "Clear the gradients"),
        (spoiled("windows(batches, accum_steps)", "list(windows(batches, accum_steps))[:2]"), "never used"),
        (spoiled("windows(batches, accum_steps)", "windows(batches, 1)"), "you returned 10 rows"),
        (spoiled("mean += loss.item()", "mean = loss.item()"), "Log the mean"),
        (spoiled("mean += loss.item()", "mean += loss.item() / accum_steps"), "Log the mean"),
        (spoiled(CLIP, CLIP.replace("1.0", "1e9")), "Is the gradient clipped"),
        (spoiled(STEP, ""), "the optimizer's step taken"),
        (spoiled("    return rows\n", ""), "one row (loss, norm)"),
        (spoiled("    rows = []\n", ""), "NameError"),
    ],
)  # fmt: skip
def test_check_loop_says_what_is_wrong(code: str, helps: str) -> None:
    verdict = checks_02.check_loop(defined(code, "loop", NAMES))
    assert verdict.startswith("Not yet: ")
    assert helps in verdict, verdict

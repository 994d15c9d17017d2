"""Lesson 03's checks turn away the stubs and plausible wrong answers, each with a helpful sentence."""

from __future__ import annotations

import contextlib
import io
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from exercises import HINT, LESSONS, defined, exercise_cells, solution_of
from support import checks_03

from safetrain_core import atomic_save, capture_rng_state, restore_rng_state

SCRIPT = LESSONS / "03_checkpoint_resume.py"
NAMES = {
    **vars(checks_03),
    "say": print,
    "torch": torch,
    "np": np,
    "random": random,
    "atomic_save": atomic_save,
    "capture_rng_state": capture_rng_state,
    "restore_rng_state": restore_rng_state,
}
EXERCISES = [
    (("to_delete",), checks_03.check_to_delete),
    (("capture", "restore"), checks_03.check_random_states),
    (("loop",), checks_03.check_loop),
]


def functions(code: str, *names: str) -> list[Callable[..., Any]]:
    space = dict(NAMES)
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(code, "<answer>", "exec"), space)
    return [space[name] for name in names]


@pytest.mark.parametrize(("number", "names", "check"), [(i, *e) for i, e in enumerate(EXERCISES)])
def test_check_turns_away_the_stub_and_accepts_the_solution(
    number: int, names: tuple[str, ...], check: Callable[..., str]
) -> None:
    stub, markdown = exercise_cells(SCRIPT)[number]
    assert check(*functions(stub, *names)).startswith("Not yet: ")
    assert check(*functions(solution_of(markdown), *names)).startswith("Right: ")
    assert len(HINT.findall(markdown)) == 2


def test_lesson_has_the_three_exercises() -> None:
    assert len(exercise_cells(SCRIPT)) == len(EXERCISES)


# --- A ---------------------------------------------------------------------------------------------------------


def number_of(name: str) -> int:
    return int(name[5:-3])


def with_best(choose: Callable[..., list[str]]) -> Callable[..., list[str]]:
    def to_delete(losses: dict[str, Any], keep_last: int, keep_best: int) -> list[str]:
        best = choose(losses)[:keep_best]
        return [n for n in sorted(losses, key=number_of)[:-keep_last] if n not in best]

    return to_delete


@pytest.mark.parametrize(
    ("wrong", "helps"),
    [
        (lambda losses, last, best: sorted(losses, key=number_of)[:-last], "stays however old it is"),
        (with_best(lambda losses: sorted(losses, key=lambda n: losses[n] or 9)), "a NaN is never the best"),
        (
            with_best(lambda losses: sorted((n for n in losses if losses[n] == losses[n]), key=lambda n: losses[n])),
            "TypeError",
        ),
        (
            with_best(lambda losses: sorted(losses, key=lambda n: losses[n] if losses[n] == losses[n] else math.inf)),
            "TypeError",
        ),
        (lambda losses, last, best: [], "these go"),
        (lambda losses, last, best: None, "TypeError"),
    ],
)
def test_check_to_delete_says_what_is_wrong(wrong: Callable[..., Any], helps: str) -> None:
    verdict = checks_03.check_to_delete(wrong)
    assert verdict.startswith("Not yet: ")
    assert helps in verdict, verdict


# --- B ---------------------------------------------------------------------------------------------------------

LOOKED = "    name, keys, *rest = np.random.get_state()\n"
DRAWN = "    np.random.rand()\n" + LOOKED
STATES = solution_of(exercise_cells(SCRIPT)[1][1])


@pytest.mark.parametrize(
    ("old", "new", "helps"),
    [
        ("keys.tolist()", "keys", "refused by weights_only=True"),
        ("    random.setstate((version, tuple(numbers), gauss))\n", "", "Python's random generator goes on"),
        ("    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))\n", "", "NumPy's generator goes on"),
        ("    torch.set_rng_state(state[\"torch\"])\n", "", "torch's generator does not draw"),
        ("tuple(numbers), gauss", "tuple(numbers), None", "Python's random generator goes on"),
        ("*rest))", "rest[0]))", "NumPy's generator goes on"),
        (LOOKED + "    return", DRAWN + "    return", "draw nothing"),
        ("tuple(numbers)", "numbers[:3]", "it raised"),
    ],
)  # fmt: skip
def test_check_random_states_says_what_is_wrong(old: str, new: str, helps: str) -> None:
    assert STATES.count(old) == 1, f"the solution has changed: {old!r} is not in it once"
    verdict = checks_03.check_random_states(*functions(STATES.replace(old, new), "capture", "restore"))
    assert verdict.startswith("Not yet: ")
    assert helps in verdict, verdict


def test_check_random_states_leaves_the_generators_as_they_were() -> None:
    torch.manual_seed(5)
    before = random.getstate(), torch.get_rng_state()
    checks_03.check_random_states(*functions(STATES, "capture", "restore"))
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_the_packages_own_functions_pass() -> None:
    assert checks_03.check_random_states(capture_rng_state, restore_rng_state).startswith("Right: ")


# --- C ---------------------------------------------------------------------------------------------------------

SOUND = solution_of(exercise_cells(SCRIPT)[2][1])
COUNTERS = '        run.counters.update(saved["counters"])\n'
SAVE = "            atomic_save(saved, path)\n"


def spoiled(old: str, new: str) -> str:
    assert SOUND.count(old) == 1, f"the solution has changed: {old!r} is not in it once"
    return SOUND.replace(old, new)


@pytest.mark.parametrize(
    ("code", "helps"),
    [
        (spoiled(SAVE, "            torch.save(saved, path)\n"), "a kill in mid-save left a torn file"),
        (
            spoiled(
                SAVE,
                "            import os\n"
                "            torch.save(saved, str(path) + '.tmp')\n"
                "            os.replace(str(path) + '.tmp', path)\n",
            ),
            "there has to be an fsync",
        ),
        (spoiled('("model", "optimizer", "scheduler")', '("model", "optimizer")'), "the schedule stands at 14"),
        (spoiled('("model", "optimizer", "scheduler")', '("model", "scheduler")'), "look at the optimizer"),
        (spoiled('("model", "optimizer", "scheduler")', '("optimizer", "scheduler")'), "from step 11 on"),
        (spoiled("        restore_rng_state(saved[\"rng\"])\n", ""), "from step 11 on"),
        (spoiled("        run.epoch_start = saved[\"epoch_start\"]\n", ""), "never. The data position"),
        (spoiled(COUNTERS, '        run.counters["step"] = saved["counters"]["step"]\n'), "data position"),
        (spoiled(COUNTERS, ""), "step belongs in the checkpoint"),
        (spoiled(SAVE, "            pass\n"), "no checkpoint at path"),
        (spoiled("run.train(1)", "run.train(7)"), "Keep run.train(1)"),
        (spoiled('saved["epoch_start"]', 'saved["start"]'), "KeyError"),
    ],
)  # fmt: skip
def test_check_loop_says_what_is_wrong(code: str, helps: str) -> None:
    verdict = checks_03.check_loop(defined(code, "loop", NAMES))
    assert verdict.startswith("Not yet: ")
    assert helps in verdict, verdict

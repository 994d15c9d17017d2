"""Lesson 06's checks turn away the stubs and plausible wrong answers, each with a helpful sentence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from exercises import HINT, LESSONS, defined, exercise_cells, solution_of
from support import checks_06

from safetrain_core import ThermalAbort, ThermalGuard, Thresholds, next_state
from safetrain_core.thermal.guard import ThermalState

SCRIPT = LESSONS / "06_thermal_guard.py"
NAMES = {
    **vars(checks_06),
    "say": print,
    "math": math,
    "LESSON": Thresholds(85, 75, 95),
    "Thresholds": Thresholds,
    "ThermalState": ThermalState,
    "ThermalAbort": ThermalAbort,
    "next_state": next_state,
}
EXERCISES = [
    ("watch", checks_06.check_watch),
    ("longest", checks_06.check_longest_poll),
    ("loop", checks_06.check_loop),
]


@pytest.mark.parametrize(("number", "name", "check"), [(i, *e) for i, e in enumerate(EXERCISES)])
def test_check_turns_away_the_stub_and_accepts_the_solution(number: int, name: str, check: Callable[..., str]) -> None:
    stub, markdown = exercise_cells(SCRIPT)[number]
    assert check(defined(stub, name, NAMES)).startswith("Not yet: ")
    assert check(defined(solution_of(markdown), name, NAMES)).startswith("Right: ")
    assert len(HINT.findall(markdown)) == 2


def test_lesson_has_the_three_exercises() -> None:
    assert len(exercise_cells(SCRIPT)) == len(EXERCISES)


def spoiled(number: int, old: str, new: str) -> Callable[..., Any]:
    sound = solution_of(exercise_cells(SCRIPT)[number][1])
    assert sound.count(old) == 1, f"the solution has changed: {old!r} is not in it once"
    return defined(sound.replace(old, new), EXERCISES[number][0], NAMES)


# --- A ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "helps"),
    [
        ("0 if known else unknown + 1", "unknown + (not known)", "not in a row"),
        ("unknown >= 3", "unknown >= 2", "two unknowns in a row"),
        ("unknown >= 3", "unknown >= 4", "a third unknown"),
        ("celsius is not None and ", "", "TypeError"),
        ("            state = ThermalState.ABORTED", "            return 'aborted!'", "you said aborted!"),
    ],
)
def test_check_watch_says_what_is_wrong(old: str, new: str, helps: str) -> None:
    verdict = checks_06.check_watch(spoiled(0, old, new))
    assert verdict.startswith("Not yet: ")
    assert helps in verdict, verdict


def test_check_watch_sees_a_sensor_that_comes_back() -> None:
    def forgiving(readings: list[float | None]) -> str:
        state, unknown = ThermalState.NORMAL, 0
        for celsius in readings:
            known = celsius is not None and not math.isnan(celsius)
            unknown = 0 if known else unknown + 1
            state = next_state(state, celsius, Thresholds())
        return ThermalState.ABORTED if unknown >= 3 else state

    assert "even if the sensor comes back" in checks_06.check_watch(forgiving)


def test_the_packages_guard_passes_check_watch() -> None:
    def watch(readings: list[float | None]) -> str:
        guard = ThermalGuard(lambda: None, on_event=lambda event: None)
        for celsius in readings:
            guard.see(celsius)
        return guard.state

    assert checks_06.check_watch(watch).startswith("Right: ")


# --- B ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "helps"),
    [
        (lambda p, c, s, tau: (c - p) * tau / (s - p), "slows down as it gets hotter"),
        (lambda p, c, s, tau: tau * math.log((s - c) / (s - p)), "the larger"),
        (lambda p, c, s, tau: tau * math.log((s - p) / abs(s - c)), "never passes"),
        (lambda p, c, s, tau: tau * math.log10((s - p) / (s - c)), "gets to"),
        (lambda p, c, s, tau: tau * math.log((s - p) / (s - c)), "ValueError"),
        (lambda p, c, s, tau: None, "TypeError"),
        (lambda p, c, s, tau: math.nan, "the larger"),
    ],
)
def test_check_longest_poll_says_what_is_wrong(wrong: Callable[..., Any], helps: str) -> None:
    verdict = checks_06.check_longest_poll(wrong)
    assert verdict.startswith("Not yet: ")
    assert helps in verdict, verdict


# --- C ---------------------------------------------------------------------------------------------------------

SAVE = "            if not saved:\n                save()\n                saved = True\n"
ABORT = "            if state == ThermalState.ABORTED:\n"


@pytest.mark.parametrize(
    ("old", "new", "helps"),
    [
        (SAVE, "", "without a checkpoint"),
        (SAVE, "            save()\n", "save once"),
        ("next_state(state, celsius, LESSON)", "next_state(ThermalState.NORMAL, celsius, LESSON)", "not below resume"),
        (ABORT, "            if False:\n", "waiting for ever"),
        ("            if unknown >= 3:\n", "            if False:\n", "went on"),
        ("unknown >= 3", "unknown >= 1", "it raised ThermalAbort"),
        ("unknown >= 3", "unknown >= 9", "Three unknown readings in a row"),
        ("raise ThermalAbort(", "raise ValueError(", "it should be a ThermalAbort"),
        ("            sleep(5)\n", "            return\n", "never waited"),
        ("        run.update()\n", "            run.update()\n", "or other ones than the plain loop"),
        ("state == ThermalState.NORMAL", "not (celsius > 75)", "NaN"),
        ("            sleep(5)\n", "            sleep(300)\n", "it ended at"),
        ("celsius = card()", "celsius = card() if not saved else 99", "it raised ThermalAbort"),
    ],
)  # fmt: skip
def test_check_loop_says_what_is_wrong(old: str, new: str, helps: str) -> None:
    verdict = checks_06.check_loop(spoiled(2, old, new))
    assert verdict.startswith("Not yet: ")
    assert helps in verdict, verdict


def test_check_loop_sees_a_wait_inside_a_window_and_one_threshold_before_it() -> None:
    def between(run: Any, card: Any, save: Any, sleep: Any) -> None:
        for window in run.windows():
            if card() > 85:
                save()
            while card() > 85:
                sleep(5)
            for batch in window:
                run.backward(batch)
            run.update()

    assert "not below resume" in checks_06.check_loop(between)


def test_a_loop_without_any_look_is_told_so() -> None:
    def blind(run: Any, card: Any, save: Any, sleep: Any) -> None:
        for window in run.windows():
            for batch in window:
                run.backward(batch)
            run.update()

    assert "never waited" in checks_06.check_loop(blind)


def test_the_packages_guard_passes_check_loop() -> None:
    def guarded(run: Any, card: Any, save: Any, sleep: Any) -> None:
        guard = ThermalGuard(card, on_event=lambda event: None)
        for window in run.windows():
            saved = False
            while guard.see(card()) != ThermalState.NORMAL:
                if not saved:
                    save()
                saved = True
                if guard.state == ThermalState.ABORTED:
                    raise ThermalAbort(guard.abort_message())
                sleep(5)
            for batch in window:
                run.backward(batch)
            run.update()

    assert checks_06.check_loop(guarded).startswith("Right: ")

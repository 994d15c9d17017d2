"""Lesson 06's checks turn away the stubs and plausible wrong answers, each with a helpful sentence."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from exercises import Exercises, exercises_of
from support import checks_06

from safetrain_core import ThermalAbort, ThermalGuard, Thresholds, next_state
from safetrain_core.thermal.guard import ThermalState

A, B, C = exercises_of("06_thermal_guard", LESSON=Thresholds(85, 75, 95))


# --- A ---------------------------------------------------------------------------------------------------------


def forgiving(readings: list[float | None]) -> str:
    state, unknown = ThermalState.NORMAL, 0
    for celsius in readings:
        known = celsius is not None and not math.isnan(celsius)
        unknown = 0 if known else unknown + 1
        state = next_state(state, celsius, Thresholds())
    return ThermalState.ABORTED if unknown >= 3 else state


def test_the_packages_guard_passes_check_watch() -> None:
    def watch(readings: list[float | None]) -> str:
        guard = ThermalGuard(lambda: None, on_event=lambda event: None)
        for celsius in readings:
            guard.see(celsius)
        return guard.state

    assert checks_06.check_watch(watch).startswith("Right: ")


# --- C ---------------------------------------------------------------------------------------------------------

SAVE = "            if not saved:\n                save()\n                saved = True\n"
ABORT = "            if state == ThermalState.ABORTED:\n"


def between(run: Any, card: Any, save: Any, sleep: Any) -> None:
    for window in run.windows():
        if card() > 85:
            save()
        while card() > 85:
            sleep(5)
        for batch in window:
            run.backward(batch)
        run.update()


def blind(run: Any, card: Any, save: Any, sleep: Any) -> None:
    for window in run.windows():
        for batch in window:
            run.backward(batch)
        run.update()


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


class TestLesson06(Exercises):
    wrong: ClassVar = {
        A: [
            (("0 if known else unknown + 1", "unknown + (not known)"), "not in a row"),
            (("unknown >= 3", "unknown >= 2"), "two unknowns in a row"),
            (("unknown >= 3", "unknown >= 4"), "a third unknown"),
            (("celsius is not None and ", ""), "TypeError"),
            (("            state = ThermalState.ABORTED", "            return 'aborted!'"), "you said aborted!"),
            (forgiving, "even if the sensor comes back"),
        ],
        B: [
            (lambda p, c, s, tau: (c - p) * tau / (s - p), "slows down as it gets hotter"),
            (lambda p, c, s, tau: tau * math.log((s - c) / (s - p)), "the larger"),
            (lambda p, c, s, tau: tau * math.log((s - p) / abs(s - c)), "never passes"),
            (lambda p, c, s, tau: tau * math.log10((s - p) / (s - c)), "gets to"),
            (lambda p, c, s, tau: tau * math.log((s - p) / (s - c)), "ValueError"),
            (lambda p, c, s, tau: None, "TypeError"),
            (lambda p, c, s, tau: math.nan, "the larger"),
        ],
        C: [
            ((SAVE, ""), "without a checkpoint"),
            ((SAVE, "            save()\n"), "save once"),
            (
                ("next_state(state, celsius, LESSON)", "next_state(ThermalState.NORMAL, celsius, LESSON)"),
                "not below resume",
            ),
            ((ABORT, "            if False:\n"), "waiting for ever"),
            (("            if unknown >= 3:\n", "            if False:\n"), "went on"),
            (("unknown >= 3", "unknown >= 1"), "it raised ThermalAbort"),
            (("unknown >= 3", "unknown >= 9"), "Three unknown readings in a row"),
            (("raise ThermalAbort(", "raise ValueError("), "it should be a ThermalAbort"),
            (("            sleep(5)\n", "            return\n"), "never waited"),
            (("        run.update()\n", "            run.update()\n"), "or other ones than the plain loop"),
            (("state == ThermalState.NORMAL", "not (celsius > 75)"), "NaN"),
            (("            sleep(5)\n", "            sleep(300)\n"), "it ended at"),
            (("celsius = card()", "celsius = card() if not saved else 99"), "it raised ThermalAbort"),
            (between, "not below resume"),
            (blind, "never waited"),
        ],
    }

"""The checks of lesson 06's exercises: each takes an answer and returns a sentence.

It starts with "Right" or "Not yet", and then says what is wrong and where to look next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from safetrain_core import ThermalAbort

from . import thermal as lab
from . import toy
from .checkpoint_resume import said
from .progress import exercise

PAUSE_C, RESUME_C, CRITICAL_C = 85, 75, 95


def _raised(error: BaseException) -> str:
    return f"Not yet: it raised {type(error).__name__}: {said(error)}."


# --- A: the lost sensor ---------------------------------------------------------------------------------------

NAN = math.nan

#: Readings, the state after them, and why.
CASES: list[tuple[list[float | None], str, str]] = [
    ([80, 86, 80], "paused", "80 C is not below resume, so a pause goes on"),
    ([86, NAN, NAN, 74], "normal", "two unknowns in a row are not yet a lost sensor"),
    ([70, NAN, 70, NAN, 70, NAN, 70], "normal", "the three unknowns are not in a row"),
    (
        [70, NAN, NAN, NAN],
        "aborted",
        "a third unknown in a row is a lost sensor, in any state",
    ),
    (
        [86, None, NAN, None],
        "aborted",
        "None and NaN are both unknown, and a pause ends, too",
    ),
    (
        [70, None, None, None, 60, 60],
        "aborted",
        "aborted is final, even if the sensor comes back",
    ),
    ([70, NAN, NAN, 86, NAN, 80], "paused", "a reading in between starts the count anew"),
    ([96, 20], "aborted", "aborted is final"),
    ([], "normal", "nothing has been read yet"),
]


@exercise
def check_watch(watch: Callable[[list[float | None]], Any]) -> str:
    """Exercise A: ``watch(readings) -> state`` after them all, a lost sensor included."""
    for readings, right, why in CASES:
        try:
            answer = str(watch(list(readings)))
        except Exception as error:  # noqa: BLE001 - whatever a learner's code raises is worth a sentence
            return _raised(error) + f" That was for the readings {readings}."
        if answer != right:
            return f"Not yet: after {readings} the state is {right}; you said {answer} ({why})."
    return "Right: three unknowns in a row end the run from any state, and two do not."


# --- B: the longest poll interval -----------------------------------------------------------------------------


@exercise
def check_longest_poll(longest: Callable[..., Any]) -> str:
    """Exercise B: ``longest(pause_c, critical_c, steady_c, tau_s) -> seconds``."""
    cards = [(85, 95, 115, 60), (80, 90, 120, 20), (70, 95, 96, 100), (85, 95, 90, 60)]
    for pause_c, critical_c, steady_c, tau_s in cards:
        told = f"pause {pause_c}, critical {critical_c}, settling at {steady_c} C, tau {tau_s} s"
        try:
            answer = float(longest(pause_c, critical_c, steady_c, tau_s))
        except Exception as error:  # noqa: BLE001 - as above
            return _raised(error) + f" That was for {told}."
        right = lab.longest_poll_s(pause_c, critical_c, steady_c, tau_s)
        if right == math.inf:
            if answer != math.inf:
                return (
                    f"Not yet: a card that settles at {steady_c} C never passes {critical_c} C, however rarely you read. "
                    f"The answer is math.inf; you said {answer:g}."
                )
            continue
        if not answer > 0:
            return f"Not yet: for {told} you said {answer:g} s. Which of the two distances is the larger?"
        linear = (critical_c - pause_c) * tau_s / (steady_c - pause_c)
        if math.isclose(answer, linear, rel_tol=1e-6):
            return (
                f"Not yet: for {told} your {answer:.1f} s take it that the card heats as fast all the way as it does at "
                f"{pause_c} C. That is safe, but it slows down as it gets hotter: {right:.1f} s will do."
            )
        if not math.isclose(answer, right, rel_tol=1e-6):
            reached = lab.ceiling_c(pause_c, answer, steady_c, tau_s)
            return (
                f"Not yet: for {told} you said {answer:.1f} s, and in that time a card that was read at {pause_c} C gets "
                f"to {reached:.1f} C. It should be {critical_c} C."
            )
    return "Right: read more often than that, and the guard sees the card before it is critical."


# --- C: the loop ----------------------------------------------------------------------------------------------

MICRO, WINDOWS = 2, 60
Loop = Callable[..., Any]


class Endless(BaseException):
    """The loop waits for ever."""


class Trial:
    """A run to be guarded, on a card in simulated time: windows of two micro-batches, a second each.

    Args:
        kind: what happens: ``cool``, ``hot``, ``neighbour`` (heats on while we wait), ``lost`` (NaN after 40 s), or
            ``blink`` (NaN in the second look of each pause).
    """

    def __init__(self, kind: str = "cool") -> None:
        self.kind, self.clock = kind, lab.Clock()
        self.card = lab.new_card(self.clock)
        self.model = toy.tiny_mlp(3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.updates = self.open = self.looks = 0
        self.waits: list[int] = []  # update before which it slept
        self.saves: list[tuple[int, int]] = []  # (updates, sleeps before it)
        self.faults: list[str] = []
        self.last_c: float | None = None
        self.pausing, self.slept = False, 0

    # what the learner's loop is given

    def windows(self) -> Iterator[list[Any]]:
        """``WINDOWS`` lists of ``MICRO`` micro-batches."""
        batches = list(toy.sensor_batches(WINDOWS * MICRO, 3))
        for start in range(0, len(batches), MICRO):
            yield batches[start : start + MICRO]

    def backward(self, batch: Any) -> None:
        """One micro-batch: a second of full load."""
        if self.pausing and self.kind != "cool":
            known = self.last_c is not None and not math.isnan(self.last_c)
            if not known:
                self.faults.append("blind")
            elif not self.last_c < RESUME_C:
                self.faults.append(f"early {self.last_c:.0f}")
        self.pausing, self.slept = False, 0
        x, y = batch
        (torch.nn.functional.mse_loss(self.model(x), y) / MICRO).backward()
        self.open += 1
        self._second(lab.WATTS)
        if self.clock.now > 5000:
            raise Endless

    def update(self) -> None:
        """The optimizer step that ends a window."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.updates, self.open = self.updates + 1, 0

    def read(self) -> float:
        """The card's temperature in C."""
        self.looks += 1
        celsius = self.card.read().temperature_c
        blink = self.kind == "blink" and self.pausing and self.slept == 1
        lost = self.kind == "lost" and self.clock.now >= 40
        self.last_c = NAN if blink or lost else celsius
        return self.last_c

    def save(self) -> None:
        """A checkpoint."""
        self.saves.append((self.updates, self.slept))

    def sleep(self, seconds: float) -> None:
        """Wait: the card cools."""
        if self.open:
            self.faults.append("inside")
        if not self.saves or self.saves[-1][0] != self.updates:
            self.faults.append("unsaved")
        if not self.slept:
            self.waits.append(self.updates)
        self.pausing, self.slept = True, self.slept + 1
        for _ in range(max(1, round(seconds))):
            self._second(500.0 if self.kind == "neighbour" else 0.0)
        if self.clock.now > 5000:
            raise Endless

    def _second(self, watts: float) -> None:
        self.card.work(watts)
        self.clock.now += 1.0


def _run(loop: Loop, kind: str) -> tuple[Trial, BaseException | None]:
    trial = Trial(kind)
    try:
        loop(trial, trial.read, trial.save, trial.sleep)
    except (Exception, Endless) as error:  # noqa: BLE001 - whatever a learner's code raises is worth a sentence
        return trial, error
    return trial, None


@exercise
def check_loop(loop: Loop) -> str:
    """Exercise C: ``loop(run, card, save, sleep)`` trains ``run`` and guards the card."""
    return _calm(loop) or _hot(loop) or _neighbour(loop) or _lost(loop) or (
        "Right: it pauses between windows with a checkpoint, goes on only below resume, ends above critical and when the "
        "sensor is lost, and the run is the same run."
    )  # fmt: skip


def _plain() -> Trial:
    trial = Trial()
    for window in trial.windows():
        for batch in window:
            trial.backward(batch)
        trial.update()
    return trial


def _same(one: Trial, other: Trial) -> bool:
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def _calm(loop: Loop) -> str | None:
    def cold(run: Trial, card: Any, save: Any, sleep: Any) -> None:
        loop(run, lambda: 60.0, save, sleep)

    trial, error = _run(cold, "cool")
    if isinstance(error, Exception):
        return _raised(error) + " The card was at 60 C all the time."
    if error is not None or trial.waits:
        return (
            "Not yet: at 60 C all the time, your loop waited. There is nothing to wait for."
        )
    if trial.updates != WINDOWS or not _same(trial, _plain()):
        return (
            f"Not yet: at 60 C all the time, your loop made {trial.updates} updates of {WINDOWS}, or other ones than the "
            "plain loop. Each window is all its micro-batches, then one update."
        )
    return None


def _hot(loop: Loop) -> str | None:
    for kind in ("hot", "blink"):
        trial, error = _run(loop, kind)
        if isinstance(error, Endless):
            return "Not yet: the card had long been cool, and your loop still waited. Is the state read anew after each sleep?"
        if error is not None:
            return _raised(error) + " The card was to be paused for, and never critical."
        early = next((fault for fault in trial.faults if fault.startswith("early")), None)
        if "inside" in trial.faults:
            return (
                "Not yet: it waited in the middle of a window, with half a gradient summed up. A checkpoint knows of no half "
                "windows: look before the window."
            )
        if not trial.waits:
            return "Not yet: the card went above 85 C, and your loop never waited."
        if "unsaved" in trial.faults:
            return (
                "Not yet: it waited without a checkpoint. If the machine is switched off during the pause, everything since "
                "the last one is lost: save() comes before the first sleep."
            )
        if early is not None:
            return (
                f"Not yet: it went on at {early[6:]} C, which is not below resume, 75 C. With one threshold it stops and "
                "goes all the time."
            )
        if "blind" in trial.faults:
            return (
                "Not yet: during a pause one reading was NaN, and your loop went on training. NaN is below no threshold and "
                "above none: it is unknown, and never counts as cool."
            )
        if any(slept for _, slept in trial.saves) or len(trial.saves) > len(trial.waits):
            return (
                f"Not yet: {len(trial.waits)} pauses, {len(trial.saves)} checkpoints. Nothing changes during a pause; save "
                "once, when it begins."
            )
        if not _same(trial, _plain()):
            return "Not yet: the run that paused does not end with the weights of the run that did not."
    return None


def _ended(trial: Trial, error: BaseException | None, when: str) -> str | None:
    if isinstance(error, Exception) and not isinstance(error, ThermalAbort):
        return _raised(error) + f" {when} it should be a ThermalAbort."
    if isinstance(error, Endless):
        return f"Not yet: {when} your loop went on waiting for ever. It has to raise ThermalAbort there."
    if not isinstance(error, ThermalAbort):
        return f"Not yet: {when} your loop went on. Above critical, and without a sensor, it has to raise ThermalAbort."
    if not trial.saves or trial.saves[-1][0] != trial.updates:
        return f"Not yet: {when} it ended without a checkpoint of the last update."
    return None


def _neighbour(loop: Loop) -> str | None:
    trial, error = _run(loop, "neighbour")
    hottest = trial.last_c or 0.0
    problem = _ended(trial, error, "The card got hotter during a pause, above 95 C;")
    if problem is None and hottest > CRITICAL_C + 15:
        return f"Not yet: it ended at {hottest:.0f} C only. Critical is 95 C: look after each sleep."
    return problem


def _lost(loop: Loop) -> str | None:
    trial, error = _run(loop, "lost")
    problem = _ended(trial, error, "After 40 s the sensor gave nothing but NaN;")
    if problem is None and trial.updates > 40 // MICRO + 2:
        return (
            f"Not yet: it took {trial.updates - 40 // MICRO} more updates without a sensor. Three unknown readings in a row "
            "are enough."
        )
    if problem is None and trial.updates < 40 // MICRO + 1:
        return "Not yet: it ended at the first unknown reading. One can be a hiccup; three in a row are a lost sensor."
    return problem

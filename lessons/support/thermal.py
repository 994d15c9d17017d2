"""The experiments of lesson 06: a hot card in simulated time, alone, in a real training run, and as a recorded trace."""

from __future__ import annotations

import csv
import math
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetrain_core import (
    GpuReading,
    SafeTrainer,
    SimulatedCard,
    StepLog,
    ThermalAbort,
    Thresholds,
    TrainConfig,
    next_state,
)
from safetrain_core.thermal.guard import ThermalState
from safetrain_core.train.result import FitResult
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from . import toy
from .checkpoint_resume import logged

#: A card of 300 W behind a filter full of dust: with all it can do it would settle at 115 C.
AMBIENT_C, WATTS, HEAT_CAPACITY_J_PER_C, TAU_S = 25.0, 300.0, 200.0, 60.0
STEADY_C = AMBIENT_C + WATTS * TAU_S / HEAT_CAPACITY_J_PER_C

#: What one training step takes on it, in seconds.
STEP_S = 1.0

#: Where the guard ends a run, and how often it reads, unless an experiment says otherwise.
CRITICAL_C, POLL_S = 95.0, 5

#: Real seconds between two readings of the poller, whatever the simulated clock says.
REAL_POLL_S = 0.01

#: How long a step waits for the poller before it gives up.
PATIENCE_S = 60.0

NORMAL, PAUSED, ABORTED = ThermalState.NORMAL, ThermalState.PAUSED, ThermalState.ABORTED

#: A rule: state and reading -> state.
Machine = Callable[[Any, float | None], Any]


class Clock:
    """Seconds that pass only when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def new_card(clock: Clock, start_c: float | None = None) -> SimulatedCard:
    """The lesson's card."""
    return SimulatedCard(
        AMBIENT_C,
        start_c=start_c,
        heat_capacity_j_per_c=HEAT_CAPACITY_J_PER_C,
        cooling_time_s=TAU_S,
        clock=clock,
    )


def guard_rule(pause_c: float, resume_c: float, critical_c: float = CRITICAL_C) -> Machine:
    """The package's ``next_state`` with these thresholds."""
    limits = Thresholds(pause_c, resume_c, critical_c)
    return lambda state, celsius: next_state(ThermalState(state), celsius, limits)


def one_threshold(pause_c: float) -> Machine:
    """Pause above it, go on below it: what comes to mind first."""
    return lambda state, celsius: PAUSED if celsius > pause_c else NORMAL


def no_guard(state: Any, celsius: float | None) -> Any:
    """Whatever the sensor says, go on."""
    return NORMAL


# --- simulated time, no training ------------------------------------------------------------------------------


@dataclass
class Course:
    """What a card went through, second by second: the time, its temperature then, the guard's state until then.

    ``readings``: (seconds, C) of each look.
    """

    seconds: list[float] = field(default_factory=list)
    celsius: list[float] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    readings: list[tuple[float, float | None]] = field(default_factory=list)

    def note(self, second: float, celsius: float, state: str) -> None:
        """One more second."""
        self.seconds.append(second)
        self.celsius.append(celsius)
        self.states.append(str(state))

    @property
    def hottest_c(self) -> float:
        return max(self.celsius)

    @property
    def changes(self) -> int:
        """How often the state changed."""
        return sum(a != b for a, b in zip(self.states, self.states[1:], strict=False))

    @property
    def pauses(self) -> int:
        """How often a pause began."""
        pairs = zip(self.states, self.states[1:], strict=False)
        return sum(b == PAUSED != a for a, b in pairs)

    @property
    def trained(self) -> float:
        """The share of the seconds in which it trained."""
        return sum(state == NORMAL for state in self.states) / len(self.states)

    def spans(self, state: str) -> list[tuple[float, float]]:
        """From when to when it was in ``state``.

        >>> course = Course([1, 2, 3, 4], [80, 86, 85, 74], ["normal", "normal", "paused", "paused"])
        >>> course.spans("paused")
        [(2, 4)]
        """
        found: list[tuple[float, float]] = []
        before, was = self.seconds[0] - STEP_S, None
        for second, now in zip(self.seconds, self.states, strict=True):
            if now == state:
                start = found.pop()[0] if was == state else before
                found.append((start, second))
            before, was = second, now
        return found


def simulate(
    machine: Machine,
    *,
    seconds: int = 600,
    poll_s: int = POLL_S,
    first_poll_s: int | None = None,
    start_c: float | None = None,
    blind_from_s: float = math.inf,
) -> Course:
    """A card under full load whenever ``machine`` lets it, for ``seconds``, or until the machine says aborted.

    Args:
        machine: asked at each reading. poll_s: seconds between readings. first_poll_s: when the first is.
        start_c: of the card, None = cold. blind_from_s: from here on the sensor reads NaN.

    >>> simulate(no_guard, seconds=120).hottest_c > 95 > simulate(guard_rule(85, 75)).hottest_c
    True
    """
    clock, course = Clock(), Course()
    card, state = new_card(clock, start_c), NORMAL
    poll_at = poll_s if first_poll_s is None else first_poll_s
    for second in range(1, seconds + 1):
        if state == NORMAL:
            card.work(WATTS * STEP_S)
        clock.now = second * STEP_S
        celsius = card.read().temperature_c
        course.note(clock.now, celsius, state)
        if second == poll_at:
            seen = math.nan if second >= blind_from_s else celsius
            course.readings.append((clock.now, seen))
            state, poll_at = machine(state, seen), poll_at + poll_s
            if state == ABORTED:
                break
    return course


def hottest_by_phase(pause_c: float, poll_s: int, seconds: int = 240) -> float:
    """The hottest that a card got before its first pause, over every second in which a reading can fall.

    The critical threshold is out of the way, at 120 C.
    """
    rule = guard_rule(pause_c, pause_c - 1, 120.0)
    return max(
        simulate(rule, seconds=seconds, poll_s=poll_s, first_poll_s=first).hottest_c
        for first in range(1, poll_s + 1)
    )


def ceiling_c(pause_c: float, poll_s: float, steady_c: float = STEADY_C, tau_s: float = TAU_S) -> float:  # fmt: skip
    """The most that a card can reach between a reading of just ``pause_c`` and the next, ``poll_s`` later.

    Newton's law again: the distance to the temperature at which it would settle shrinks by exp(-t / tau).

    >>> round(ceiling_c(85, 0)), round(ceiling_c(85, 1e9))
    (85, 115)
    """
    return steady_c - (steady_c - pause_c) * math.exp(-poll_s / tau_s)


def longest_poll_s(
    pause_c: float, critical_c: float, steady_c: float = STEADY_C, tau_s: float = TAU_S
) -> float:
    """The longest poll interval with which the card cannot pass ``critical_c`` unseen.

    >>> round(longest_poll_s(85, 95), 1), longest_poll_s(85, 95, steady_c=90)
    (24.3, inf)
    """
    if steady_c <= critical_c:
        return math.inf
    return tau_s * math.log((steady_c - pause_c) / (steady_c - critical_c))


def cycle_share(pause_c: float, resume_c: float) -> float:
    """The share of the time in which training goes on: heating from ``resume_c`` to ``pause_c``, over the whole cycle.

    >>> round(cycle_share(85, 75), 2)
    0.61
    """
    heating = math.log((STEADY_C - resume_c) / (STEADY_C - pause_c))
    cooling = math.log((pause_c - AMBIENT_C) / (resume_c - AMBIENT_C))
    return heating / (heating + cooling)


#: What a sensor may say, besides numbers near a threshold.
ODD = (None, math.nan, math.inf, -math.inf)


def random_trace(draws: random.Random, limits: Thresholds, length: int = 40) -> list[float | None]:  # fmt: skip
    """Readings around the thresholds, on them, and odd ones."""
    edges = (limits.resume_c, limits.pause_c, limits.critical_c)
    trace: list[float | None] = []
    for _ in range(length):
        kind = draws.random()
        if kind < 0.15:
            trace.append(draws.choice(ODD))
        elif kind < 0.4:
            trace.append(draws.choice(edges))
        else:
            trace.append(draws.choice(edges) + draws.choice((-15, -1, -0.01, 0.01, 1)))
    return trace


# --- a real training run on a simulated card ------------------------------------------------------------------

#: Rows of a batch and of the data set; one of them has an infinite reading, and its step is refused.
ROWS, SAMPLES = 16, 640


def data(seed: int) -> TensorDataset:
    """Sensor readings, one of them infinite, as when a driver divides by zero."""
    batches = list(toy.sensor_batches(SAMPLES // 32, seed, inf_at=5))
    return TensorDataset(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))  # fmt: skip


def dropout_mlp(seed: int) -> nn.Sequential:
    """A small model with dropout and BatchNorm, so that weights are not all there is to lose."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 1)
    )


class Bench:
    """A simulated card under a training run: a step takes a second of its clock, and a pause is spent in seconds too.

    The guard's poller is a real thread that reads every few real milliseconds. It is shown a new temperature every
    ``poll_s`` simulated seconds and the same one in between, and each step waits until it has seen the new one: so the
    run is the same on a slow computer and on a fast one.

    Args:
        limits: those of the guard. None = there is none, and no step waits.
        poll_s: simulated seconds between readings.
        neighbour_w, neighbour_from_s: another program on the card, which does not pause.
        blind_from_s: from here on the sensor says nothing.
        waiting: whether training waits now, so that time passes without it; default: since ``hold()``.
        away: whether the training run is on another device.
    """

    def __init__(
        self,
        limits: Thresholds | None,
        *,
        poll_s: int = POLL_S,
        neighbour_w: float = 0.0,
        neighbour_from_s: float = math.inf,
        blind_from_s: float = math.inf,
        waiting: Callable[[], bool] | None = None,
        away: Callable[[], bool] = lambda: False,
    ) -> None:
        self.limits, self.poll_s, self.away = limits, poll_s, away
        self.waiting, self._held = waiting or (lambda: self._held), False
        self.neighbour_w, self.neighbour_from_s = neighbour_w, neighbour_from_s
        self.blind_from_s = blind_from_s
        self.clock, self.course = Clock(), Course()
        self.card = new_card(self.clock)
        self.state, self.reading = NORMAL, GpuReading(AMBIENT_C)
        self.threads: list[int] = []
        self._shown = threading.Condition()

    def read(self) -> GpuReading:
        """The source of the guard."""
        with self._shown:
            if self.state == PAUSED and self.waiting():
                for _ in range(self.poll_s):
                    self._second(0.0, "paused")
            self.threads.append(threading.get_ident())
            self._shown.notify_all()
            return self.reading

    def hold(self) -> None:
        """Training waits from here on, until its next step."""
        self._held = True

    def step(self) -> None:
        """A training step was taken; returns when the guard has seen what came of it."""
        with self._shown:
            self._held = False
            due = self._second(
                *((0.0, "away") if self.away() else (WATTS * STEP_S, "normal"))
            )
            if due and self.limits is not None:
                # A reading has been taken in when the next one is asked for. A lost sensor is seen three times.
                asked = len(self.threads) + (
                    2 if self.reading.temperature_c is not None else 4
                )
                if not self._shown.wait_for(lambda: len(self.threads) >= asked, PATIENCE_S):
                    raise RuntimeError(
                        f"the guard's poller did not read for {PATIENCE_S:g} s"
                    )

    def _second(self, joules: float, state: str) -> bool:
        """A second of the card's time; whether a reading was due at its end."""
        if self.clock.now >= self.neighbour_from_s:
            joules += self.neighbour_w * STEP_S
        self.card.work(joules)
        self.clock.now += STEP_S
        celsius = self.card.read().temperature_c
        self.course.note(self.clock.now, celsius, state)
        if round(self.clock.now / STEP_S) % self.poll_s != 0:
            return False
        seen = None if self.clock.now >= self.blind_from_s else celsius
        self.course.readings.append((self.clock.now, seen))
        self.reading = GpuReading(seen)
        if self.limits is not None:
            self.state = next_state(self.state, seen, self.limits)
        return True


@dataclass
class HotRun:
    """A training run on a ``Bench``, and how it ended.

    ``skipped_at``: simulated seconds of its SKIP rows. ``abort``: the exception, if one ended it.
    """

    bench: Bench
    trainer: SafeTrainer
    result: FitResult
    rows: list[StepLog]
    skipped_at: list[float]
    log: Path
    resumed_from: Path | None = None
    abort: ThermalAbort | None = None

    @property
    def events(self) -> list[tuple[str, str]]:
        """(step, what the guard did) of each row of the log in which it did something.

        Seconds of a pause are real ones, so they are marked as measured.
        """
        with self.log.open(newline="", encoding="utf-8") as file:
            told = [(row["step"], row.get("thermal_event")) for row in csv.DictReader(file)]
        return [(step, re.sub(r"after ([\d.]+)", r"after ~\1", text)) for step, text in told if text]  # fmt: skip

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return self.trainer.model.state_dict()


def train(
    folder: Path,
    steps: int,
    seed: int,
    limits: Thresholds | None,
    *,
    resume: bool = False,
    switch: bool = False,
    **conditions: Any,
) -> HotRun:
    """Train with ``SafeTrainer`` for ``steps`` updates on the simulated card, with the guard if there are ``limits``.

    Args:
        folder: for checkpoints and the log. resume: go on from the checkpoint there.
        switch: move to another device instead of pausing. conditions: of the ``Bench``.
    """
    config = TrainConfig(
        max_steps=steps,
        batch_size=ROWS,
        learning_rate=3e-3,
        seed=seed,
        max_nan_retries=1000,
        csv_log_path=str(folder / "log.csv"),
        telemetry_log_interval=1,
        switch_on_thermal=switch,
        gpu_temp_poll_interval_seconds=REAL_POLL_S,
        **(
            {
                "gpu_temp_guard": True,
                "gpu_temp_pause_threshold_c": limits.pause_c,
                "gpu_temp_resume_threshold_c": limits.resume_c,
                "gpu_temp_critical_threshold_c": limits.critical_c,
            }
            if limits is not None
            else {}
        ),
    )
    last, skipped_at = [0, 0], []

    def waiting() -> bool:  # training waits once the checkpoint of its last step is there
        return (
            not switch and last[1] < steps and (folder / f"step_{last[0]:08d}.pt").exists()
        )

    def on_row(row: StepLog) -> None:
        last[:] = row.step, last[1] + (not row.skipped)
        bench.step()
        if row.skipped:
            skipped_at.append(bench.clock.now)

    def away() -> bool:
        return switch and trainer.amp.device != torch.device("cpu")

    bench = Bench(limits, waiting=waiting, away=away, **conditions)
    draws = torch.Generator().manual_seed(seed)
    trainer = SafeTrainer(
        dropout_mlp(seed),
        config,
        DataLoader(data(seed), ROWS, shuffle=True, generator=draws),
        loss_fn=nn.functional.mse_loss,
        on_row=on_row,
        checkpoint_dir=folder,
        thermal_source=bench.read if limits is not None else None,
        thermal_devices=["cpu", "cpu:1"] if switch else None,
    )
    run = HotRun(bench, trainer, trainer.result, [], skipped_at, folder / "log.csv")
    with logged():
        if resume:
            run.resumed_from = trainer.resume()
            last[:] = trainer.state.step, trainer.state.updates
        try:
            trainer.fit()
        except ThermalAbort as error:
            run.abort = error
    run.rows = list(trainer.result.rows)
    return run


def same_end(one: HotRun, other: HotRun) -> bool:
    """Whether weights, buffers and AdamW's moments are equal bit for bit."""
    moments = [run.trainer.amp.optimizer.state_dict()["state"] for run in (one, other)]
    pairs = zip(*(sorted(m.items()) for m in moments), strict=True)
    return all(
        torch.equal(value, other.weights[name]) for name, value in one.weights.items()
    ) and all(
        torch.equal(a[key], b[key]) for (_, a), (_, b) in pairs for key in ("exp_avg", "exp_avg_sq", "step")
    )  # fmt: skip


def losses(rows: Iterable[StepLog]) -> dict[int, tuple[float | None, bool]]:
    """Step -> loss and whether it was skipped; NaN as None, so that equal is equal."""
    return {
        r.step: (
            r.loss if r.loss is not None and math.isfinite(r.loss) else None,
            r.skipped,
        )
        for r in rows
    }


# --- traces and the command -----------------------------------------------------------------------------------


def write_trace(path: Path, readings: Sequence[tuple[float, float | None]]) -> None:
    """Readings as the CSV that ``safetrain watch --replay`` takes; an unknown is an empty cell."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["seconds", "gpu_temperature_c"])
        writer.writerows((f"{s:g}", "" if c is None else f"{c:.2f}") for s, c in readings)


def safetrain(*arguments: str, timeout_s: float = 60) -> tuple[int, list[str]]:
    """Run the command ``safetrain`` in a process of its own; its exit status and what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "safetrain_core", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
    )
    return done.returncode, (done.stdout + done.stderr).splitlines()

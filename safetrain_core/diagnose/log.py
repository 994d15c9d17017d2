"""A run's log as the rules see it: for each thing measured, the rows where it was measured, in the order of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .finding import Evidence

__all__ = ["Floats", "Log", "Series", "make_log"]

Floats = NDArray[np.float64]

#: Backward jumps of the step, as a share of all rows, above which the rows are taken to be shuffled and are sorted.
#: Below it each jump is a run that went on from an earlier step, and replaces what was logged from there on.
SHUFFLED_SHARE = 0.02


@dataclass(frozen=True)
class Series:
    """One measured thing: ``steps``, ``values`` and ``rows`` (where in the log), as long as it was logged."""

    steps: Floats
    values: Floats
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.values)

    def finite(self) -> Series:
        """Without NaN and infinity."""
        return self.where(np.isfinite(self.values))

    def where(self, keep: NDArray[np.bool_]) -> Series:
        """The points where ``keep`` is True."""
        return Series(self.steps[keep], self.values[keep], self.rows[keep])

    def on(self, rows: NDArray[np.int64]) -> Floats:
        """Values at these rows of the log; NaN where it was not measured there."""
        if not len(self):
            return np.full(len(rows), np.nan)
        at = np.minimum(np.searchsorted(self.rows, rows), len(self) - 1)
        return np.where(self.rows[at] == rows, self.values[at], np.nan)


@dataclass(frozen=True)
class Log:
    """A log, cleaned: each step once, rising.

    Args:
        series: role -> what was measured. texts: role -> row -> text.
        steps: of each row. faults: what was wrong with the log itself: kind -> where.
        columns: role -> the name of its column. source: where it comes from, for messages.
        lines: rows read, before repeated ones were dropped.
    """

    series: Mapping[str, Series]
    texts: Mapping[str, Mapping[int, str]]
    steps: Floats
    faults: Mapping[str, Sequence[Evidence]]
    columns: Mapping[str, str]
    source: str
    lines: int

    def __len__(self) -> int:
        return len(self.steps)

    def has(self, *roles: str) -> bool:
        """Whether each of these was measured at least once."""
        return all(role in self.series or role in self.texts for role in roles)


def make_log(
    numbers: Mapping[str, tuple[Floats, NDArray[np.bool_]]],
    texts: Mapping[str, Mapping[int, str]],
    count: int,
    columns: Mapping[str, str],
    source: str,
    faults: Mapping[str, Sequence[Evidence]] | None = None,
) -> Log:
    """A ``Log`` from columns as they were read.

    Args:
        numbers: role -> values, and where a value was logged at all (a logged NaN is not a missing one).
        texts: role -> row -> text. count: rows.

    >>> step, loss = np.array([1.0, 2, 3, 2, 3]), np.array([5.0, 4, 9, 3, 2])
    >>> there = np.ones(5, bool)
    >>> log = make_log({"step": (step, there), "loss": (loss, there)}, {}, 5, {}, "here")
    >>> log.series["loss"].values.tolist(), [str(e) for e in log.faults["backwards"]]
    ([5.0, 3.0, 2.0], ['step 2: after step 3, row 4'])
    """
    found: dict[str, list[Evidence]] = {kind: list(where) for kind, where in (faults or {}).items()}
    steps = _steps_of(numbers, count)
    keep = _one_row_a_step(numbers, steps, found)
    place = np.full(count, -1, dtype=np.int64)
    place[keep] = np.arange(len(keep))
    kept_steps = steps[keep]
    series = {}
    for role, (values, there) in numbers.items():
        rows = np.flatnonzero(there[keep]).astype(np.int64)
        if len(rows) and role != "step":
            series[role] = Series(kept_steps[rows], values[keep][rows], rows)
    words = {
        role: {int(place[row]): text for row, text in told.items() if place[row] >= 0} for role, told in texts.items()
    }
    return Log(series, {r: w for r, w in words.items() if w}, kept_steps, found, dict(columns), source, count)


def _steps_of(numbers: Mapping[str, tuple[Floats, NDArray[np.bool_]]], count: int) -> Floats:
    """The step of each row: its column, else the epoch where that only rises, else the row's number; gaps filled."""
    if "step" in numbers and numbers["step"][1].any():
        values, there = numbers["step"]
        good = there & np.isfinite(values)
        if good.all():
            return values
        if good.any():
            last = np.maximum.accumulate(np.where(good, np.arange(count), -1))
            return np.where(last >= 0, values[np.maximum(last, 0)], values[np.flatnonzero(good)[0]])
    if "epoch" in numbers:
        values, there = numbers["epoch"]
        if there.all() and np.all(np.diff(values) > 0):
            return values
    return np.arange(1, count + 1, dtype=np.float64)


def _one_row_a_step(
    numbers: Mapping[str, tuple[Floats, NDArray[np.bool_]]], steps: Floats, found: dict[str, list[Evidence]]
) -> NDArray[np.int64]:
    """The rows to judge by, in order; what is wrong with the order goes into ``found``.

    Trainers that log validation apart write two rows for one step: only rows that hold a training loss (any number
    where there is none) count as a step.
    """
    count = len(steps)
    there = numbers["loss"][1] if "loss" in numbers else np.ones(count, dtype=bool)
    train = np.flatnonzero(there)
    of_train = steps[train]
    change = np.diff(of_train)
    for at in np.flatnonzero(change < 0)[:100]:
        where = Evidence(int(of_train[at + 1]), {"after step": int(of_train[at]), "row": int(train[at + 1]) + 1})
        found.setdefault("backwards", []).append(where)
    for at in np.flatnonzero(change == 0)[:100]:
        found.setdefault("twice", []).append(Evidence(int(of_train[at + 1]), {"row": int(train[at + 1]) + 1}))
    backward = int((change < 0).sum())
    if backward == 0 and not (change == 0).any():
        return np.arange(count) if np.all(np.diff(steps) >= 0) else np.argsort(steps, kind="stable")
    if backward > max(2, SHUFFLED_SHARE * count):
        order = np.argsort(steps, kind="stable")
        ordered, is_train = steps[order], there[order]
        last_of_step = np.append(np.diff(ordered) != 0, True)
        return order[last_of_step | ~is_train]
    # From behind: a row stays where its step lies before all that was logged later.
    ahead = np.append(np.minimum.accumulate(np.where(there, steps, np.inf)[::-1])[::-1][1:], np.inf)
    kept = np.flatnonzero(np.where(there, steps < ahead, steps <= ahead))
    return kept[np.argsort(steps[kept], kind="stable")]

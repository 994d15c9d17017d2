"""The doctor beside a run: the cheap rules over the rows as they come, each finding told once."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from ..records import StepLog
from .finding import Finding
from .rule import Rule
from .rules_amp import norm_follows_scale, scale_collapsed, scale_never_moves
from .rules_clip import loss_times_k
from .rules_loss import spike_stays
from .rules_resume import schedule_moves_on_skips

__all__ = ["RUNNING", "RunningDoctor"]

log = logging.getLogger(__name__)

#: Rules that may speak before a run has ended. The others need its end, or the trainer has a guard for the same:
#: its retries for NaN, its alert for the skip rate.
RUNNING: tuple[Rule, ...] = (
    spike_stays,
    scale_never_moves,
    norm_follows_scale,
    scale_collapsed,
    loss_times_k,
    schedule_moves_on_skips,
)

#: Rows that are looked back over, and rows between two looks; the first looks come earlier.
WINDOW, EVERY = 500, 250
FIRST_LOOKS = (25, 50, 100)

#: Rules that speak of the beginning of a run: they look only while the window still holds it.
OF_THE_START = (loss_times_k,)


def _warn(finding: Finding) -> None:
    log.warning("doctor: %s; %s. What to do: %s", finding.symptom, finding.cause, finding.fix)


class RunningDoctor:
    """Takes in a run's rows, and says what it finds when it appears.

    Args:
        say: called with each new finding of severity error or warning; default: logged as a warning.
        rules: which to try. window: rows looked back over. every: rows between two looks.

    ``findings``: what was found, in order. ``rows_read``: rows that looks have gone through, the cost of it all: at
    most ``window / every`` per row of the run.

    >>> said = []
    >>> doctor = RunningDoctor(say=lambda finding: said.append(finding.rule))
    >>> for step in range(1, 201):
    ...     bad = step % 10 == 0
    ...     doctor.see(StepLog(step, 0.1, float("inf") if bad else 1.0, None, 2.0, 1024.0, bad, "non_finite_grad"))
    >>> said
    ['scale_never_moves']
    """

    def __init__(
        self,
        say: Callable[[Finding], None] = _warn,
        *,
        rules: Sequence[Rule] = RUNNING,
        window: int = WINDOW,
        every: int = EVERY,
    ) -> None:
        self.findings: list[Finding] = []
        self.rows_read = 0
        self._say, self._rules, self._every = say, list(rules), every
        self._rows: deque[dict[str, Any]] = deque(maxlen=window)
        self._seen = 0

    def see(self, row: StepLog, val_loss: float | None = None) -> None:
        """Take in one row; look, where a look is due."""
        self._rows.append({**asdict(row), "val_loss": val_loss})
        self._seen += 1
        if self._seen in FIRST_LOOKS or self._seen % self._every == 0:
            self._look()

    def _look(self) -> None:
        from .readers import read_rows

        rows = list(self._rows)
        self.rows_read += len(rows)
        try:
            seen = read_rows(rows, source="the run")
        except ValueError:  # nothing measured yet
            return
        for rule in list(self._rules):
            if rule.lacks(seen) or (rule in OF_THE_START and self._seen > len(rows)):
                continue
            new = [finding for finding in rule.look(seen) if finding.severity != "info"]
            if new:
                self._rules.remove(rule)  # once told is enough
            for finding in new:
                self.findings.append(finding)
                self._say(finding)

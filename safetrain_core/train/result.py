"""What a run reached."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from ..diagnose.finding import Finding
from ..records import StepLog, TrainState
from ..thermal.guard import ThermalEvent

__all__ = ["FitResult"]


@dataclass(slots=True)
class FitResult:
    """What a run reached.

    ``status`` is ``completed``, ``interrupted`` (with ``signal``), or ``failed`` or ``aborted`` (only as ``.result`` of
    the exception). Losses are in the unit of the loss function; what was never measured is None. ``rows``: the last
    1,000. Of the thermal guard: how often and for how many seconds the run paused, how often it switched device, and
    each change of the guard's state, a ``ThermalEvent``. ``findings``: what the running doctor found.

    >>> FitResult(state=TrainState(step=20, updates=19), skips=1).skip_rate
    0.05
    """

    status: str = "failed"
    state: TrainState = field(default_factory=TrainState)
    skips: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    val_loss: float | None = None
    signal: signal.Signals | None = None
    rows: list[StepLog] = field(default_factory=list)
    pauses: int = 0
    paused_s: float = 0.0
    switches: int = 0
    thermal_events: list[ThermalEvent] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def skip_rate(self) -> float:
        """Skipped share of all attempts."""
        return self.skips / self.state.step if self.state.step else 0.0

    def see(self, row: StepLog) -> None:
        """Take in one row's loss."""
        if not row.skipped:
            self.first_loss = row.loss if self.first_loss is None else self.first_loss
            self.last_loss = row.loss

"""What a run reached."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from ..records import StepLog, TrainState

__all__ = ["FitResult"]


@dataclass(slots=True)
class FitResult:
    """What a run reached.

    ``status`` is ``completed``, ``interrupted`` (with ``signal``), or ``failed`` (only as ``.result`` of the
    exception). Losses are in the unit of the loss function; what was never measured is None. ``rows``: the last 1,000.

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

    @property
    def skip_rate(self) -> float:
        """Skipped share of all attempts."""
        return self.skips / self.state.step if self.state.step else 0.0

    def see(self, row: StepLog) -> None:
        """Take in one row's loss."""
        if not row.skipped:
            self.first_loss = row.loss if self.first_loss is None else self.first_loss
            self.last_loss = row.loss

"""The budget of bad steps: how many a run survives before it is called a failure."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import TrainingFailed
from ..records import StepLog, TrainState
from ..step.scaling import MIN_SCALE

__all__ = ["Retries"]


class Retries:
    """Counts bad steps in ``state.retries``.

    Args:
        limit: bad steps survived. forgive_after: good updates in a row after which the count starts anew; None = never.
        newest_good: gives the path of the checkpoint to resume from, for the failure's message.

    >>> budget = Retries(TrainState(), limit=1)
    >>> bad = StepLog(4, 0.1, None, None, float("nan"), None, True, "non_finite_loss")
    >>> budget.spend(bad) is None, budget.state.retries
    (True, 1)
    >>> print(budget.spend(bad))
    loss=nan at step 4 (non_finite_loss), 1 of 1 retries used; no checkpoint was saved; lower the learning rate or ...
    """

    def __init__(
        self,
        state: TrainState,
        limit: int,
        forgive_after: int | None = None,
        newest_good: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.state, self.limit, self.forgive_after, self.newest_good = state, limit, forgive_after, newest_good
        self.good_in_a_row = 0

    def spend(self, row: StepLog) -> TrainingFailed | None:
        """Count the row; where it is bad and no retry is left, the failure to raise once the row is on disk."""
        if not row.skipped:
            self.good_in_a_row += 1
            if self.good_in_a_row == self.forgive_after:
                self.state.retries = 0
            return None
        # An FP16 overflow with a finite loss, while the scale can still fall, is the scaler doing its work.
        if row.skip_reason == "non_finite_grad" and row.scale is not None and row.scale > MIN_SCALE:
            return None
        self.good_in_a_row = 0
        if self.state.retries < self.limit:
            self.state.retries += 1
            return None
        values = {"loss": row.loss, "pre_clip": row.pre_clip, "post_clip": row.post_clip}
        seen = ", ".join(f"{name}={value:.6g}" for name, value in values.items() if value is not None)
        path = self.newest_good()
        advice = "no checkpoint was saved; lower the learning rate or look at the data of that step"
        return TrainingFailed(
            f"{seen} at step {row.step} ({row.skip_reason}), {self.state.retries} of {self.limit} retries used; "
            + (f"resume from {path}" if path is not None else advice),
            step=row.step,
            reason=str(row.skip_reason),
            values=values,
            newest_good=path,
        )

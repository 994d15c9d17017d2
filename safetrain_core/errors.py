"""The exceptions that stop a run.

::

    ValueError               a bad argument or configuration, found before anything is changed
    RuntimeError
      SafeTrainError         a stop at run time; .result holds what the run had reached
        TrainingFailed       bad steps used up the retries
        ThermalAbort         the device is above its critical temperature
        CheckpointError      a checkpoint that cannot be trusted, or does not fit
          CheckpointDoesNotFit   whole, but of another model, optimizer, schedule or run
        RankFailed           one of several ranks raised, died, or did not end in time

``torch.utils.checkpoint`` has a ``CheckpointError`` of its own, about recomputation: another thing.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "CheckpointDoesNotFit",
    "CheckpointError",
    "RankFailed",
    "SafeTrainError",
    "ThermalAbort",
    "TrainingFailed",
    "type_of",
]


def type_of(value: Any) -> str:
    """The type of ``value`` with its article, for a message.

    >>> type_of(7), type_of("seven"), type_of([])
    ('an int', 'a str', 'a list')
    """
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


class SafeTrainError(RuntimeError):
    """A stop at run time. ``result`` is the trainer's result so far, or None outside a trainer.

    >>> try:
    ...     raise TrainingFailed("loss=nan at step 812", step=812, reason="non_finite_loss")
    ... except SafeTrainError as stop:
    ...     print(stop, "|", stop.result)
    loss=nan at step 812 | None
    """

    def __init__(self, message: str, *, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


class TrainingFailed(SafeTrainError):
    """More bad steps than ``max_nan_retries`` allows.

    Args:
        message: what happened, the values, the limit and the next action.
        step: the attempt that used up the last retry.
        reason: one of ``records.SKIP_REASONS``.
        values: the numbers seen at that attempt, for example ``{"loss": nan, "pre_clip": None}``.
        newest_good: path of the newest checkpoint to resume from, or None where there is none.
        result: the trainer's result so far.

    >>> TrainingFailed("stopped", step=3, reason="loss_jump", values={"loss": 9.0}).values
    {'loss': 9.0}
    """

    def __init__(
        self,
        message: str,
        *,
        step: int,
        reason: str,
        values: dict[str, float | None] | None = None,
        newest_good: str | None = None,
        result: Any = None,
    ) -> None:
        super().__init__(message, result=result)
        self.step = step
        self.reason = reason
        self.values = values or {}
        self.newest_good = newest_good


class ThermalAbort(SafeTrainError):
    """The device passed its critical temperature, or its sensor was lost; a checkpoint was saved first.

    >>> str(ThermalAbort("gpu 0 at 96 C, critical is 95 C"))
    'gpu 0 at 96 C, critical is 95 C'
    """


class CheckpointError(SafeTrainError):
    """A checkpoint that is torn, altered, not ours, or does not fit what it is loaded into.

    >>> str(CheckpointError("world_size mismatch: saved on 4 ranks, loading on 2"))
    'world_size mismatch: saved on 4 ranks, loading on 2'
    """


class CheckpointDoesNotFit(CheckpointError):
    """A whole checkpoint of something else than what it is to be loaded into: choose another of the two.

    >>> str(CheckpointDoesNotFit("a.pt does not fit the model: weight has shape (1, 2) there and (1, 3) here"))
    'a.pt does not fit the model: weight has shape (1, 2) there and (1, 3) here'
    """


class RankFailed(SafeTrainError):
    """One of several ranks fell, and all were ended.

    Args:
        rank: which. kind: the name of the exception that it raised, or ``exited``, ``killed``, ``timeout``.
        text: the exception's own text. trace: its traceback, as text.

    >>> RankFailed("rank 1 raised ValueError: no", rank=1, kind="ValueError", text="no").rank
    1
    """

    def __init__(self, message: str, *, rank: int, kind: str, text: str = "", trace: str = "") -> None:
        super().__init__(message)
        self.rank, self.kind, self.text, self.trace = rank, kind, text, trace

    def __str__(self) -> str:
        """With the rank's own traceback below."""
        return f"{self.args[0]}\n\n{self.trace}".rstrip()

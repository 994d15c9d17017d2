"""What a run says of itself: one row per attempted optimizer step, the refused ones, the counters.

Every fact about a row is stated here once: its fields, its printed line, the reasons for a refusal, and the
columns that the CSV log takes from it.
"""

from __future__ import annotations

import statistics
import warnings
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = [
    "BASE_COLUMNS",
    "BLOCK_COLUMN",
    "GPU_COLUMNS",
    "GRADIENT_COLUMNS",
    "LOSSES_KEPT",
    "SKIP_REASONS",
    "THERMAL_COLUMN",
    "SkipLog",
    "SkipRateAlert",
    "StepLog",
    "TrainState",
    "rolling_skip_rate",
]

#: Why an update was refused. When ranks disagree the last one in this order wins, on every rank.
SKIP_REASONS = (
    "non_finite_grad",
    "non_finite_loss",
    "post_clip_explosion",
    "loss_jump",
    "non_finite_state",
)

#: How many accepted losses a TrainState keeps.
LOSSES_KEPT = 1000

#: The CSV columns that every run has, in order.
BASE_COLUMNS = (
    "step",
    "updates",
    "epoch",
    "loss",
    "learning_rate",
    "gradient_norm",
    "gradient_norm_clipped",
    "scaler_scale",
    "skipped",
    "skip_reason",
    "retries",
    "effective_batch_size",
    "step_time_ms",
    "samples_per_s",
    "val_loss",
)

#: Gradient statistics before the clip, every ``gradient_log_interval`` steps; empty between.
GRADIENT_COLUMNS = ("gradient_max_abs", "gradient_rms")

#: Prefix of a block's column, every ``telemetry_log_interval`` steps where asked for.
BLOCK_COLUMN = "grad_norm_"

#: Readings of the GPU, every ``telemetry_log_interval`` steps where asked for; empty where unknown.
GPU_COLUMNS = ("gpu_temperature_c", "gpu_power_w", "gpu_utilization_pct", "gpu_memory_used_mib")

#: What the thermal guard did between this step and the next, for example "paused 86 C; resumed 74 C after 41.3 s".
THERMAL_COLUMN = "thermal_event"


@dataclass(frozen=True, slots=True)
class StepLog:
    """One attempted optimizer step. What is unknown is None, never 0.

    Args:
        step: the attempt, counted from 1; it never repeats within a run.
        lr: learning rate of the first parameter group in this step.
        pre_clip: global L2 norm of the gradients before the clip (after unscaling).
        post_clip: the norm after the clip; None where the gradients were not finite or never made.
        loss: mean loss of the window, not divided, not scaled.
        scale: the loss scaling factor used in this step; None without a GradScaler.
        skipped: True when the update was refused.
        skip_reason: one of ``SKIP_REASONS``, or None.

    >>> print(StepLog(7, 0.01, 1.234567, 1.0, 0.123456, 65536.0))
    STEP step=  7 lr=0.010000 pre_clip=  1.234567 post_clip=  1.000000 loss=0.123456 scale=65536.0 reason=-
    >>> print(StepLog(8, 0.01, None, None, float("nan"), None, True, "non_finite_loss"))
    SKIP step=  8 lr=0.010000 pre_clip=         - post_clip=         - loss=nan scale=- reason=non_finite_loss
    """

    step: int
    lr: float
    pre_clip: float | None
    post_clip: float | None
    loss: float | None
    scale: float | None
    skipped: bool = False
    skip_reason: str | None = None

    def __str__(self) -> str:
        def shown(value: float | None, spec: str, width: int = 0) -> str:
            return "-".rjust(width) if value is None else format(value, spec)

        return (
            f"{'SKIP' if self.skipped else 'STEP'} step={self.step:3d} lr={self.lr:.6f} "
            f"pre_clip={shown(self.pre_clip, '10.6f', 10)} post_clip={shown(self.post_clip, '10.6f', 10)} "
            f"loss={shown(self.loss, '.6f')} scale={shown(self.scale, '.1f')} reason={self.skip_reason or '-'}"
        )


@dataclass(frozen=True, slots=True)
class SkipLog:
    """A refused step: which, why, and the numbers it was judged by.

    >>> row = StepLog(8, 0.01, float("inf"), None, 0.2, 65536.0, True, "non_finite_grad")
    >>> SkipLog.from_row(row)
    SkipLog(step=8, reason='non_finite_grad', loss=0.2, pre_clip=inf, scale=65536.0)
    """

    step: int
    reason: str
    loss: float | None
    pre_clip: float | None
    scale: float | None

    @classmethod
    def from_row(cls, row: StepLog) -> SkipLog:
        """The refused step that ``row`` tells of; ``ValueError`` when it was not refused."""
        if row.skip_reason is None:
            raise ValueError(f"step {row.step} was not skipped, so it has no reason; pass a row with skipped=True")
        return cls(row.step, row.skip_reason, row.loss, row.pre_clip, row.scale)


@dataclass(slots=True)
class TrainState:
    """The counters of a run. ``step`` counts attempts, ``updates`` counts optimizer steps taken.

    ``epoch`` and ``batch_in_epoch`` are the data position, ``retries`` the bad steps spent, and ``losses``
    the last 1,000 accepted losses.

    >>> state = TrainState()
    >>> state.step += 1
    >>> state.accept(0.5)
    >>> state.updates, TrainState.from_dict(state.to_dict()) == state
    (1, True)
    """

    step: int = 0
    updates: int = 0
    epoch: int = 0
    batch_in_epoch: int = 0
    retries: int = 0
    losses: list[float] = field(default_factory=list)

    def accept(self, loss: float) -> None:
        """Count one optimizer step and keep its loss."""
        self.updates += 1
        self.losses.append(loss)
        del self.losses[:-LOSSES_KEPT]

    def loss_limit(self, factor: float | None, window: int) -> float | None:
        """``factor`` x the median of the last ``window`` accepted losses: above it, a loss is a jump.

        None where there is no limit: no factor, no full window yet, or a median that is not above 0.

        >>> state = TrainState(losses=[1.0, 3.0, 2.0])
        >>> state.loss_limit(2.0, window=3), state.loss_limit(2.0, window=4)
        (4.0, None)
        """
        recent = self.losses[-window:]
        if factor is None or len(recent) < window:
            return None
        median = statistics.median(recent)
        return factor * median if median > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """Plain types only, so that ``torch.load(weights_only=True)`` reads them back."""
        return asdict(self)

    def load_dict(self, data: dict[str, Any]) -> None:
        """The inverse of ``to_dict``, in place: whoever holds this object sees the loaded counters.

        Raises:
            ValueError: a key is missing or too many; nothing is changed then.
        """
        expected = set(self.__dataclass_fields__)
        if set(data) != expected:
            raise ValueError(f"train state has keys {sorted(data)}, expected {sorted(expected)}")
        for name, value in data.items():
            setattr(self, name, list(value) if name == "losses" else value)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TrainState:
        """A new one from what ``to_dict`` gave; ``ValueError`` as ``load_dict``."""
        state = cls()
        state.load_dict(data)
        return state


def rolling_skip_rate(log: Iterable[StepLog], window: int = 1000) -> list[float]:
    """Share of skipped rows among the last ``window`` rows, one rate per row, in one pass.

    Args:
        log: rows in order, for example ``AmpTrainState.log``.
        window: rows looked back over; the first rows are divided by what there is so far.

    Raises:
        ValueError: ``window`` below 1.

    >>> rows = [StepLog(i, 0.1, None, None, None, None, skipped=i == 2) for i in (1, 2, 3, 4)]
    >>> rolling_skip_rate(rows, window=2)
    [0.0, 0.5, 0.5, 0.0]
    """
    if window < 1:
        raise ValueError(f"window={window} must be at least 1")
    recent: deque[bool] = deque()
    skipped, rates = 0, []
    for row in log:
        recent.append(row.skipped)
        skipped += row.skipped
        if len(recent) > window:
            skipped -= recent.popleft()
        rates.append(skipped / len(recent))
    return rates


class SkipRateAlert:
    """Warns once each time the share of skipped steps over a full window rises above a limit.

    >>> alert = SkipRateAlert(limit=0.05, window=4)
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     for step, skipped in enumerate([False, True, False, False, False], start=1):
    ...         alert.see(step, skipped)
    >>> print(caught[0].message)
    skip rate 25.0% over the last 4 steps is above 5.0% at step 4: the model is past the FP16 range ...
    """

    def __init__(self, limit: float, window: int = 1000) -> None:
        self.limit = limit
        self._recent: deque[bool] = deque(maxlen=window)
        self._skipped = 0
        self._above = False

    def see(self, step: int, skipped: bool) -> None:
        """Take in one row."""
        window = self._recent.maxlen or 1
        if len(self._recent) == window:
            self._skipped -= self._recent[0]
        self._recent.append(skipped)
        self._skipped += skipped
        rate = self._skipped / window
        above = len(self._recent) == window and rate > self.limit
        if above and not self._above:
            warnings.warn(
                f"skip rate {rate:.1%} over the last {window} steps is above {self.limit:.1%} at step {step}: "
                "the model is past the FP16 range or the data is bad; look at the reasons in skip_log, "
                "lower the learning rate or use bfloat16",
                stacklevel=5,
            )
        self._above = above

"""What both callbacks do beside a loop that is not ours: rows, skip-rate alert, doctor, loss-jump stop, thermal guard."""

from __future__ import annotations

import contextlib
import logging
import math
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..config import TrainConfig
from ..diagnose.rules_loss import nan_stays
from ..diagnose.running import RunningDoctor
from ..distributed import PAUSE, is_main, sums_and_agreement, world_size
from ..errors import ThermalAbort, TrainingFailed
from ..records import BASE_COLUMNS, SkipRateAlert, StepLog, TrainState
from ..step.gradients import gathered
from ..train.result import FitResult
from ..train.sinks import RowLog, Sink, open_rows
from ..train.telemetry import Attempt, row_cells
from ..train.thermal import Thermal
from ..train.thermal_setup import thermal_on_device

__all__ = ["KNOBS", "HostRun"]

log = logging.getLogger(__name__)

#: The fields of ``TrainConfig`` that the callbacks take; the others are the host trainer's own business.
KNOBS = (
    "skip_rate_alert",
    "loss_jump_factor",
    "loss_jump_window",
    "csv_log_path",
    "csv_rotate_on_schema_change",
    "telemetry_log_interval",
    "gpu_metrics_backend",
    "nvml_device_index",
    "gpu_temp_guard",
    "gpu_temp_pause_threshold_c",
    "gpu_temp_resume_threshold_c",
    "gpu_temp_critical_threshold_c",
    "gpu_temp_poll_interval_seconds",
)

#: Rows kept in memory; the CSV has them all.
ROWS_KEPT = 1000

#: A host that has no guard against NaN trains on with it: a doctor of its own looks for it, over few rows and often.
NAN_WINDOW = NAN_EVERY = 10

#: Runs that have begun. One that an exception has ended, in a loop that tells nobody, gives its log to the next.
_BEGUN: weakref.WeakSet[HostRun] = weakref.WeakSet()


class HostRun:
    """A run of somebody else's loop, as a callback tells of it: it reads numbers, and says when to wait or to stop.

    A window goes ``begin_window``, ``see_batch`` for each micro-batch, ``before_update``, ``after_update``; with several
    ranks all of them call these, and all get the same answers.

    Args:
        knobs: fields of ``TrainConfig``, those in ``KNOBS``.
        sinks, thermal_source: see ``SafeTrainer``. doctor: look for faults in the rows as they come.
        raise_on_loss_jump: end with ``TrainingFailed``; otherwise a loss jump is logged, and training just ends.

    Raises:
        ValueError: a knob that is unknown or the host's, a value out of range, a guard without a source.
    """

    def __init__(
        self,
        knobs: Mapping[str, Any],
        *,
        sinks: Sequence[Sink] = (),
        thermal_source: Any = None,
        doctor: bool = True,
        raise_on_loss_jump: bool = False,
    ) -> None:
        foreign = next((name for name in knobs if name in TrainConfig.model_fields and name not in KNOBS), None)
        if foreign is not None:
            raise ValueError(f"{foreign} is the trainer's own to say; this callback takes {', '.join(KNOBS)}")
        self.config = TrainConfig(**knobs)
        self.sinks, self.thermal_source, self.raise_on_loss_jump = sinks, thermal_source, raise_on_loss_jump
        if self.config.gpu_metrics_backend == "none":  # what is wrong without a card is told now; NVML when it is asked
            thermal_on_device(self.config, "cpu", FitResult(), thermal_source)
        self._wants_doctor = doctor
        self.state, self.result = TrainState(), FitResult()
        self.log: RowLog | None = None
        self.failure: TrainingFailed | ThermalAbort | None = None
        self._thermal: Thermal | None = None
        self._newest_good: Callable[[], str | None] = lambda: None
        self._stack = contextlib.ExitStack()
        self._reset_window()

    # --- a run ------------------------------------------------------------------------------------------------

    def begin(
        self,
        step: int,
        device: Any,
        newest_good: Callable[[], str | None],
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        """The host's loop begins; ``step`` above 0 is a run that goes on, with what ``state_dict`` gave as ``saved``."""
        self.end()
        for other in list(_BEGUN):
            if other.config.csv_log_path is not None and other.config.csv_log_path == self.config.csv_log_path:
                other.end()
        # A run that had no such callback before: as far as anyone knows, none of its updates was skipped.
        fresh = TrainState(step=step, updates=step)
        self.state = TrainState.from_dict(dict(saved)) if saved is not None and saved.get("step") == step else fresh
        self.result, self.failure, self._newest_good = FitResult(state=self.state), None, newest_good
        self._alert = SkipRateAlert(self.config.skip_rate_alert)
        self._doctors = []
        if self._wants_doctor and is_main():
            self._doctors = [RunningDoctor(rules=[nan_stays], window=NAN_WINDOW, every=NAN_EVERY), RunningDoctor()]
            for doctor in self._doctors:
                doctor.findings = self.result.findings
        with contextlib.ExitStack() as stack:
            self._thermal = thermal_on_device(self.config, str(device), self.result, self.thermal_source, newest_good)
            if self._thermal is not None:
                stack.enter_context(self._thermal)
            heat = self._thermal.columns if self._thermal is not None else []
            opened = open_rows(self.config, [*BASE_COLUMNS, *heat], self.sinks, resume_after=step or None)
            self.log = stack.enter_context(opened)
            self._stack = stack.pop_all()
        _BEGUN.add(self)

    def end(self) -> None:
        """Close the log and end the polling, however the run has ended; nothing where it has not begun."""
        _BEGUN.discard(self)
        self.log = self._thermal = None
        self._stack.close()

    def finish(self) -> None:
        """The host's loop has ended in its own way; raises what stopped it, where that is to be raised."""
        self.end()
        if self.failure is None:
            self.result.status = "completed"
        elif isinstance(self.failure, ThermalAbort) or self.raise_on_loss_jump:
            raise self.failure

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run has to know, in plain types: it goes into the host's own checkpoint."""
        return {**self.state.to_dict(), "losses": self.state.losses[-self.config.loss_jump_window :]}

    # --- a window ---------------------------------------------------------------------------------------------

    def _reset_window(self) -> None:
        self.losses: list[Tensor] = []
        self._samples, self._began, self._row, self._asked = 0, time.perf_counter(), None, 0
        self._limit: float | None = None

    def begin_window(self, epoch: int) -> None:
        """The first micro-batch of an optimizer step begins."""
        self._reset_window()
        self.state.epoch = epoch

    def see_batch(self, batch: Any) -> None:
        """Count the samples of a micro-batch, by the first dimension of its first tensor."""
        self._samples += _samples_in(batch) or 0

    def before_update(
        self,
        optimizer: Any,
        loss: Tensor | None,
        norm: Any,
        *,
        scaler: Any = None,
        max_norm: float | None = None,
        still_scaled: bool = False,
    ) -> None:
        """Read the window's numbers, all at once; where the loss has jumped, take the gradients away from the update.

        Args:
            loss: the window's mean loss on this rank. norm: of the unscaled gradients before the clip, over all ranks.
            scaler: the host's GradScaler. max_norm: what the host clips to; 0 = it does not, None = nobody knows.
            still_scaled: the optimizer unscales the gradients by itself, in its step: the norm is of scaled ones.
        """
        scale = float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else None
        mean, pre = _read(loss, norm)
        if pre is not None and still_scaled and scale:
            pre /= scale
        if world_size() > 1:
            device = loss.device if loss is not None else None
            asked = PAUSE if self._thermal is not None and self._thermal.hot else 0
            told = torch.tensor([math.nan if mean is None else mean], dtype=torch.float64, device=device)
            sums, self._asked = sums_and_agreement(told, asked)
            mean = None if mean is None else sums[0] / world_size()
        finite = pre is not None and math.isfinite(pre)
        post = None
        if pre is not None and finite and max_norm is not None:
            post = min(pre, max_norm) if max_norm > 0 else pre
        limit = self.state.loss_limit(self.config.loss_jump_factor, self.config.loss_jump_window)
        # What the host's scaler is about to skip is no jump.
        skips = scale is not None and pre is not None and not finite
        jumps = limit is not None and mean is not None and not mean <= limit and not skips
        self._limit = limit if jumps else None
        lr = float(optimizer.param_groups[0]["lr"])
        self._row = StepLog(0, lr, pre, post, mean, scale, jumps, "loss_jump" if jumps else None)
        if jumps:
            _take_gradients_away(optimizer, by_overflow=still_scaled and scale is not None)

    def after_update(self, step: int, *, scaler: Any = None, skipped: bool = False) -> None:
        """The update has been taken, or left out: write its row, and look at it.

        Args:
            step: the host's count of optimizer steps, this one included. skipped: the host says that it was skipped.
        """
        row = self._row
        if row is None:
            return
        seconds = max(time.perf_counter() - self._began, 1e-9)
        row = replace(row, step=step)
        if not row.skipped and (skipped or _was_skipped(row, scaler)):
            bad_loss = row.loss is not None and not math.isfinite(row.loss)
            row = replace(row, skipped=True, skip_reason="non_finite_loss" if bad_loss else "non_finite_grad")
        self._count(row)
        if self._limit is not None:
            self.failure = self._jumped(row, self._limit)
        if is_main():
            cells = self._thermal.cells(step) if self._thermal is not None else {}
            attempt = Attempt((self.state.epoch, 0), self._samples * world_size(), seconds, cells)
            told: dict[str, Any] = {**row_cells(row, attempt, self.state.updates, 0, None), "retries": None}
            if not self._samples:
                told["effective_batch_size"] = told["samples_per_s"] = None
            if self.log is not None:
                self.log.write(told)
            self._alert.see(step, row.skipped)
            for doctor in self._doctors:
                doctor.see(row)

    def _count(self, row: StepLog) -> None:
        self.state.step = row.step
        if not row.skipped and row.loss is not None and math.isfinite(row.loss):
            self.state.accept(row.loss)
        elif not row.skipped:
            self.state.updates += 1
        self.result.skips = self.state.step - self.state.updates
        self.result.see(row)
        self.result.rows.append(row)
        del self.result.rows[:-ROWS_KEPT]

    def _jumped(self, row: StepLog, limit: float) -> TrainingFailed:
        path = self._newest_good()
        failure = TrainingFailed(
            f"loss={row.loss:.6g} at step {row.step} (loss_jump) is above {limit:.6g}, which is "
            f"{self.config.loss_jump_factor:g} x the median of the last {self.config.loss_jump_window} accepted losses; "
            "its update was left out, and training stops; look at that batch, then "
            + (f"resume from {path}" if path is not None else "start again: no checkpoint was saved"),
            step=row.step,
            reason="loss_jump",
            values={"loss": row.loss, "pre_clip": row.pre_clip},
            newest_good=path,
            result=self.result,
        )
        log.error("%s", failure)
        return failure

    def see_validation(self, loss: Any) -> None:
        """Put a validation loss into the last row."""
        if self.log is not None and loss is not None:
            self.log.amend({"val_loss": float(loss)})

    # --- heat -------------------------------------------------------------------------------------------------

    @property
    def hot(self) -> bool:
        """Whether to wait, or to end for heat, before the next window: this process says so, or one of several ranks."""
        if self._thermal is None:
            return False
        return self._thermal.hot if world_size() == 1 else bool(self._asked & PAUSE)

    def wait(self, save: Callable[[], Any] = lambda: None) -> None:
        """Wait while it is too hot, after a ``save()``; ``ThermalAbort`` above critical, or when the sensor is lost."""
        if self._thermal is not None:
            self._thermal.before_window(self.log, save, lambda: False)


def _read(*values: Any) -> list[float | None]:
    """The values as floats, in one read of the host; None stays."""
    tensors = {}
    for i, value in enumerate(values):
        if value is not None:
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            tensors[i] = torch.as_tensor(value).detach().reshape(())
    told = dict(zip(tensors, gathered(list(tensors.values())).tolist(), strict=True)) if tensors else {}
    return [told.get(i) for i in range(len(values))]


def _was_skipped(row: StepLog, scaler: Any) -> bool:
    """Whether the host's scaler has skipped the update: its gradients were not finite, or it has made its factor smaller.

    Accelerate's own flag misses it where the optimizer is a fused one, which is called and leaves the update out itself.
    """
    if row.scale is None:
        return False
    overflowed = row.pre_clip is not None and not math.isfinite(row.pre_clip)
    return overflowed or float(scaler.get_scale()) < row.scale


def _take_gradients_away(optimizer: Any, *, by_overflow: bool) -> None:
    """Make the optimizer's next step leave everything as it is: torch's optimizers pass over weights without gradient.

    Args:
        by_overflow: a scaler looks at the gradients only now, and wants some: an Inf makes it skip the step.
    """
    weights = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    for weight in weights:
        if by_overflow:
            weight.grad.fill_(math.inf)
        else:
            weight.grad = None


def _samples_in(batch: Any) -> int | None:
    """The first dimension of the first tensor in a batch, however nested; None where there is none.

    >>> _samples_in({"name": "x", "input": [torch.zeros(3, 5), torch.zeros(7)]})
    3
    """
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else 1
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((count for count in map(_samples_in, parts) if count is not None), None)

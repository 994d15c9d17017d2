"""What both callbacks do beside a loop that is not ours: rows, skip-rate alert, doctor, loss jumps, thermal guard."""

from __future__ import annotations

import contextlib
import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..config import TrainConfig
from ..diagnose.rules_loss import nan_stays
from ..diagnose.running import RunningDoctor
from ..distributed import PAUSE, is_main, world_size
from ..errors import ThermalAbort, TrainingFailed
from ..records import BASE_COLUMNS, SkipRateAlert, StepLog, TrainState
from ..train.result import FitResult
from ..train.sinks import RowLog, Sink, open_rows
from ..train.telemetry import Attempt, row_cells
from ..train.thermal import Thermal
from ..train.thermal_setup import thermal_on_device
from .window import Window, take_gradients_away

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

    A step goes ``begin_window``, ``before_update``, ``after_update``; ``window`` is the present one. With several ranks
    all of them call these, and all get the same answers.

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
        self._doctors: list[RunningDoctor] = []
        self.begin_window(0)

    # --- a run ------------------------------------------------------------------------------------------------

    def begin(
        self,
        step: int,
        device: Any,
        newest_good: Callable[[], str | None],
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        """The host's loop begins, or goes on from ``step``, with what ``state_dict`` gave at that step as ``saved``."""
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

    def begin_window(self, epoch: int) -> None:
        """The first micro-batch of an optimizer step begins."""
        self.window = Window(epoch)
        self._limit: float | None = None  # that the window's loss has broken

    def before_update(self, optimizer: Any, loss: Tensor | None, norm: Any, **how: Any) -> None:
        """Read the window's numbers, see ``Window.read``; where the loss has jumped, keep it from being taken."""
        window, config = self.window, self.config
        asked = PAUSE if self._thermal is not None and world_size() > 1 and self._thermal.hot else 0
        window.read(optimizer, loss, norm, **how, asked=asked)
        row = window.row
        limit = self.state.loss_limit(config.loss_jump_factor, config.loss_jump_window)
        if row is None or row.loss is None or limit is None or row.loss <= limit or window.overflows:
            return
        self._limit = limit
        window.row = replace(row, skipped=True, skip_reason="loss_jump")
        take_gradients_away(optimizer, by_overflow=how.get("still_scaled", False) and row.scale is not None)

    def after_update(self, step: int, *, scaler: Any = None, skipped: bool = False) -> None:
        """The update has been taken, or left out: write its row, and look at it.

        Args:
            step: the host's count of optimizer steps, this one included. skipped: the host says that it was skipped.
        """
        row, window = self.window.row_of(step, scaler=scaler, skipped=skipped), self.window
        if row is None:
            return
        self._count(row, window.epoch)
        if self._limit is not None:
            self.failure = self._jumped(row, self._limit)
        if self.log is not None:
            cells = self._thermal.cells(step) if self._thermal is not None else {}
            attempt = Attempt((window.epoch, 0), window.samples * world_size(), window.seconds, cells)
            told: dict[str, Any] = {**row_cells(row, attempt, self.state.updates, 0, None), "retries": None}
            if not window.samples:
                told["effective_batch_size"] = told["samples_per_s"] = None
            self.log.write(told)
        if is_main():
            self._alert.see(step, row.skipped)
        for doctor in self._doctors:
            doctor.see(row)

    def _count(self, row: StepLog, epoch: int) -> None:
        self.state.step, self.state.epoch = row.step, epoch
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
            f"{self.config.loss_jump_factor:g} x the median of the last {self.config.loss_jump_window} accepted "
            "losses; its update was left out, and training stops; look at that batch, then "
            + (f"resume from {path}" if path is not None else "start again: no checkpoint was saved"),
            step=row.step,
            reason="loss_jump",
            values={"loss": row.loss, "pre_clip": row.pre_clip},
            newest_good=path,
            result=self.result,
        )
        if is_main():
            log.error("%s", failure)
        return failure

    def see_validation(self, loss: Any) -> None:
        """Put a validation loss into the last row."""
        if self.log is not None and loss is not None:
            self.log.amend({"val_loss": float(loss)})

    # --- heat -------------------------------------------------------------------------------------------------

    @property
    def hot(self) -> bool:
        """Whether to wait, or to end, before the next window: this process says so, or one of several ranks."""
        if self._thermal is None:
            return False
        return self._thermal.hot if world_size() == 1 else bool(self.window.requests & PAUSE)

    def wait(self, save: Callable[[], Any] = lambda: None) -> None:
        """Wait while it is too hot, after a ``save()``; ``ThermalAbort`` above critical, or when the sensor is lost."""
        if self._thermal is not None:
            self._thermal.before_window(self.log, save, lambda: False)

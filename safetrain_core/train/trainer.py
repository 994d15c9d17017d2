"""SafeTrainer: the loop around the safe step. Windows, retries, safe states, validation, the log, and a clean stop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..config import TrainConfig
from ..diagnose.running import RunningDoctor
from ..distributed import PAUSE, agree, is_main, rank, world_size
from ..errors import TrainingFailed
from ..records import BASE_COLUMNS, GRADIENT_COLUMNS, StepLog
from ..step.window import LossFn
from .attempts import Attempts
from .csv_log import refuse_log
from .cursor import Cursor, length_of
from .keeper import Keeper
from .result import FitResult
from .retries import Retries
from .safe_state import SafeState
from .setup import amp_from_config, refuse_parts, seed_everything
from .signals import StopSignals
from .sinks import RowLog, Sink, open_rows
from .telemetry import block_columns, blocks_of, row_cells
from .thermal_setup import thermal_from_config
from .validation import validate

__all__ = ["SafeTrainer"]

#: Reasons after which the weights go back to the last safe state.
ROLL_BACK = ("loss_jump", "non_finite_state")

Hook = Callable[[int, nn.Module], None]


class SafeTrainer:
    """Trains ``model`` on ``train_loader`` as ``config`` says, and survives what can be survived.

    Args:
        model: any module, on its device.
        config: every knob; it must name nothing that this version cannot do yet.
        train_loader: iterable of ``(inputs, targets)`` batches, iterated once per epoch.
        val_loader: the same, for the validation loss; optional.
        loss_fn: ``loss_fn(model(inputs), targets) -> scalar``; see ``AmpTrainState`` for the default.
        on_row: called with each ``StepLog``, after it is on disk.
        before_step: called before each attempt with ``(step, model)``; it may wait, or raise to end the run.
        fault: for tests and lessons: called before each attempt with ``(step, model)``, to break something.
        checkpoint_dir: folder for rolling and best checkpoints; None = none. ``resume()`` continues from them.
            A loss jump then goes back to the newest one and replays the data from there without the bad window;
            else it goes back to a copy in memory, and the data goes on.
        identity: plain values that say what model and data these are; a checkpoint with others is not resumed.
        blocks: name -> module or parameters, for ``enable_block_grad_norms``; default: the model's top-level blocks.
        thermal_source: what ``gpu_temp_guard`` reads instead of NVML: called without arguments, gives degrees Celsius,
            a ``GpuReading``, or None for unknown. A mapping from device to source for several devices.
        thermal_devices: where ``switch_on_thermal`` may move the run, by preference, the model's own device first.
            While ``nan_check_interval`` is above 1, a pause or a switch waits for the look, an abort does not.
        sinks: get the rows of the CSV log too, for example ``adapters.tensorboard.TensorBoardSink``.

    ``fit()`` seeds Python, NumPy and torch with ``config.seed``, so that two runs of one config are the same run.

    Raises:
        ValueError: a config that cannot be carried out, an empty loader, a model without trainable weights.

    >>> import torch
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 3
    >>> result = SafeTrainer(nn.Linear(2, 1), TrainConfig(max_steps=5), data).fit()
    >>> result.status, result.state.updates, result.state.epoch
    ('completed', 5, 1)
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        train_loader: Iterable[Any],
        val_loader: Iterable[Any] | None = None,
        loss_fn: LossFn | None = None,
        *,
        on_row: Callable[[StepLog], None] | None = None,
        before_step: Hook | None = None,
        fault: Hook | None = None,
        checkpoint_dir: str | Path | None = None,
        identity: Mapping[str, Any] | None = None,
        blocks: Mapping[str, Any] | None = None,
        thermal_source: Any = None,
        thermal_devices: Sequence[Any] | None = None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        refuse_parts(config, train_loader, val_loader, (on_row, before_step, fault), sinks, blocks)
        batches = length_of(train_loader)
        self.model, self.config, self.val_loader, self.on_row = model, config, val_loader, on_row
        self._sinks = sinks
        self.amp = amp_from_config(model, config, loss_fn, batches)
        self.state = self.amp.counters
        self.result = FitResult(state=self.state)
        self._doctor = RunningDoctor()
        self.result.findings = self._doctor.findings
        self._hooks = [hook for hook in (before_step, fault) if hook is not None]
        self._cursor = Cursor(train_loader, config.gradient_accumulation_steps, self.amp.device, self.state)
        self._retries = Retries(self.state, config.max_nan_retries, config.nan_retry_reset_updates)
        self._keeper: Keeper | None = None
        if checkpoint_dir is not None:
            self._keeper = Keeper(checkpoint_dir, config, self.amp, self._cursor, self._retries, self.result, identity)
            self._retries.newest_good = self._keeper.newest_good
            self._cursor.remembers = world_size() == 1
        self._thermal = thermal_from_config(
            config, self.amp, self._cursor, self.result, thermal_source, thermal_devices, self._retries.newest_good
        )
        heat = self._thermal.columns if self._thermal is not None else []
        self._resumed = self._continues = self._fitted = False
        self._blocks = blocks_of(model, blocks) if config.enable_block_grad_norms else {}
        self._columns = [*BASE_COLUMNS, *GRADIENT_COLUMNS, *block_columns(self._blocks), *heat]

        self._look_every = config.nan_check_interval
        self._attempts = Attempts(self.amp, config, self._blocks)
        needs_safe = self._look_every > 1 or config.loss_jump_factor is not None
        self._safe = SafeState(self.amp) if needs_safe else None
        self._begun: tuple[int, int] | None = None
        self._attempting = False
        self._stop = StopSignals()
        self._asked = PAUSE  # before the first window temperatures are looked at
        self._validated_at: int | None = None

    def resume(self, path: str | Path | None = None) -> Path | None:
        """Continue, in the ``fit()`` that follows, from ``path`` or the newest checkpoint that verifies.

        Returns:
            The checkpoint that was loaded; None where ``path`` is None and there is none: ``fit()`` starts fresh.

        Raises:
            ValueError: no ``checkpoint_dir``. CheckpointError: it cannot be trusted or does not fit.
        """
        if self._keeper is None:
            raise ValueError("there is no checkpoint_dir to resume from; pass one to SafeTrainer")
        self.refuse_log(continues=True)
        found = self._keeper.resume(path)
        self.config = self._keeper.config
        self._resumed = found is not None
        self._continues = True
        return found

    def refuse_log(self, *, continues: bool) -> None:
        """``ValueError`` where the CSV log could not be opened, for a run that is resumed or a fresh one."""
        path, rotate = self.config.csv_log_path, self.config.csv_rotate_on_schema_change
        if path is not None and is_main():
            refuse_log(path, self._columns, rotate=rotate, continues=continues)

    def fit(self) -> FitResult:
        """Run to ``max_steps`` updates, or one epoch if unset; the result, ``completed`` or ``interrupted``.

        All of the model is put into training mode first; a part that is to stay in eval mode (a frozen BatchNorm) has
        to put itself back, in its own ``train()``, or in a ``before_step``.

        Raises:
            TrainingFailed: more bad steps than ``max_nan_retries``; the result is its ``.result``.
            ThermalAbort: the device is critical or its sensor lost; with a ``checkpoint_dir``, saved first.
            ValueError: batches that are not pairs or do not fit; a CSV that cannot be written; a second call.
        """
        config, result = self.config, self.result
        if self._fitted:
            raise ValueError("this trainer has run; build a new SafeTrainer, and resume() it to go on")
        if self.val_loader is None and config.eval_every_n_steps is not None:
            raise ValueError(
                f"eval_every_n_steps={config.eval_every_n_steps} needs a val_loader; pass one to SafeTrainer"
            )
        self.refuse_log(continues=self._continues)
        if not self._resumed:
            if self._keeper is not None:
                self._keeper.begin_fresh()
            seed_everything(config.seed + rank())
        self._fitted = True  # what was refused so far has changed nothing, and can be mended
        self.model.train()
        with contextlib.ExitStack() as stack:
            if self._thermal is not None:
                stack.enter_context(self._thermal)
            csv = self._open_log(stack)
            self._stop = stack.enter_context(StopSignals())
            try:
                self._run(csv)
            except TrainingFailed:
                raise
            except Exception:  # a hook's, the loader's, the model's: keep what was reached, and raise that one
                if world_size() == 1:  # a rank alone cannot save: it would wait for the others, which wait for it
                    with contextlib.suppress(Exception):
                        self._save_what_stands()
                raise
            result.signal = self._stop.received
        result.status = "completed" if result.signal is None else "interrupted"
        return result

    def _run(self, csv: RowLog | None) -> None:
        keeper = self._keeper
        if self._safe is not None:
            self._safe.capture()
        if keeper is not None and keeper.validation_due:
            keeper.save_if_due(self._measure())
        while not self._ended() and self._cool(csv) and self._one_pass(csv):
            pass
        self._take_in(self._attempts.look(), csv)
        if self.val_loader is not None and self._stop.received is None and self._validated_at != self.state.updates:
            val_loss = self._measure()
            if val_loss is None:  # cut short: by a signal, or by the thermal guard, which says so
                self._cool(csv)
            if keeper is not None:
                keeper.save_if_due(val_loss)
        self._save_what_stands()

    def _save_what_stands(self) -> None:
        """The last checkpoint of a run, however it ends.

        Not where attempts wait for their verdict, nor out of the middle of one: its forward has drawn random numbers.
        """
        if self._keeper is None or self._attempts.waiting or self._attempting:
            return
        if self._begun is not None:  # a window that was begun and did not end is still to come
            self.state.epoch, self.state.batch_in_epoch = self._begun
        if self._begun is not None or self._cursor.broken:
            self._cursor.take_back_draws()
        self._keeper.save()
        self._keeper.checkpoints.wait()

    def _one_pass(self, csv: RowLog | None) -> bool:
        """Windows from the present data position on; True when a loss jump has put it back, and it is to begin anew."""
        for window in self._cursor.windows(epochs=1 if self.config.max_steps is None else None):
            start = (self.state.epoch, self.state.batch_in_epoch - len(window))
            if self._keeper is not None and self._keeper.is_bad(start):
                continue
            self._begun = start
            for hook in self._hooks:
                hook(self._attempts.next_step, self.model)
            self._attempting = True
            rows = self._attempt(window, start)
            self._begun, self._attempting = None, False
            if self._take_in(rows, csv):
                return True
            if self._ended() or not self._cool(csv):
                return False
        return False

    def _cool(self, csv: RowLog | None) -> bool:
        """Wait while the thermal guard holds the run; False where a signal came, ``ThermalAbort`` where it ends it."""
        thermal = self._thermal
        if thermal is None:
            return True
        if thermal.critical:
            self._take_in(self._attempts.look(), csv)
        if self._attempts.waiting or not self._asked & PAUSE:
            return True
        self._asked = PAUSE if world_size() == 1 else 0  # several ranks look where one of them has asked for it
        cool = thermal.before_window(csv, self._save_what_stands, self._interrupted)
        if not cool:
            self._stop.obey(agree(self._stop.requests(), self.amp.device))
        return cool

    def _interrupted(self) -> bool:
        return self._stop.received is not None or self._stop.requests() > 0

    def _requests(self) -> int:
        """What this rank asks of all at the next step: to stop, to save, to look at temperatures."""
        asked = self._stop.requests(take=True) | (self._keeper.requests() if self._keeper is not None else 0)
        return asked | (PAUSE if self._thermal is not None and world_size() > 1 and self._thermal.hot else 0)

    def _ended(self) -> bool:
        # With an interval a signal waits for the look: a look ahead of time would not be the same run when resumed.
        stopped = self._stop.received is not None and not self._attempts.waiting
        steps = self.config.max_steps
        return stopped or (steps is not None and self.state.updates >= steps)

    def _open_log(self, stack: contextlib.ExitStack) -> RowLog | None:
        after = self.state.step if self._continues else None
        return stack.enter_context(open_rows(self.config, self._columns, self._sinks, resume_after=after))

    def _attempt(self, window: list[tuple[Any, Any]], start: tuple[int, int]) -> list[StepLog]:
        """Attempt one step, and do what any rank asked for at it; the rows that are known now."""
        cells = self._thermal.cells(self._attempts.next_step) if self._thermal is not None else {}
        rows = self._attempts.make(window, start, cells, self._requests)
        if not self._attempts.defers:
            self._stop.obey(self.amp.requests)
            self._asked |= self.amp.requests
        return rows

    def _take_in(self, rows: list[StepLog], csv: RowLog | None) -> bool:
        """Validate where due, log the rows, spend retries; then go back to a safe state, or keep a new one.

        True when the data position was put back too.
        """
        if not rows:
            return False
        updates = before = self.state.updates - sum(not row.skipped for row in rows)
        back = any(row.skip_reason in ROLL_BACK for row in rows)
        # Weights found poisoned at a look are one fault, however many rows they have spoilt.
        poisoned = rows[-1].skip_reason == "non_finite_state"
        val_loss = None if back else self._validate_if_due(before)
        failure = None
        attempts = self._attempts.taken()
        self.result.skips, self.result.rows = self.amp.skip_count, self.amp.log
        for row, attempt in zip(rows, attempts, strict=True):
            last = row is rows[-1]
            updates += not row.skipped
            if not poisoned or last:
                failure = failure or self._retries.spend(row)
            self.result.see(row)
            self._doctor.see(row, val_loss if last else None)
            if csv is not None:
                csv.write(row_cells(row, attempt, updates, self.state.retries, val_loss if last else None))
        if self.on_row is not None:
            for row in rows:
                self.on_row(row)
        if failure is not None:
            failure.result = self.result
            raise failure
        jump = next((a.start for a, row in zip(attempts, rows, strict=True) if row.skip_reason == "loss_jump"), None)
        if jump is not None and self._keeper is not None and self._keeper.roll_back(jump):
            return True
        self._go_back_or_keep(back, before)
        self._cursor.settle()
        if self._keeper is not None and not back:
            if self._stop.save_requested:
                self._stop.save_requested = False
                self._keeper.save(val_loss)
            self._keeper.save_if_due(val_loss)
        return False

    def _go_back_or_keep(self, back: bool, updates_before: int) -> None:
        """Back to the safe state; or a new one: at a good look, or every ``loss_jump_window`` updates at n = 1."""
        if self._safe is None:
            return
        if back:
            self._safe.restore()
        elif self._look_every > 1:
            if self.state.step % self._look_every == 0 or self._attempts.defers:
                self._safe.capture()
        elif _crossed(self.config.loss_jump_window, updates_before, self.state.updates):
            self._safe.capture()

    def _validate_if_due(self, updates_before: int) -> float | None:
        every = self.config.eval_every_n_steps
        if self.val_loader is None or every is None or not _crossed(every, updates_before, self.state.updates):
            return None
        return self._measure()

    def _measure(self) -> float | None:
        self.result.val_loss, self._validated_at = self.validate(), self.state.updates
        if self._keeper is not None:  # one that a signal cut short is made up for by the run that resumes
            self._keeper.validation_due = self.result.val_loss is None
        return self.result.val_loss

    def validate(self) -> float | None:
        """Mean loss over ``val_loader`` in eval mode; None if a signal or heat ended it. ``ValueError`` without one."""
        if self.val_loader is None:
            raise ValueError("there is no val_loader to validate on; pass one to SafeTrainer")
        thermal = self._thermal
        return validate(
            self.amp,
            self.val_loader,
            should_stop=lambda: (
                world_size() == 1 and (self._interrupted() or (thermal is not None and thermal.critical))
            ),
        )


def _crossed(every: int, before: int, now: int) -> bool:
    """Whether a multiple of ``every`` lies in (before, now]."""
    return now // every > before // every

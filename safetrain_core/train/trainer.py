"""SafeTrainer: the loop around the safe step. Windows, schedule, retries, validation, the log, and a clean stop."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..config import TrainConfig, shown
from ..distributed import is_main, world_size
from ..errors import TrainingFailed
from ..optim.schedule import make_schedule
from ..records import StepLog, TrainState
from ..step.amp import AmpTrainState, LossFn
from ..step.scaling import MIN_SCALE
from .signals import StopSignals
from .telemetry import CsvLog

__all__ = ["ROWS_KEPT", "FitResult", "SafeTrainer"]

#: Rows kept in memory; the CSV has them all.
ROWS_KEPT = 1000

AMP_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

#: Fields whose part has not landed yet. Asking for one is refused, rather than silently ignored.
NOT_YET = [
    "loss_weighting",
    "scale_lr_with_batch",
    "optimizer_class",
    "nan_retry_reset_updates",
    "nan_check_interval",
    "loss_jump_factor",
    "recompute_policy",
    "checkpoint_every_seconds",
    "async_save",
    "enable_block_grad_norms",
    "gpu_metrics_backend",
    "nvml_device_index",
    "gpu_temp_guard",
    "switch_on_thermal",
    "use_galore",
]


@dataclass(slots=True)
class FitResult:
    """What a run reached.

    ``status`` is ``completed``, ``interrupted`` (with ``signal``), or ``failed`` (only as ``.result`` of the
    exception). Losses are in the unit of the loss function; what was never measured is None.
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


class SafeTrainer:
    """Trains ``model`` on ``train_loader`` as ``config`` says, and survives what can be survived.

    Args:
        model: any module, on its device.
        config: every knob; it must name nothing that this version cannot do yet.
        train_loader: iterable of ``(inputs, targets)`` batches, iterated once per epoch.
        val_loader: the same, for the validation loss; optional.
        loss_fn: ``loss_fn(model(inputs), targets) -> scalar``; see ``AmpTrainState`` for the default.
        on_row: called with each ``StepLog``, after it is on disk.

    ``fit()`` seeds Python, NumPy and torch with ``config.seed``, so that two runs of one config are the same run.

    Raises:
        ValueError: a config that cannot be carried out, an empty loader, a model without trainable weights.

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
    ) -> None:
        for name in NOT_YET:
            default = TrainConfig.model_fields[name].default
            if getattr(config, name) != default:
                asked = shown(getattr(config, name))
                raise ValueError(f"{name}={asked} is not available in this version; leave it at {shown(default)}")
        self.model, self.config = model, config
        self.train_loader, self.val_loader = train_loader, val_loader
        self.on_row = on_row
        self.device = next((p.device for p in model.parameters() if p.requires_grad), torch.device("cpu"))
        batches = len(train_loader) if isinstance(train_loader, Sized) else None
        if batches == 0:
            raise ValueError("train_loader is empty (0 batches); give it at least one batch")
        amp_dtype = AMP_DTYPES.get(config.amp_dtype or "") if config.use_amp else torch.float32
        self.amp = AmpTrainState(
            model,
            config.learning_rate,
            config.grad_clip_max_norm,
            self.device.type,
            config.weight_decay,
            amp_dtype,
            loss_fn=loss_fn,
            inf_post_clip_threshold=config.inf_post_clip_threshold,
            check_loss_before_backward=config.check_loss_before_backward,
            skip_rate_alert=config.skip_rate_alert,
            keep_rows=ROWS_KEPT,
        )
        total = config.scheduler_total_steps or config.max_steps
        if total is None and batches is not None:
            total = math.ceil(batches / config.gradient_accumulation_steps)
        if total is None and config.scheduler_type != "constant":
            raise ValueError(
                f"scheduler_type={config.scheduler_type} needs a length, and train_loader has none; "
                "set scheduler_total_steps or max_steps"
            )
        self.amp.scheduler = make_schedule(
            self.amp.optimizer,
            config.scheduler_type,
            total_steps=total,
            warmup_ratio=config.scheduler_warmup_ratio,
        )
        self.result = FitResult(state=self.amp.counters)

    def fit(self) -> FitResult:
        """Run to ``max_steps`` updates, or one epoch if unset.

        Returns:
            The result, ``completed`` or ``interrupted``.

        Raises:
            TrainingFailed: more bad steps than ``max_nan_retries``; the result is its ``.result``.
            ValueError: batches that are not pairs, or do not fit the model; a CSV that cannot be written.
        """
        config, result = self.config, self.result
        random.seed(config.seed)
        np.random.seed(config.seed % 2**32)
        torch.manual_seed(config.seed)
        self.model.train()
        with contextlib.ExitStack() as stack:
            csv = None
            if config.csv_log_path is not None and is_main():
                csv = stack.enter_context(CsvLog(config.csv_log_path))
            stop = stack.enter_context(StopSignals())
            for window in self._windows():
                start = time.perf_counter()
                row = self.amp.step_window(window)
                seconds = time.perf_counter() - start
                spent = self._spend_retry(row)
                val_loss = self._validate_if_due(row)
                self._log(row, window, seconds, val_loss, csv)
                if spent is not None:
                    raise spent
                if stop.received is not None or result.state.updates == config.max_steps:
                    break
            result.signal = stop.received
        if self.val_loader is not None and result.signal is None:
            result.val_loss = self.validate()
        result.status = "completed" if result.signal is None else "interrupted"
        return result

    def _windows(self) -> Iterator[list[tuple[Any, Any]]]:
        """Windows of K micro-batches on the model's device; a window never spans two epochs."""
        state = self.result.state
        for epoch in itertools.count():
            state.epoch, state.batch_in_epoch = epoch, 0
            batches = iter(self.train_loader)
            while window := list(itertools.islice(batches, self.config.gradient_accumulation_steps)):
                state.batch_in_epoch += len(window)
                yield [self._on_device(batch) for batch in window]
            if state.batch_in_epoch == 0:
                raise ValueError(f"train_loader is empty (0 batches) in epoch {epoch}; give it at least one batch")
            if self.config.max_steps is None:
                return

    def _on_device(self, batch: Any) -> tuple[Any, Any]:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            size = f" of {len(batch)}" if isinstance(batch, Sized) else ""
            raise ValueError(f"a batch is a {type(batch).__name__}{size}, expected a pair (inputs, targets)")
        inputs, targets = (x.to(self.device, non_blocking=True) if isinstance(x, Tensor) else x for x in batch)
        return inputs, targets

    def _spend_retry(self, row: StepLog) -> TrainingFailed | None:
        """Count a bad step; the failure to raise once its row is on disk, when no retry is left."""
        # An FP16 overflow with a finite loss, while the scale can still fall, is the scaler doing its work.
        at_work = row.skip_reason == "non_finite_grad" and row.scale is not None and row.scale > MIN_SCALE
        if not row.skipped or at_work:
            return None
        state, limit = self.result.state, self.config.max_nan_retries
        if state.retries < limit:
            state.retries += 1
            return None
        values = {"loss": row.loss, "pre_clip": row.pre_clip, "post_clip": row.post_clip}
        seen = ", ".join(f"{name}={value:.6g}" for name, value in values.items() if value is not None)
        return TrainingFailed(
            f"{seen} at step {row.step} ({row.skip_reason}), {state.retries} of {limit} retries used; "
            "no checkpoint was saved; lower the learning rate or look at the data of that step",
            step=row.step,
            reason=str(row.skip_reason),
            values=values,
            result=self.result,
        )

    def _log(
        self,
        row: StepLog,
        window: list[tuple[Any, Any]],
        seconds: float,
        val_loss: float | None,
        csv: CsvLog | None,
    ) -> None:
        result = self.result
        result.skips, result.rows = self.amp.skip_count, self.amp.log
        if not row.skipped:
            result.first_loss = row.loss if result.first_loss is None else result.first_loss
            result.last_loss = row.loss
        if csv is not None:
            samples = world_size() * sum(_samples(targets) for _, targets in window)
            csv.write(
                {
                    "step": row.step,
                    "updates": result.state.updates,
                    "epoch": result.state.epoch,
                    "loss": row.loss,
                    "learning_rate": row.lr,
                    "gradient_norm": row.pre_clip,
                    "gradient_norm_clipped": row.post_clip,
                    "scaler_scale": row.scale,
                    "skipped": row.skipped,
                    "skip_reason": row.skip_reason,
                    "retries": result.state.retries,
                    "effective_batch_size": samples,
                    "step_time_ms": round(1000 * seconds, 3),
                    "samples_per_s": round(samples / seconds, 3),
                    "val_loss": val_loss,
                }
            )
        if self.on_row is not None:
            self.on_row(row)

    def _validate_if_due(self, row: StepLog) -> float | None:
        every = self.config.eval_every_n_steps
        if self.val_loader is None or every is None or row.skipped or self.result.state.updates % every:
            return None
        self.result.val_loss = self.validate()
        return self.result.val_loss

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss over ``val_loader`` in eval mode, batches weighted by their size; modes are put back as they were.

        Raises:
            ValueError: no ``val_loader``, or an empty one.
        """
        if self.val_loader is None:
            raise ValueError("there is no val_loader to validate on; pass one to SafeTrainer")
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        total, samples = torch.zeros((), device=self.device), 0
        try:
            for inputs, targets in map(self._on_device, self.val_loader):
                total += self.amp.forward_loss(inputs, targets).float() * _samples(targets)
                samples += _samples(targets)
        finally:
            for module, mode in modes:
                module.training = mode
        if samples == 0:
            raise ValueError("val_loader is empty (0 batches); give it at least one batch")
        return float(total.item()) / samples


def _samples(targets: Any) -> int:
    return (
        len(targets) if isinstance(targets, Sized) and not (isinstance(targets, Tensor) and targets.dim() == 0) else 1
    )

"""The guards for Lightning's Trainer, as a ``Callback``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..step.gradients import gathered, gradients_of, norms_of, params_with_grad
from ..step.ranks import any_sharded, norms_over_ranks
from ..train.result import FitResult
from ..train.sinks import Sink
from .host import HostRun

try:
    from lightning.pytorch import Callback, LightningModule
except ImportError as error:
    raise ImportError(
        "safetrain_core.adapters.lightning needs the package lightning, which is not installed or cannot be imported; "
        "pip install 'safetrain-core[lightning]'"
    ) from error

__all__ = ["SafeTrainCallback"]

#: Strategies whose gradients on a rank are a flat piece of the whole, or are none of ours to see.
NORM_UNKNOWN = ("FSDPStrategy", "DeepSpeedStrategy")


class SafeTrainCallback(Callback):
    """Thermal guard, CSV log, skip-rate alert, running doctor and loss-jump stop for ``lightning.Trainer``.

    ``Trainer(callbacks=[SafeTrainCallback(csv_log_path="run.csv", loss_jump_factor=2.0)])``

    It changes no number of a run that it does not stop. It needs automatic optimization. Once per optimizer step it
    reads the loss and the gradients' norm before the clip, which costs one pass over the gradients and one read.

    - **Loss jump**: the update of that window is left out, and ``trainer.should_stop`` set; ``min_steps`` and
      ``min_epochs`` come first, as for any stop. ``raise_on_loss_jump`` ends ``fit`` at once, before anything is saved.
    - **Heat**: looked at after each optimizer step, and before the first. A pause saves by ``trainer.save_checkpoint``
      and waits; an abort saves, and ``fit`` raises ``ThermalAbort``. Of these checkpoints the newest is kept.
    - **Several ranks** (DDP, FSDP2 in ``ModelParallelStrategy``): all stop and wait at the same step; rank 0 writes.
      ``FSDPStrategy`` and DeepSpeed: the norm is unknown, and DeepSpeed takes the update of a jump.
    - **Resume** with ``ckpt_path``: the CSV goes on after the checkpoint's step, with no step twice.

    Args:
        checkpoint_dir: for the checkpoints before a pause or an abort; default: the ``ModelCheckpoint``'s folder, else
            ``default_root_dir``. val_loss: the name that the module logs its validation loss under.
        sinks: get the rows too, for example ``TensorBoardSink``. thermal_source: instead of NVML, see ``SafeTrainer``.
        doctor: log a finding when it appears in the rows. raise_on_loss_jump: ``TrainingFailed`` out of ``fit``.
        knobs: as in ``TrainConfig``, all off by default but the alert: ``skip_rate_alert``, ``loss_jump_factor``,
            ``loss_jump_window``, ``csv_log_path``, ``csv_rotate_on_schema_change``, ``telemetry_log_interval``,
            ``gpu_metrics_backend``, ``nvml_device_index``, ``gpu_temp_guard`` and its thresholds.

    ``result``: a ``FitResult``, with ``status``, ``rows``, ``skips``, ``findings``, ``pauses`` and ``thermal_events``.

    Raises:
        ValueError: a knob that is unknown, the trainer's own, or out of range; a guard without a source.

    >>> SafeTrainCallback(loss_jump_factor=1.0)
    Traceback (most recent call last):
    ...
    ValueError: loss_jump_factor=1.0 is out of range; allowed: number > 1 or none
    """

    def __init__(
        self,
        *,
        checkpoint_dir: str | Path | None = None,
        val_loss: str = "val_loss",
        sinks: Sequence[Sink] = (),
        thermal_source: Any = None,
        doctor: bool = True,
        raise_on_loss_jump: bool = False,
        **knobs: Any,
    ) -> None:
        self.checkpoint_dir, self.val_loss = checkpoint_dir, val_loss
        self.run = HostRun(
            knobs,
            sinks=sinks,
            thermal_source=thermal_source,
            doctor=doctor,
            raise_on_loss_jump=raise_on_loss_jump,
        )
        self._loaded: Mapping[str, Any] | None = None
        self._saved: str | None = None
        self._window_begins, self._updated = True, False

    @property
    def result(self) -> FitResult:
        """What the present or last run reached."""
        return self.run.result

    def state_dict(self) -> dict[str, Any]:
        """For the trainer's checkpoint: what a resumed run has to know."""
        return self.run.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From the trainer's checkpoint."""
        self._loaded = state_dict

    # --- events, in the order of a step -------------------------------------------------------------------------

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse what cannot be watched."""
        if not pl_module.automatic_optimization:
            raise ValueError(
                "SafeTrainCallback needs automatic optimization, and this module steps by hand; "
                "call AmpTrainState or ThermalGuard.hold in its training_step"
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Open the log, take the first temperature; go on where the checkpoint stands that ``fit`` resumes from."""
        self._window_begins, self._updated = True, False
        self.run.begin(trainer.global_step, trainer.strategy.root_device, lambda: self._newest(trainer), self._loaded)
        self._loaded = None
        self.run.wait()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A window begins, or goes on."""
        if self._window_begins:
            self.run.begin_window(trainer.current_epoch)
        self._window_begins = False
        self.run.window.see_batch(batch)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Keep the loss, which is divided by the batches of a window already, and multiplied by the scaler's factor."""
        self.run.window.losses.append(loss.detach())

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Read loss and norm; a jump takes the gradients away."""
        scaler, losses = _scaler(trainer), self.run.window.losses
        loss: Any = sum(losses) if losses else None
        if loss is not None:
            loss = loss * (trainer.accumulate_grad_batches / len(losses))
            if scaler is not None:
                loss = loss / scaler.get_scale()
        self.run.before_update(
            optimizer,
            loss,
            _norm(trainer, optimizer) if losses else None,
            scaler=scaler,
            max_norm=_clips_to(trainer, pl_module),
            still_scaled=scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False),
        )
        self._updated = True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After an update: write its row; stop, or save and wait, where that is due."""
        if not self._updated:
            return
        self._window_begins, self._updated = True, False
        self.run.after_update(trainer.global_step, scaler=_scaler(trainer))
        if self.run.failure is not None:
            trainer.should_stop = True
            if self.run.raise_on_loss_jump:
                raise self.run.failure
        elif self.run.hot:
            self.run.wait(lambda: self._save(trainer))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Put the validation loss into the row of the step before it."""
        if not trainer.sanity_checking:
            self.run.see_validation(trainer.callback_metrics.get(self.val_loss))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the log."""
        self.run.finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the log, whatever has ended the run."""
        self.run.end()

    # --- checkpoints --------------------------------------------------------------------------------------------

    def _save(self, trainer: Any) -> None:
        own = trainer.checkpoint_callback
        folder = self.checkpoint_dir or getattr(own, "dirpath", None) or trainer.default_root_dir
        path = str(Path(folder, f"safetrain_step_{trainer.global_step:08d}.ckpt"))
        trainer.save_checkpoint(path)
        before, self._saved = self._saved, path
        if before is not None and before != path:
            trainer.strategy.remove_checkpoint(before)

    def _newest(self, trainer: Any) -> str | None:
        return self._saved or getattr(trainer.checkpoint_callback, "best_model_path", None) or None


def _scaler(trainer: Any) -> Any:
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def _clips_to(trainer: Any, module: Any) -> float | None:
    """The norm that gradients are clipped to; 0 = they are not, None = by value, or in the module's own way."""
    if type(module).configure_gradient_clipping is not LightningModule.configure_gradient_clipping:
        return None
    clip = float(trainer.gradient_clip_val or 0.0)
    return None if clip and trainer.gradient_clip_algorithm not in (None, "norm") else clip


@torch.no_grad()
def _norm(trainer: Any, optimizer: Any) -> Tensor | float | None:
    """The global L2 norm of the gradients over all ranks, not yet read where that can wait; None where unknown."""
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    if type(trainer.strategy).__name__ in NORM_UNKNOWN or any(p.grad is not None and p.grad.is_sparse for p in weights):
        return None
    held = params_with_grad(weights)
    if not held:
        return None
    if any_sharded(held):
        return math.hypot(*norms_over_ranks(held)[0])
    return torch.linalg.vector_norm(gathered(norms_of(gradients_of(held))))

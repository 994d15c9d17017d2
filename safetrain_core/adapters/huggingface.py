"""The guards for Hugging Face's Trainer, as a ``TrainerCallback``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..errors import ThermalAbort
from ..train.result import FitResult
from ..train.sinks import Sink
from .host import HostRun

try:
    from transformers import TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint
except ImportError as error:
    raise ImportError(
        "safetrain_core.adapters.huggingface needs the package transformers, which is not installed or cannot be "
        "imported; pip install 'safetrain-core[huggingface]'"
    ) from error

__all__ = ["SafeTrainerCallback"]

#: Under this name a checkpoint's trainer_state.json holds what a resumed run has to know.
KEPT_AS = "safetrain"


class SafeTrainerCallback(TrainerCallback):
    """Thermal guard, CSV log, skip-rate alert, running doctor and loss-jump stop for ``transformers.Trainer``.

    ``trainer.add_callback(SafeTrainerCallback(trainer, csv_log_path="run.csv", loss_jump_factor=2.0))``

    It changes no number of a run that it does not stop. It reads what ``training_step`` returns, and the norm that the
    trainer's clip returns: the loss of a ``compute_loss`` of your own is seen too, and a NaN that the trainer's
    ``logging_nan_inf_filter`` hides. One read of the device per optimizer step; that filter makes one per micro-batch.

    - **Loss jump**: the update of that window is left out, and training stops; nothing more is saved or evaluated.
    - **Heat**: looked at after each optimizer step, and before the first. A pause saves the trainer's own checkpoint,
      and waits in ``on_save``. An abort saves one, ends the loop, and ``trainer.train()`` raises ``ThermalAbort``.
    - **Several ranks** (DDP, FSDP): all stop and wait at the same step; rank 0 writes. DeepSpeed clips and steps by
      itself: there a jump stops training after its update.
    - **Resume**: the CSV goes on after the checkpoint's step, with no step twice.

    Args:
        trainer: the Trainer that the callback is added to.
        sinks: get the rows too, for example ``TensorBoardSink``. thermal_source: instead of NVML, see ``SafeTrainer``.
        doctor: log a finding when it appears in the rows. raise_on_loss_jump: ``TrainingFailed`` out of ``train``.
        knobs: as in ``TrainConfig``, all off by default but the alert: ``skip_rate_alert``, ``loss_jump_factor``,
            ``loss_jump_window``, ``csv_log_path``, ``csv_rotate_on_schema_change``, ``telemetry_log_interval``,
            ``gpu_metrics_backend``, ``nvml_device_index``, ``gpu_temp_guard`` and its thresholds.

    ``result``: a ``FitResult``, with ``status``, ``rows``, ``skips``, ``findings``, ``pauses`` and ``thermal_events``.

    Raises:
        ValueError: a knob that is unknown, the trainer's own, or out of range; a guard without a source.

    >>> import transformers
    >>> SafeTrainerCallback(transformers.Trainer, loss_jump_factor=2.0)
    Traceback (most recent call last):
    ...
    ValueError: SafeTrainerCallback needs the Trainer that it is added to, not type: ...
    """

    def __init__(
        self,
        trainer: Any,
        *,
        sinks: Sequence[Sink] = (),
        thermal_source: Any = None,
        doctor: bool = True,
        raise_on_loss_jump: bool = False,
        **knobs: Any,
    ) -> None:
        if isinstance(trainer, type) or not hasattr(trainer, "training_step"):
            raise ValueError(
                f"SafeTrainerCallback needs the Trainer that it is added to, not {type(trainer).__name__}: "
                "trainer.add_callback(SafeTrainerCallback(trainer, ...))"
            )
        self.trainer = trainer
        self.run = HostRun(
            knobs,
            sinks=sinks,
            thermal_source=thermal_source,
            doctor=doctor,
            raise_on_loss_jump=raise_on_loss_jump,
        )
        self._taps = contextlib.ExitStack()
        self._norm: Any = None
        self._waits = False

    @property
    def result(self) -> FitResult:
        """What the present or last run reached."""
        return self.run.result

    # --- what the trainer computes and tells no callback --------------------------------------------------------

    def _tap(self) -> None:
        """Read along what two methods of this trainer return, until the end of training."""
        training_step, clip = self.trainer.training_step, self.trainer.accelerator.clip_grad_norm_

        def read_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                self.run.window.see_batch(inputs)
                loss = training_step(model, inputs, *args, **kwargs)
            except BaseException:  # no event tells of it, and the log is to be closed
                self.run.end()
                raise
            if isinstance(loss, Tensor):
                self.run.window.losses.append(loss.detach())
            return loss

        def read_clip(*args: Any, **kwargs: Any) -> Any:
            self._norm = clip(*args, **kwargs)
            return self._norm

        self._taps.close()
        for owner, name, reader in (
            (self.trainer, "training_step", read_step),
            (self.trainer.accelerator, "clip_grad_norm_", read_clip),
        ):
            self._taps.callback(_put_back, owner, name, vars(owner).get(name))
            setattr(owner, name, reader)

    def _newest(self) -> str | None:
        folder = self.trainer.args.output_dir
        return get_last_checkpoint(folder) if os.path.isdir(folder) else None

    # --- events, in the order of a step -------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the log, take the first temperature; go on where the checkpoint stands that training resumes from."""
        if state is not self.trainer.state:
            raise ValueError("this SafeTrainerCallback was made for another Trainer; make one for each")
        self._taps.close()
        self._waits = False
        self.run.begin(state.global_step, args.device, self._newest, (state.stateful_callbacks or {}).get(KEPT_AS))
        self._tap()
        self.run.wait()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A window begins."""
        self._norm = None
        self.run.begin_window(int(state.epoch or 0))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read loss and norm; a jump takes the gradients away."""
        loss: Any = sum(self.run.window.losses) if self.run.window.losses else None
        scaler = self.trainer.accelerator.scaler
        self.run.before_update(self.trainer.optimizer, loss, self._norm, scaler=scaler, max_norm=args.max_grad_norm)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Write the row; ask the trainer to stop, or to save before a pause."""
        accelerator = self.trainer.accelerator
        skipped = bool(accelerator.optimizer_step_was_skipped)
        self.run.after_update(state.global_step, scaler=accelerator.scaler, skipped=skipped)
        if isinstance(state.stateful_callbacks, dict):
            state.stateful_callbacks[KEPT_AS] = self.run.state_dict()
        if self.run.failure is not None:
            control.should_training_stop = True
            control.should_save = control.should_evaluate = False
        elif self.run.hot:
            control.should_save = self._waits = True
        return control

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """With the checkpoint on disk, wait for the device to cool; end training where it is critical."""
        if self._waits:
            self._waits = False
            try:
                self.run.wait()
            except ThermalAbort as stop:
                self.run.failure = stop
                control.should_training_stop = True
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """A run that was stopped does not save or evaluate what its epoch would have."""
        if self.run.failure is not None:
            control.should_save = control.should_evaluate = False
        return control

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Put the validation loss into the row of the step before it."""
        self.run.see_validation((metrics or {}).get("eval_loss"))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the log; raise ``ThermalAbort`` where that is what ended training."""
        self._taps.close()
        self.run.finish()


def _put_back(owner: Any, name: str, own: Any) -> None:
    if own is None:
        vars(owner).pop(name, None)
    else:
        setattr(owner, name, own)

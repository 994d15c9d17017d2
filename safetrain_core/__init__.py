"""safetrain_core: guards for a PyTorch training loop, small enough to read.

Importing this package imports nothing else, torch included: a name is loaded when it is first asked for.

>>> import safetrain_core
>>> safetrain_core.DEFAULT_MAX_NORM
1.0
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint.atomic import atomic_save
    from .checkpoint.rng import capture_rng_state, restore_rng_state
    from .checkpoint.rolling import Checkpoints
    from .checkpoint.single import CHECKPOINT_SCHEMA, load_checkpoint, save_checkpoint
    from .config import TrainConfig
    from .corpus import Corpus
    from .errors import CheckpointError, SafeTrainError, ThermalAbort, TrainingFailed
    from .minigpt import MiniGPT, MiniGPTConfig, next_token_loss
    from .optim.build import build_optimizer
    from .optim.schedule import make_schedule
    from .records import SKIP_REASONS, SkipLog, StepLog, TrainState, rolling_skip_rate
    from .step.accumulate import (
        effective_batch_size,
        loss_scaled_for_accum,
        no_sync_context,
        scale_lr_with_batch,
        train_one_optimizer_step,
        windows,
        zero_grads,
    )
    from .step.amp import AmpTrainState
    from .step.gradients import DEFAULT_MAX_NORM, clip_global_l2_norm, has_non_finite_grad
    from .thermal.guard import ThermalGuard
    from .thermal.nvml import GpuMonitor
    from .thermal.reading import GpuReading
    from .thermal.simulated import SimulatedCard
    from .thermal.states import Thresholds, next_state
    from .thermal.trace import RecordedTrace
    from .train.result import FitResult
    from .train.trainer import SafeTrainer

#: Public name -> the module it lives in; a test compares it with the imports above.
_HOME = {
    "AmpTrainState": "step.amp",
    "CHECKPOINT_SCHEMA": "checkpoint.single",
    "CheckpointError": "errors",
    "Checkpoints": "checkpoint.rolling",
    "Corpus": "corpus",
    "DEFAULT_MAX_NORM": "step.gradients",
    "FitResult": "train.result",
    "GpuMonitor": "thermal.nvml",
    "GpuReading": "thermal.reading",
    "MiniGPT": "minigpt",
    "MiniGPTConfig": "minigpt",
    "RecordedTrace": "thermal.trace",
    "SKIP_REASONS": "records",
    "SafeTrainError": "errors",
    "SafeTrainer": "train.trainer",
    "SimulatedCard": "thermal.simulated",
    "SkipLog": "records",
    "StepLog": "records",
    "ThermalAbort": "errors",
    "ThermalGuard": "thermal.guard",
    "Thresholds": "thermal.states",
    "TrainConfig": "config",
    "TrainState": "records",
    "TrainingFailed": "errors",
    "atomic_save": "checkpoint.atomic",
    "build_optimizer": "optim.build",
    "capture_rng_state": "checkpoint.rng",
    "clip_global_l2_norm": "step.gradients",
    "effective_batch_size": "step.accumulate",
    "has_non_finite_grad": "step.gradients",
    "load_checkpoint": "checkpoint.single",
    "loss_scaled_for_accum": "step.accumulate",
    "make_schedule": "optim.schedule",
    "next_state": "thermal.states",
    "next_token_loss": "minigpt",
    "no_sync_context": "step.accumulate",
    "restore_rng_state": "checkpoint.rng",
    "rolling_skip_rate": "records",
    "save_checkpoint": "checkpoint.single",
    "scale_lr_with_batch": "step.accumulate",
    "train_one_optimizer_step": "step.accumulate",
    "windows": "step.accumulate",
    "zero_grads": "step.accumulate",
}

__all__ = sorted(_HOME)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

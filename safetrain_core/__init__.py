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
    from .checkpoint.dcp import load_dcp, save_dcp
    from .checkpoint.folders import rotate_checkpoints
    from .checkpoint.manifest import CHECKPOINT_STEP, ShardManifest
    from .checkpoint.reshard import reshard
    from .checkpoint.rng import capture_rng_state, restore_rng_state
    from .checkpoint.rolling import Checkpoints
    from .checkpoint.sharded import save_shard, save_sharded
    from .checkpoint.sharded_read import load_shard, load_sharded
    from .checkpoint.single import CHECKPOINT_SCHEMA, load_checkpoint, save_checkpoint
    from .config import TrainConfig
    from .corpus import Corpus
    from .diagnose import diagnose
    from .diagnose.finding import Evidence, Finding
    from .diagnose.probe import probe_accumulation
    from .diagnose.probe_clip import probe_clip_order
    from .diagnose.probe_memory import probe_memory
    from .diagnose.probe_resume import probe_resume
    from .diagnose.probe_skip import probe_skip_leaves_state_untouched
    from .diagnose.readers import read_log
    from .distributed import agree, is_main
    from .errors import (
        CheckpointDoesNotFit,
        CheckpointError,
        RankFailed,
        SafeTrainError,
        ThermalAbort,
        TrainingFailed,
    )
    from .launcher import launch
    from .memory.blocks import BlockPlan, plan_recompute_for
    from .memory.measure import RecomputeCost, measure_recompute
    from .memory.plan import RecomputePlan, plan_recompute
    from .memory.recompute import apply_recompute, remove_recompute
    from .memory.rules import (
        activation_memory_bytes,
        checkpoint_cost,
        memory_after_checkpoint_bytes,
        optimal_segment,
        selective_checkpoint_cost,
        transformer_activation_bytes,
    )
    from .memory.shape import RecomputeOption
    from .minigpt import MiniGPT, MiniGPTConfig, next_token_loss
    from .optim.build import build_optimizer
    from .optim.galore import GaLore
    from .optim.projection import find_basis, projection_error
    from .optim.schedule import make_schedule
    from .optim.state_bytes import optimizer_state_bytes, predict_state_bytes
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
    from .step.clip import DEFAULT_MAX_NORM, clip_global_l2_norm, has_non_finite_grad
    from .thermal.guard import ThermalGuard
    from .thermal.nvml import GpuMonitor
    from .thermal.reading import GpuReading
    from .thermal.simulated import SimulatedCard
    from .thermal.states import Thresholds, next_state
    from .thermal.trace import RecordedTrace
    from .train.checkup import Checkup, verify_checkpoints
    from .train.result import FitResult
    from .train.trainer import SafeTrainer

#: Public name -> the module it lives in; a test compares it with the imports above.
_HOME = {
    "AmpTrainState": "step.amp",
    "BlockPlan": "memory.blocks",
    "CHECKPOINT_SCHEMA": "checkpoint.single",
    "CHECKPOINT_STEP": "checkpoint.manifest",
    "CheckpointDoesNotFit": "errors",
    "CheckpointError": "errors",
    "Checkpoints": "checkpoint.rolling",
    "Checkup": "train.checkup",
    "Corpus": "corpus",
    "DEFAULT_MAX_NORM": "step.clip",
    "Evidence": "diagnose.finding",
    "Finding": "diagnose.finding",
    "FitResult": "train.result",
    "GaLore": "optim.galore",
    "GpuMonitor": "thermal.nvml",
    "GpuReading": "thermal.reading",
    "MiniGPT": "minigpt",
    "MiniGPTConfig": "minigpt",
    "RankFailed": "errors",
    "RecomputeCost": "memory.measure",
    "RecomputeOption": "memory.shape",
    "RecomputePlan": "memory.plan",
    "RecordedTrace": "thermal.trace",
    "SKIP_REASONS": "records",
    "SafeTrainError": "errors",
    "SafeTrainer": "train.trainer",
    "ShardManifest": "checkpoint.manifest",
    "SimulatedCard": "thermal.simulated",
    "SkipLog": "records",
    "StepLog": "records",
    "ThermalAbort": "errors",
    "ThermalGuard": "thermal.guard",
    "Thresholds": "thermal.states",
    "TrainConfig": "config",
    "TrainState": "records",
    "TrainingFailed": "errors",
    "activation_memory_bytes": "memory.rules",
    "agree": "distributed",
    "apply_recompute": "memory.recompute",
    "atomic_save": "checkpoint.atomic",
    "build_optimizer": "optim.build",
    "capture_rng_state": "checkpoint.rng",
    "checkpoint_cost": "memory.rules",
    "clip_global_l2_norm": "step.clip",
    "diagnose": "diagnose",
    "effective_batch_size": "step.accumulate",
    "find_basis": "optim.projection",
    "has_non_finite_grad": "step.clip",
    "is_main": "distributed",
    "launch": "launcher",
    "load_checkpoint": "checkpoint.single",
    "load_dcp": "checkpoint.dcp",
    "load_shard": "checkpoint.sharded_read",
    "load_sharded": "checkpoint.sharded_read",
    "loss_scaled_for_accum": "step.accumulate",
    "make_schedule": "optim.schedule",
    "measure_recompute": "memory.measure",
    "memory_after_checkpoint_bytes": "memory.rules",
    "next_state": "thermal.states",
    "next_token_loss": "minigpt",
    "no_sync_context": "step.accumulate",
    "optimal_segment": "memory.rules",
    "optimizer_state_bytes": "optim.state_bytes",
    "plan_recompute": "memory.plan",
    "plan_recompute_for": "memory.blocks",
    "predict_state_bytes": "optim.state_bytes",
    "probe_accumulation": "diagnose.probe",
    "probe_clip_order": "diagnose.probe_clip",
    "probe_memory": "diagnose.probe_memory",
    "probe_resume": "diagnose.probe_resume",
    "probe_skip_leaves_state_untouched": "diagnose.probe_skip",
    "projection_error": "optim.projection",
    "read_log": "diagnose.readers",
    "remove_recompute": "memory.recompute",
    "reshard": "checkpoint.reshard",
    "restore_rng_state": "checkpoint.rng",
    "rolling_skip_rate": "records",
    "rotate_checkpoints": "checkpoint.folders",
    "save_checkpoint": "checkpoint.single",
    "save_dcp": "checkpoint.dcp",
    "save_shard": "checkpoint.sharded",
    "save_sharded": "checkpoint.sharded",
    "scale_lr_with_batch": "step.accumulate",
    "selective_checkpoint_cost": "memory.rules",
    "train_one_optimizer_step": "step.accumulate",
    "transformer_activation_bytes": "memory.rules",
    "verify_checkpoints": "train.checkup",
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
    return [*__all__, *(name for name in globals() if name.startswith("__"))]

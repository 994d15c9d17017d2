"""From a config to what steps: the optimizer, its schedule, and the safe step around them."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ..config import TrainConfig
from ..distributed import world_size
from ..errors import type_of
from ..memory.recompute import apply_recompute
from ..optim.build import build_optimizer
from ..optim.schedule import make_schedule
from ..step.accumulate import scale_lr_with_batch
from ..step.amp import AmpTrainState
from ..step.refusals import refuse_wrong_kinds
from ..step.window import LossFn
from .cursor import length_of

__all__ = ["amp_from_config", "refuse_parts", "seed_everything"]

AMP_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

#: Rows kept in memory; the CSV has them all.
ROWS_KEPT = 1000


def refuse_parts(
    config: Any,
    train_loader: Any,
    val_loader: Any,
    hooks: Sequence[Any],
    sinks: Any,
    blocks: Any,
) -> None:
    """``ValueError`` where a part handed to ``SafeTrainer`` is not what it has to be, before the run finds out.

    >>> refuse_parts({"max_steps": 5}, [1], None, [], [], None)
    Traceback (most recent call last):
    ...
    ValueError: config is a dict, expected a TrainConfig: TrainConfig(max_steps=...)
    """
    if not isinstance(config, TrainConfig):
        keys = ", ".join(f"{key}=..." for key in config) if isinstance(config, dict) else "max_steps=..."
        raise ValueError(f"config is {type_of(config)}, expected a TrainConfig: TrainConfig({keys})")
    for name, loader in (("train_loader", train_loader), ("val_loader", val_loader)):
        if loader is None and name == "val_loader":
            continue
        if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
            raise ValueError(f"{name} is {type_of(loader)}, expected an iterable of (inputs, targets) batches")
        if length_of(loader) == 0:
            raise ValueError(f"{name} is empty (0 batches); give it at least one batch")
    for hook in hooks:
        if hook is not None and not callable(hook):
            raise ValueError(f"on_row, before_step and fault are functions or None; one is {type_of(hook)}")
    if isinstance(sinks, str) or not isinstance(sinks, Sequence):
        raise ValueError(f"sinks is {type_of(sinks)}, expected a list of sinks")
    for sink in sinks:
        lacks = [name for name in ("begin", "write", "amend", "close") if not callable(getattr(sink, name, None))]
        if lacks:
            raise ValueError(f"a sink is {type_of(sink)} without {lacks[0]}(); it needs begin, write, amend and close")
    if blocks is not None and not isinstance(blocks, Mapping):
        raise ValueError(f"blocks is {type_of(blocks)}, expected a dict: name -> module, or list of parameters")


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch, on every device.

    >>> seed_everything(3); first = torch.rand(1)
    >>> seed_everything(3); bool(torch.rand(1) == first)
    True
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def amp_from_config(
    model: nn.Module, config: TrainConfig, loss_fn: LossFn | None = None, batches_per_epoch: int | None = None
) -> AmpTrainState:
    """The safe step that ``config`` describes, for a model already on its device.

    Args:
        batches_per_epoch: length of the schedule where neither ``scheduler_total_steps`` nor ``max_steps`` is set.

    Raises:
        ValueError: a schedule without a length, an optimizer that cannot be built, a model that cannot be stepped, or
            has no layers for ``recompute_policy``.

    >>> amp_from_config(nn.Linear(1, 1), TrainConfig(max_steps=10, scheduler_warmup_ratio=0.5)).lr
    0.0002
    """
    refuse_wrong_kinds(model, loss_fn=loss_fn)
    device = next((p.device for p in model.parameters() if p.requires_grad), torch.device("cpu"))
    lr = config.learning_rate
    if config.scale_lr_with_batch:
        lr = scale_lr_with_batch(lr, config.gradient_accumulation_steps, world_size())
    optimizer = build_optimizer(
        model,
        config.optimizer_class,
        lr=lr,
        weight_decay=config.weight_decay,
        galore_rank=config.galore_rank if config.use_galore else None,
        galore_update_interval=config.galore_update_interval,
        galore_scale=config.galore_scale,
        galore_max_dim=config.galore_max_dim,
    )
    total = config.scheduler_total_steps or config.max_steps
    if total is None and batches_per_epoch is not None:
        total = math.ceil(batches_per_epoch / config.gradient_accumulation_steps)
    if total is None and config.scheduler_type != "constant":
        raise ValueError(
            f"scheduler_type={config.scheduler_type} needs a length, and train_loader has none; "
            "set scheduler_total_steps or max_steps"
        )
    amp = AmpTrainState(
        model,
        max_norm=config.grad_clip_max_norm,
        device_type=device.type,
        amp_dtype=AMP_DTYPES.get(config.amp_dtype or "") if config.use_amp else torch.float32,
        optimizer=optimizer,
        scheduler=make_schedule(
            optimizer, config.scheduler_type, total_steps=total, warmup_ratio=config.scheduler_warmup_ratio
        ),
        loss_fn=loss_fn,
        inf_post_clip_threshold=config.inf_post_clip_threshold,
        check_loss_before_backward=config.check_loss_before_backward,
        loss_weighting=config.loss_weighting,
        loss_jump_factor=config.loss_jump_factor,
        loss_jump_window=config.loss_jump_window,
        skip_rate_alert=config.skip_rate_alert,
        keep_rows=ROWS_KEPT,
    )
    if config.recompute_policy != "none":  # with none, what the caller has applied stays
        apply_recompute(model, config.recompute_policy, config.recompute_k)
    return amp

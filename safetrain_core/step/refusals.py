"""What a safe step refuses at the start: nothing to train, weights that cannot be scaled, devices that do not match."""

from __future__ import annotations

import inspect
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import type_of

__all__ = [
    "checked_trainable",
    "refuse_arguments",
    "refuse_data_elsewhere",
    "refuse_foreign_optimizer",
    "refuse_wrong_kinds",
]


def checked_trainable(model: nn.Module, device_type: str, amp_dtype: torch.dtype) -> list[nn.Parameter]:
    """The model's trainable weights, all on ``device_type`` and none of a dtype that cannot be stepped.

    Raises:
        ValueError: none is trainable; one, or a buffer, is elsewhere; one is float16 while a scaler would be on.

    >>> checked_trainable(nn.Linear(2, 1), "cuda", torch.float16)
    Traceback (most recent call last):
    ...
    ValueError: the model's weight is on cpu but device_type='cuda'; pass device_type='cpu' or move the model
    """
    trainable = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if not trainable:
        raise ValueError("the model has no trainable parameter (requires_grad=True); there is nothing to step")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type != device_type:
            raise ValueError(
                f"the model's {name} is on {tensor.device} but device_type={device_type!r}; "
                f"pass device_type={tensor.device.type!r} or move the model"
            )
    for name, weight in trainable.items():
        if amp_dtype is torch.float16 and weight.dtype is torch.float16:
            raise ValueError(
                f"weight {name} is float16: a GradScaler cannot unscale float16 gradients. Keep weights in "
                "float32 (model.float()) and let autocast cast them, or use amp_dtype=torch.bfloat16"
            )
    return list(trainable.values())


def refuse_foreign_optimizer(optimizer: torch.optim.Optimizer, trainable: list[nn.Parameter], device_type: str) -> None:
    """``ValueError`` when the optimizer holds none of these weights, or one on another device.

    >>> a, b = nn.Linear(2, 1), nn.Linear(2, 1)
    >>> refuse_foreign_optimizer(torch.optim.SGD(a.parameters(), lr=1), list(b.parameters()), "cpu")
    Traceback (most recent call last):
    ...
    ValueError: the optimizer holds none of the model's trainable weights; build it from this model's parameters(), ...
    """
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if not {id(p) for p in held} & {id(p) for p in trainable}:
        raise ValueError(
            "the optimizer holds none of the model's trainable weights; "
            "build it from this model's parameters(), after any copy or wrapping"
        )
    for weight in held:
        if weight.device.type != device_type:
            raise ValueError(
                f"the optimizer holds a weight on {weight.device} but device_type={device_type!r}; "
                "move the model first, then build the optimizer"
            )


def refuse_data_elsewhere(inputs: Any, targets: Any, device_type: str) -> None:
    """``ValueError`` when a tensor of a batch is on another device than the model.

    >>> refuse_data_elsewhere(torch.zeros(1), torch.zeros(1, device="meta"), "cpu")
    Traceback (most recent call last):
    ...
    ValueError: targets are on meta but the model is on cpu; move them with .to('cpu')
    """
    for name, data in (("inputs", inputs), ("targets", targets)):
        if isinstance(data, Tensor) and data.device.type != device_type:
            raise ValueError(
                f"{name} are on {data.device} but the model is on {device_type}; move them with .to({device_type!r})"
            )


#: What autocast takes; float32 is none.
AMP_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def refuse_wrong_kinds(
    model: Any, amp_dtype: Any = None, optimizer: Any = None, scheduler: Any = None, loss_fn: Any = None
) -> None:
    """``ValueError`` where a part handed to ``AmpTrainState`` is not what it has to be, before a step finds out.

    >>> refuse_wrong_kinds(nn.Linear(2, 1), "float16")
    Traceback (most recent call last):
    ...
    ValueError: amp_dtype='float16' must be one of torch.float16, torch.bfloat16, torch.float32 (no autocast), or None
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {type_of(model)}, expected a torch.nn.Module")
    if amp_dtype is not None and amp_dtype not in AMP_DTYPES:
        raise ValueError(
            f"amp_dtype={amp_dtype!r} must be one of {', '.join(map(str, AMP_DTYPES))} (no autocast), or None"
        )
    if isinstance(optimizer, type) or (optimizer is not None and not hasattr(optimizer, "param_groups")):
        what = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else type_of(optimizer)
        raise ValueError(
            f"optimizer is {what}, expected one that is built: torch.optim.SGD(model.parameters(), lr=0.1)"
        )
    if optimizer is not None and _needs_closure(optimizer):
        raise ValueError(
            f"optimizer {type(optimizer).__name__} computes the loss itself, by a closure, more than once in a step; a "
            "step is judged by one loss and its gradients: use an optimizer whose step() needs none"
        )
    if isinstance(scheduler, type) or (scheduler is not None and not callable(getattr(scheduler, "step", None))):
        raise ValueError(
            f"scheduler is {type_of(scheduler)}, expected one from torch.optim.lr_scheduler over the optimizer, or None"
        )
    if loss_fn is not None and not callable(loss_fn):
        raise ValueError(
            f"loss_fn is {type_of(loss_fn)}, expected a function loss_fn(output, target) -> scalar, or None"
        )


def _needs_closure(optimizer: Any) -> bool:
    """Whether ``step`` cannot be called without a closure, as that of LBFGS."""
    try:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")  # a schedule wraps the object's own
    except (TypeError, ValueError, AttributeError):  # nothing to be read: the step will tell
        return False
    return closure is not None and closure.default is closure.empty


def refuse_arguments(
    max_norm: float,
    inf_post_clip_threshold: float,
    loss_weighting: str,
    loss_jump_factor: float | None,
    keep_rows: int | None,
    scheduler: Any,
) -> None:
    """``ValueError`` with name, value and limit of an argument of ``AmpTrainState`` that is out of range."""
    for name, value in (("max_norm", max_norm), ("inf_post_clip_threshold", inf_post_clip_threshold)):
        if not isinstance(value, Real) or not value >= 0:
            raise ValueError(f"{name}={value} must be at least 0 (0 = off)")
    if loss_weighting not in ("equal", "tokens"):
        raise ValueError(f"loss_weighting={loss_weighting!r} must be equal or tokens")
    if loss_jump_factor is not None and not (isinstance(loss_jump_factor, Real) and loss_jump_factor > 1):
        raise ValueError(f"loss_jump_factor={loss_jump_factor} must be above 1, or None for no limit")
    if keep_rows is not None and not (isinstance(keep_rows, int) and keep_rows >= 1):
        raise ValueError(f"keep_rows={keep_rows} must be at least 1, or None to keep all")
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ValueError("ReduceLROnPlateau needs a metric for each step(); step it yourself after a validation")

"""Forward and backward of a window of micro-batches, under autocast and loss scaling."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..distributed import world_size
from ..errors import type_of
from .accumulate import no_sync_context, window_weights
from .refusals import refuse_data_elsewhere

__all__ = ["LossFn", "WindowPass", "checked_window"]

LossFn = Callable[[Any, Any], Tensor]
Window = Sequence[tuple[Any, Any]]

UNCONNECTED = (
    "the loss reached no weight of the optimizer, so there is no gradient; "
    "check that loss_fn uses the model's output and that nothing detaches it"
)


def checked_window(micro_batches: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """The window as a list; ``ValueError`` when it is empty.

    >>> checked_window(iter([(1, 2)]))
    [(1, 2)]
    """
    window = list(micro_batches)
    if not window:
        raise ValueError("the window has 0 micro-batches; it needs at least 1 (inputs, targets) pair")
    return window


def default_loss(output: Tensor, target: Tensor) -> Tensor:
    """``mse_loss`` for floating-point targets, else ``cross_entropy``.

    Raises:
        ValueError: an output or targets that are no tensor; floating-point targets of another shape than the output,
            which ``mse_loss`` would broadcast; other targets of a shape that ``cross_entropy`` does not take.

    >>> default_loss((torch.zeros(1), torch.zeros(2)), torch.zeros(2))
    Traceback (most recent call last):
    ...
    ValueError: the model's output is a tuple, and the default loss takes a tensor; pass loss_fn, for example ...
    """
    for what, value in (("the model's output is", output), ("the batch's targets are", target)):
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{what} {type_of(value)}, and the default loss takes a tensor; pass loss_fn, for example "
                "loss_fn=lambda output, targets: cross_entropy(output[0], targets), or output.logits where it has them"
            )
    if target.is_floating_point() and output.shape != target.shape:
        raise ValueError(
            f"output has shape {tuple(output.shape)} and targets {tuple(target.shape)}; mse_loss would broadcast them: "
            "reshape one"
        )
    if target.is_floating_point():
        return F.mse_loss(output, target)
    if output.dim() > 1 and target.shape != (classes := (output.shape[0], *output.shape[2:])):
        raise ValueError(
            f"targets are {str(target.dtype).removeprefix('torch.')} of shape {tuple(target.shape)}, and cross_entropy "
            f"takes class numbers of shape {classes} for an output of shape {tuple(output.shape)}; where they are "
            "numbers to predict, make them .float(); where classes are the output's last dimension, "
            "pass loss_fn=next_token_loss"
        )
    return F.cross_entropy(output, target)


class WindowPass:
    """The passes of one model: the same autocast, loss function and weighting for each window.

    >>> weight = nn.Linear(1, 1)
    >>> scaler = torch.amp.GradScaler("cpu", enabled=False)
    >>> passes = WindowPass(weight, nn.functional.mse_loss, "cpu", torch.float32, scaler, "equal")
    >>> losses, weights = passes.backward([(torch.ones(2, 1), torch.ones(2, 1))] * 2, look_early=False)
    >>> weights, losses[0].requires_grad, weight.weight.grad.shape
    ([0.5, 0.5], False, torch.Size([1, 1]))
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn | None,
        device_type: str,
        amp_dtype: torch.dtype,
        scaler: torch.amp.GradScaler,
        weighting: str,
    ) -> None:
        self.model, self.loss_fn = model, loss_fn or default_loss
        self.device_type, self.amp_dtype = device_type, amp_dtype
        self.scaler, self.weighting = scaler, weighting
        self._unsynced: Window = ()

    def forward_loss(self, inputs: Any, targets: Any) -> Tensor:
        """``loss_fn(model(inputs), targets)`` under autocast: a 0-dim tensor, still on its device.

        Raises:
            ValueError: data on another device than the model, or a loss that is not a scalar.
        """
        refuse_data_elsewhere(inputs, targets, self.device_type)
        enabled = self.amp_dtype is not torch.float32
        try:
            with torch.autocast(self.device_type, dtype=self.amp_dtype if enabled else None, enabled=enabled):
                loss = self.loss_fn(self.model(inputs), targets)
        except RuntimeError as error:
            if not re.search(r"\b(shapes?|sizes?|dimensions?)\b", str(error)):
                raise
            shapes = " and ".join(f"{tuple(x.shape)}" for x in (inputs, targets) if isinstance(x, Tensor))
            raise ValueError(f"a batch with shapes {shapes} does not fit the model or the loss: {error}") from error
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn returned {shape}, expected a scalar tensor; reduce it, for example .mean()")
        return loss.reshape(())

    def backward(self, window: Window, *, look_early: bool) -> tuple[list[Tensor | float], list[float]]:
        """Forward and scaled backward of each micro-batch; gradients are synced between ranks on the last only.

        Args:
            look_early: read each loss before its backward, and end at the first that is not finite.

        Returns:
            The losses (floats with ``look_early``), and each one's weight in the window's mean, over all ranks.
            Micro-batches without a valid token are left out: a mean over none is NaN, and NaN times a weight of 0 is
            NaN. Where other ranks wait for their passes, they are made all the same, with a gradient of 0.
        """
        weights, share = window_weights([targets for _, targets in window], self.weighting)
        passed = [(batch, w * share) for batch, w in zip(window, weights, strict=True) if w > 0 or world_size() > 1]
        losses: list[Tensor | float] = []
        for i, ((inputs, targets), weight) in enumerate(passed):
            last = i == len(passed) - 1
            with contextlib.nullcontext() if last else no_sync_context(self.model):
                loss = self.forward_loss(inputs, targets) if weight > 0 else self._nothing(inputs)
                if not loss.requires_grad:
                    raise ValueError(UNCONNECTED)
                losses.append(float(loss.item()) if look_early else loss.detach())
                if look_early and not math.isfinite(losses[-1]):
                    break
                self._unsynced = () if last else ((inputs, targets),)
                self.scaler.scale(loss if weight == 1 else loss * weight).backward()
        return losses, [weight for _, weight in passed]

    def _nothing(self, inputs: Any) -> Tensor:
        """A forward whose loss is 0, connected to the weights as any other."""
        enabled = self.amp_dtype is not torch.float32
        with torch.autocast(self.device_type, dtype=self.amp_dtype if enabled else None, enabled=enabled):
            outputs = [x for x in tree_leaves(self.model(inputs)) if isinstance(x, Tensor) and x.requires_grad]
        if not outputs:
            raise ValueError(UNCONNECTED)
        return torch.stack([x.sum() * 0 for x in outputs]).sum()

    def flush(self) -> bool:
        """End a window that was given up between its first micro-batch and its last.

        FSDP2 keeps gradients that were not synced yet out of reach of ``zero_grad``, for the next sync. So one more
        backward is made, with sync, and what it adds up is cleared with the gradients. All ranks have to be here.

        Returns:
            Whether it was made; it has moved BatchNorm's and other buffers then.
        """
        given_up, self._unsynced = self._unsynced, ()
        if not given_up or not hasattr(self.model, "set_requires_gradient_sync"):
            return False
        for inputs, _ in given_up:
            self._nothing(inputs).backward()
        return True

"""One optimizer step of a loop that is not ours, as a callback sees it: its numbers, read at once, and its row."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..distributed import sums_and_agreement, world_size
from ..records import StepLog
from ..step.gradients import gathered

__all__ = ["Window", "take_gradients_away"]


class Window:
    """What is known of a step before it is taken, from its first micro-batch on.

    ``losses``: of its micro-batches, on the device. ``samples``: on this rank. ``requests``: what the ranks ask for.

    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> window = Window(epoch=0)
    >>> window.see_batch({"x": torch.zeros(4, 2)})
    >>> window.read(torch.optim.SGD([weight], lr=0.5), torch.tensor(2.0), torch.tensor(3.0), max_norm=1.0)
    >>> print(window.row_of(7))
    STEP step=  7 lr=0.500000 pre_clip=  3.000000 post_clip=  1.000000 loss=2.000000 scale=- reason=-
    """

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.losses: list[Tensor] = []
        self.samples = self.requests = 0
        self.row: StepLog | None = None
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since its first micro-batch."""
        return max(time.perf_counter() - self._began, 1e-9)

    def see_batch(self, batch: Any) -> None:
        """Count the samples of a micro-batch, by the first dimension of its first tensor."""
        self.samples += _samples_in(batch) or 0

    def read(
        self,
        optimizer: Any,
        loss: Tensor | None,
        norm: Any,
        *,
        scaler: Any = None,
        max_norm: float | None = None,
        still_scaled: bool = False,
        asked: int = 0,
    ) -> None:
        """Read the numbers: in one read of the host, and with several ranks in one all-reduce.

        Args:
            loss: the window's mean loss on this rank. norm: of the unscaled gradients before the clip, over all ranks.
            scaler: the host's GradScaler. max_norm: what the host clips to; 0 = it does not, None = nobody knows.
            still_scaled: the optimizer unscales the gradients by itself, in its step: the norm is of scaled ones.
            asked: what this rank requests of all, see ``distributed.agree``.
        """
        scale = float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else None
        mean, pre = _read(loss, norm)
        if pre is not None and still_scaled and scale:
            pre /= scale
        if world_size() > 1:
            device = loss.device if loss is not None else None
            told = torch.tensor([math.nan if mean is None else mean], dtype=torch.float64, device=device)
            sums, self.requests = sums_and_agreement(told, asked)
            mean = None if mean is None else sums[0] / world_size()
        post = None
        if pre is not None and math.isfinite(pre) and max_norm is not None:
            post = min(pre, max_norm) if max_norm > 0 else pre
        self.row = StepLog(0, float(optimizer.param_groups[0]["lr"]), pre, post, mean, scale)

    @property
    def overflows(self) -> bool:
        """Whether the host's scaler is about to skip the update."""
        row = self.row
        return (
            row is not None and row.scale is not None and row.pre_clip is not None and not math.isfinite(row.pre_clip)
        )

    def row_of(self, step: int, *, scaler: Any = None, skipped: bool = False) -> StepLog | None:
        """The row, now that the update was taken or left out; None where nothing was read.

        A skip is what the host says is one, an overflow under its scaler, or a scaling factor that has become smaller.
        Accelerate's own flag misses those of a fused optimizer, which is called and leaves the update out by itself.
        """
        row = self.row
        if row is None:
            return None
        shrunk = row.scale is not None and scaler is not None and float(scaler.get_scale()) < row.scale
        if row.skipped or not (skipped or self.overflows or shrunk):
            return replace(row, step=step)
        bad_loss = row.loss is not None and not math.isfinite(row.loss)
        reason = "non_finite_loss" if bad_loss else "non_finite_grad"
        return replace(row, step=step, post_clip=None, skipped=True, skip_reason=reason)


def take_gradients_away(optimizer: Any, *, by_overflow: bool = False) -> None:
    """Make the optimizer's next step leave everything as it is: torch's optimizers pass over weights without gradient.

    Args:
        by_overflow: a scaler looks at the gradients only now, and wants some: an Inf makes it skip the step.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = torch.optim.AdamW([weight])
    >>> weight.sum().backward(); take_gradients_away(optimizer); optimizer.step()
    >>> weight.item(), len(optimizer.state)
    (1.0, 0)
    """
    for weight in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
        if by_overflow:
            weight.grad.fill_(math.inf)
        else:
            weight.grad = None


def _read(*values: Any) -> list[float | None]:
    """The values as floats, in one read of the host; None stays."""
    tensors = {}
    for i, value in enumerate(values):
        if value is not None:
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            tensors[i] = torch.as_tensor(whole).detach().reshape(())
    told = dict(zip(tensors, gathered(list(tensors.values())).tolist(), strict=True)) if tensors else {}
    return [told.get(i) for i in range(len(values))]


def _samples_in(batch: Any) -> int | None:
    """The first dimension of the first tensor in a batch, however nested; None where there is none.

    >>> _samples_in({"name": "x", "input": [torch.zeros(3, 5), torch.zeros(7)]})
    3
    """
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else 1
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((count for count in map(_samples_in, parts) if count is not None), None)

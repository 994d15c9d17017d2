"""Steps whose verdict is read every n-th attempt: between looks the host reads nothing at all.

torch's fused optimizers take a flag on the device, ``found_inf``, and leave weights and moments alone where it is 1.
So each attempt is judged on the device, refused there, and told to the host later, all rows in one read.

What differs from a look at every step: the learning rate stands still between looks; and a gradient that is finite but
whose FP32 sum of squares overflows is refused, where a look would have computed its norm again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..records import StepLog
from .amp import AmpTrainState
from .gradients import CLIP_EPS, all_finite, gathered, gradients_of, magnitudes_of, norms_of
from .scaling import MIN_SCALE
from .verdict import POST_CLIP_SLACK, Verdict
from .window import checked_window

__all__ = ["DeferredSteps", "can_defer"]

#: Optimizers whose fused kernels refuse an update by ``found_inf``. SGD with momentum does not: it keeps the garbage.
REFUSING = (torch.optim.AdamW, torch.optim.Adam, torch.optim.Adagrad, torch.optim.SGD)


def can_defer(optimizer: torch.optim.Optimizer) -> bool:
    """True where the optimizer itself refuses a bad update on the device.

    >>> weight = [torch.nn.Parameter(torch.zeros(1))]
    >>> can_defer(torch.optim.AdamW(weight, fused=True)), can_defer(torch.optim.AdamW(weight))
    (True, False)
    """
    return type(optimizer) in REFUSING and all(
        group.get("fused") and not group.get("momentum") for group in optimizer.param_groups
    )


class DeferredSteps:
    """Attempts of an ``AmpTrainState`` whose verdicts wait on the device until ``look()``.

    Raises:
        ValueError: an optimizer that cannot refuse an update on the device.

    >>> _ = torch.manual_seed(0)
    >>> amp = AmpTrainState(torch.nn.Linear(2, 1), amp_dtype=torch.float32)
    >>> steps = DeferredSteps(amp)
    >>> for bad in (0.0, math.inf, 0.0):
    ...     steps.attempt([(torch.ones(4, 2), torch.full((4, 1), bad))])
    >>> [row.skip_reason for row in steps.look()], amp.counters.updates
    ([None, 'non_finite_loss', None], 2)
    """

    def __init__(self, amp: AmpTrainState) -> None:
        if not can_defer(amp.optimizer):
            raise ValueError(
                f"{type(amp.optimizer).__name__} cannot refuse an update on the device; use fused AdamW, Adam, Adagrad "
                "or SGD without momentum, or look at every step"
            )
        self.amp = amp
        self._numbers: list[Tensor] = []  # one vector per attempt: refused, norm, scale used, losses
        self._weights: list[list[float]] = []
        self._scaling: tuple[Tensor, Tensor] | None = None  # the factor, and good steps in a row
        self._fresh = False

    def __len__(self) -> int:
        """Attempts whose verdict is not known yet."""
        return len(self._numbers)

    def attempt(self, micro_batches: Iterable[tuple[Any, Any]]) -> None:
        """Forward, backward, clip and step, judged and where needed refused on the device; see ``step_window``."""
        amp, window = self.amp, checked_window(micro_batches)
        if not self._numbers:
            self._fresh = not amp.optimizer.state
            self._scaling = self._scaling_on_device()
        amp.begin_window()
        try:
            losses, weights = amp.passes.backward(window, look_early=False)
            with torch.no_grad():
                numbers = self._judge_and_step([loss for loss in losses if isinstance(loss, Tensor)])
        except BaseException:
            amp.leave_no_trace(overflowed=False)
            if self._scaling is not None:
                amp.scaler.update(self._scaling[0])
            raise
        self._numbers.append(numbers)
        self._weights.append(weights)

    def _scaling_on_device(self) -> tuple[Tensor, Tensor] | None:
        scaling, device = self.amp.scaling, self.amp.device
        if scaling.factor is None:
            return None
        return torch.tensor(scaling.factor, device=device), torch.tensor(scaling.good_in_a_row, device=device)

    def _judge_and_step(self, losses: list[Tensor]) -> Tensor:
        """Clip, and step where all is well; the numbers of the row: refused, norm, scale used, losses."""
        amp, limits = self.amp, self.amp.limits
        grads = gradients_of(amp.unscaled_params())
        norm = torch.linalg.vector_norm(gathered(norms_of(grads)))
        if limits.max_norm > 0:
            torch._foreach_mul_(grads, (limits.max_norm / (norm + CLIP_EPS)).clamp(max=1.0))
        losses_ok, norm_ok = gathered(losses).isfinite().all(), norm.isfinite()
        bad = ~(losses_ok & norm_ok)
        if limits.post_clip_can_fire:
            bad |= ~(magnitudes_of(grads).max() <= limits.post_clip * (1 + POST_CLIP_SLACK))
        scale = torch.ones_like(norm) if self._scaling is None else self._scaling[0]
        numbers = gathered([bad.to(norm.dtype), norm, scale, *losses])
        optimizer: Any = amp.optimizer
        optimizer.grad_scale, optimizer.found_inf = None, bad.to(torch.float32)  # exactly 0 or 1, or NaN gets through
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf
        amp.buffers.restore(where=bad)
        if self._scaling is not None:
            self._scaling = self._moved(*self._scaling, overflowed=losses_ok & ~norm_ok, good=~bad)
            amp.scaler.update(self._scaling[0])
        return numbers

    def _moved(self, scale: Tensor, run: Tensor, *, overflowed: Tensor, good: Tensor) -> tuple[Tensor, Tensor]:
        """``LossScaling``'s rule, on the device: the next factor and good steps in a row."""
        scaler = self.amp.scaler
        run = torch.where(overflowed, 0, run + good)
        grows = run >= scaler.get_growth_interval()
        halved = (scale * scaler.get_backoff_factor()).clamp(min=MIN_SCALE)
        scale = torch.where(overflowed, halved, torch.where(grows, scale * scaler.get_growth_factor(), scale))
        return scale, torch.where(grows, 0, run)

    def look(self) -> list[StepLog]:
        """Read all waiting verdicts, and whether weights and buffers are finite, at once; the rows, in order.

        Where they are not finite the last row is refused as ``non_finite_state``: go back to a safe state then.
        """
        amp = self.amp
        if not self._numbers:
            return []
        last = [all_finite(amp.examined()), *(self._scaling or ())]
        dtype = self._numbers[0].dtype
        read = iter(torch.cat([*self._numbers, torch.stack([t.to(dtype) for t in last])]).tolist())
        verdicts, scales = [], []
        for numbers, weights in zip(self._numbers, self._weights, strict=True):
            bad, norm, scale, *losses = (next(read) for _ in range(len(numbers)))
            verdicts.append(self._verdict(bool(bad), norm, losses, weights))
            scales.append(None if self._scaling is None else scale)
        if not next(read):
            verdicts[-1] = verdicts[-1]._replace(reason="non_finite_state")
        if self._scaling is not None:
            amp.scaling.put(next(read), good_in_a_row=int(next(read)))
        if self._fresh and all(v.reason is not None for v in verdicts):
            amp.optimizer.state.clear()  # made by a first step that was refused
        self._numbers, self._weights = [], []
        lr = amp.lr
        return [self._told(verdict, lr, scale) for verdict, scale in zip(verdicts, scales, strict=True)]

    def _verdict(self, bad: bool, norm: float, losses: list[float], weights: list[float]) -> Verdict:
        wrong = next((loss for loss in losses if not math.isfinite(loss)), None)
        if wrong is not None:
            return Verdict("non_finite_loss", wrong)
        loss = sum(w * x for w, x in zip(weights, losses, strict=True))
        if not math.isfinite(norm):
            return Verdict("non_finite_grad", loss, norm)
        limit = self.amp.limits.max_norm
        return Verdict("post_clip_explosion" if bad else None, loss, norm, min(norm, limit) if limit > 0 else norm)

    def _told(self, verdict: Verdict, lr: float, scale: float | None) -> StepLog:
        """Record one row; its schedule step, and the loss-jump rule, waited for the losses before it."""
        limit = self.amp.limits_now().loss
        if verdict.reason is None and limit is not None and not verdict.loss <= limit:
            verdict = verdict._replace(reason="loss_jump")
        if verdict.reason is None:
            self.amp.advance_schedule()
        return self.amp.record(verdict, lr, scale)

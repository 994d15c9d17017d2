"""What the numbers of a window say: take the step, or refuse it, and why. One pass over the gradients, one read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .gradients import exact_norm, gathered, gradients_of, largest_magnitude, magnitudes_of, norms_of, scale_to_norm

__all__ = ["POST_CLIP_SLACK", "GradientDetail", "Limits", "Verdict", "judge"]

#: FP32 rounding may leave max|g| this much, relatively, above a threshold equal to the clip norm.
POST_CLIP_SLACK = 1e-3


class Limits(NamedTuple):
    """What a step is judged by. 0 or None = off.

    ``max_norm``: clip threshold of the global L2 norm. ``post_clip``: largest max|g| after the clip. ``loss``: largest
    mean loss.
    """

    max_norm: float = 1.0
    post_clip: float = 10.0
    loss: float | None = None

    @property
    def post_clip_can_fire(self) -> bool:
        """After a clip to tau, max|g| <= tau: a threshold of tau or more needs no look while there is a clip."""
        return self.post_clip > 0 and (self.max_norm == 0 or self.post_clip < self.max_norm)


class GradientDetail(NamedTuple):
    """The gradients before the clip: the L2 norm of each weight's, the largest magnitude, the root mean square."""

    norm_of: dict[Tensor, float]
    max_abs: float
    rms: float


class Verdict(NamedTuple):
    """Why the step is refused (None = it is taken), and the numbers of its row."""

    reason: str | None
    loss: float
    pre_clip: float | None = None
    post_clip: float | None = None
    detail: GradientDetail | None = None


@torch.no_grad()
def judge(
    params: list[Tensor],
    losses: Sequence[Tensor | float],
    weights: Sequence[float],
    limits: Limits,
    *,
    detail: bool = False,
) -> Verdict:
    """Judge a window by its losses and its unscaled gradients, and clip these in place where they need it.

    Args:
        params: at least one, each with its gradient.
        losses: of each micro-batch, on the device or read already. weights: of each in the mean.
        detail: also read the norm of each gradient and the largest magnitude (one more pass).

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> judge([weight], [torch.tensor(0.5)], [1.0], Limits(max_norm=1.0))[:4]
    (None, 0.5, 5.0, 1.0)
    >>> weight.grad /= 0
    >>> judge([weight], [torch.tensor(0.5)], [1.0], Limits())[:4]
    ('non_finite_grad', 0.5, inf, None)
    """
    grads = gradients_of(params)
    norms = norms_of(grads)
    late = [loss for loss in losses if isinstance(loss, Tensor)]
    asked = [torch.linalg.vector_norm(gathered(norms)), *late]
    if detail:
        asked += [magnitudes_of(grads).max(), *norms]
    norm, *read = gathered(asked).tolist()  # the one host read of a step, outside the optimizer's own
    values = iter(read)
    seen = [next(values) if isinstance(loss, Tensor) else loss for loss in losses]
    about = None
    if detail:
        max_abs = next(values)
        about = GradientDetail(
            dict(zip(params, values, strict=True)), max_abs, norm / math.sqrt(sum(g.numel() for g in grads))
        )

    bad = next((loss for loss in seen if not math.isfinite(loss)), None)
    if bad is not None:
        return Verdict("non_finite_loss", bad)
    loss = sum(w * x for w, x in zip(weights, seen, strict=True))
    norm = exact_norm(grads, norm)
    if not math.isfinite(norm):
        return Verdict("non_finite_grad", loss, norm)
    if limits.loss is not None and not loss <= limits.loss:
        return Verdict("loss_jump", loss, norm, None, about)
    post = scale_to_norm(grads, norm, limits.max_norm) if limits.max_norm > 0 else norm
    # max|g| <= norm: only a norm above the threshold needs a second pass.
    if limits.post_clip > 0 and post > limits.post_clip:
        largest = largest_magnitude(grads)
        if not largest <= limits.post_clip * (1 + POST_CLIP_SLACK):
            return Verdict("post_clip_explosion", loss, norm, post, about)
    return Verdict(None, loss, norm, post, about)

"""What the numbers of a window say: take the step, or refuse it, and why. One pass over the gradients, one read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..distributed import VERDICT, rank, world_size
from ..records import SKIP_REASONS
from .gradients import exact_norm, gathered, gradients_of, largest_magnitude, magnitudes_of, norms_of, scale_to_norm
from .ranks import any_sharded, exact_norm_over_ranks, largest_over_ranks, norms_over_ranks

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
    """Why the step is refused (None = it is taken), the numbers of its row, and what some rank requests."""

    reason: str | None
    loss: float
    pre_clip: float | None = None
    post_clip: float | None = None
    detail: GradientDetail | None = None
    requests: int = 0


@torch.no_grad()
def judge(
    params: list[Tensor],
    losses: Sequence[Tensor | float],
    weights: Sequence[float],
    limits: Limits,
    *,
    detail: bool = False,
    code: int = 0,
) -> Verdict:
    """Judge a window by its losses and its unscaled gradients, and clip these in place where they need it.

    Args:
        params: at least one, each with its gradient.
        losses: of each micro-batch, on the device or read already. weights: of each in the mean.
        detail: also read the norm of each gradient and the largest magnitude (one more pass).
        code: what this rank knows already and requests, see ``distributed.agree``.

    Several ranks judge alike: by the norm and the mean loss of all, and the worst that one of them knows.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> judge([weight], [torch.tensor(0.5)], [1.0], Limits(max_norm=1.0))[:4]
    (None, 0.5, 5.0, 1.0)
    >>> weight.grad /= 0
    >>> judge([weight], [torch.tensor(0.5)], [1.0], Limits())[:4]
    ('non_finite_grad', 0.5, inf, None)
    """
    grads = gradients_of(params)
    several = world_size() > 1 or any_sharded(params)
    norm, loss, wrong, about, code = (_read_over_ranks if several else _read)(params, losses, weights, detail, code)
    told = Verdict(None, loss, requests=code - (code & VERDICT))
    if code & VERDICT:
        return told._replace(reason=SKIP_REASONS[(code & VERDICT) - 1], pre_clip=norm)
    if wrong is not None:
        return told._replace(reason="non_finite_loss", loss=wrong)
    norm = exact_norm_over_ranks(params, norm) if several else exact_norm(grads, norm)
    told = told._replace(pre_clip=norm)
    if not math.isfinite(norm):
        return told._replace(reason="non_finite_grad")
    told = told._replace(detail=about)
    if limits.loss is not None and not loss <= limits.loss:
        return told._replace(reason="loss_jump")
    post = scale_to_norm(grads, norm, limits.max_norm) if limits.max_norm > 0 else norm
    told = told._replace(post_clip=post)
    # max|g| <= norm: only a norm above the threshold needs a second pass.
    if limits.post_clip > 0 and post > limits.post_clip:
        largest = largest_over_ranks(grads) if several else largest_magnitude(grads)
        if not largest <= limits.post_clip * (1 + POST_CLIP_SLACK):
            return told._replace(reason="post_clip_explosion")
    return told


#: The norm, the mean loss, the first loss that is not finite, the detail, the code agreed on.
Seen = tuple[float, float, float | None, GradientDetail | None, int]


def _read(
    params: list[Tensor], losses: Sequence[Tensor | float], weights: Sequence[float], detail: bool, code: int
) -> Seen:
    grads = gradients_of(params)
    norms = norms_of(grads)
    asked = [torch.linalg.vector_norm(gathered(norms)), *(loss for loss in losses if isinstance(loss, Tensor))]
    if detail:
        asked += [magnitudes_of(grads).max(), *norms]
    norm, *read = gathered(asked).tolist()  # the one host read of a step, outside the optimizer's own
    values = iter(read)
    seen = [next(values) if isinstance(loss, Tensor) else loss for loss in losses]
    wrong = next((loss for loss in seen if not math.isfinite(loss)), None)
    about = None
    if detail:
        max_abs = next(values)
        about = GradientDetail(dict(zip(params, values, strict=True)), max_abs, norm / math.sqrt(_elements(params)))
    return norm, sum(w * x for w, x in zip(weights, seen, strict=True)), wrong, about, code


def _read_over_ranks(
    params: list[Tensor], losses: Sequence[Tensor | float], weights: Sequence[float], detail: bool, code: int
) -> Seen:
    """The same of all ranks together, in one all-reduce, so that each rank sees the same numbers and judges alike."""
    grads, ranks = gradients_of(params), world_size()
    device = grads[0].device
    shares = [w * torch.as_tensor(loss, dtype=torch.float64) for w, loss in zip(weights, losses, strict=True)]
    mean = torch.stack(shares).sum().to(device) / ranks
    # A place for each rank's largest magnitude: a sum keeps all of them, and a NaN.
    places = torch.zeros(ranks if detail else 0, dtype=torch.float64, device=device)
    if detail:
        places[rank()] = magnitudes_of(grads).max().double()
    norms, (loss, *largest), code = norms_over_ranks(params, mean.reshape(1), places, code=code)
    norm = math.hypot(*norms)
    about = None
    if detail:
        max_abs = max(largest, key=lambda x: math.inf if math.isnan(x) else x)
        about = GradientDetail(dict(zip(params, norms, strict=True)), max_abs, norm / math.sqrt(_elements(params)))
    return norm, loss, None if math.isfinite(loss) else loss, about, code


def _elements(params: list[Tensor]) -> int:
    return sum(param.numel() for param in params)

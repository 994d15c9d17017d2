"""The guard over gradients: the global norm, the clip, and the question whether anything is not finite.

Source: Pascanu et al. 2013, "On the difficulty of training recurrent neural networks", arXiv:1211.5063.
"""

from __future__ import annotations

import math

import torch

from .gradients import (
    Params,
    exact_norm,
    gathered,
    gradients_of,
    largest_magnitude,
    norms_of,
    params_with_grad,
    scale_to_norm,
)
from .ranks import any_sharded, exact_norm_over_ranks, largest_over_ranks, norms_over_ranks

__all__ = ["DEFAULT_MAX_NORM", "clip_global_l2_norm", "has_non_finite_grad"]

#: The usual threshold for transformers.
DEFAULT_MAX_NORM = 1.0


@torch.no_grad()
def clip_global_l2_norm(params: Params, max_norm: float = DEFAULT_MAX_NORM) -> tuple[float, float]:
    """Clip gradients in place to a global L2 norm of at most ``max_norm``.

    Args:
        params: parameters (a list, a generator, one tensor) or a module. Those without a gradient are passed over.
            With sharded ones (DTensors, as FSDP2 makes them) every rank must call this, and all get the same answer.
        max_norm: the threshold tau, above 0.

    Returns:
        ``(pre, post)``, Python floats: the norm before, and ``min(pre, max_norm)``. Where ``pre`` is not finite
        the gradients are left as they are and both are that value.

    Raises:
        ValueError: ``max_norm`` is not above 0, or a gradient is sparse.

    Source: g * min(1, tau / (norm + 1e-12)), Pascanu et al. 2013, arXiv:1211.5063.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> clip_global_l2_norm([weight], max_norm=1.0)
    (5.0, 1.0)
    >>> weight.grad
    tensor([0.6000, 0.8000])
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm={max_norm} must be above 0; to leave gradients unclipped, do not call this")
    held = params_with_grad(params)
    if not held:
        return 0.0, 0.0
    grads = gradients_of(held)
    if any_sharded(held):
        norm = exact_norm_over_ranks(held, math.hypot(*norms_over_ranks(held)[0]))
    else:
        norm = exact_norm(grads, float(torch.linalg.vector_norm(gathered(norms_of(grads))).item()))
    if not math.isfinite(norm):
        return norm, norm
    return norm, scale_to_norm(grads, norm, max_norm)


@torch.no_grad()
def has_non_finite_grad(params: Params) -> bool:
    """True if any gradient holds a NaN or an Inf. One pass, one host read.

    Args:
        params: parameters (a list, a generator, one tensor) or a module. With sharded ones every rank must call this.

    Raises:
        ValueError: a gradient is sparse.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([1.0, float("nan")])
    >>> has_non_finite_grad([weight])
    True
    """
    held = params_with_grad(params)
    largest = largest_over_ranks if any_sharded(held) else largest_magnitude
    return bool(held) and not math.isfinite(largest(gradients_of(held)))

"""Norms of gradients that several ranks hold together: FSDP2's shards, or whole copies that DDP has averaged.

Every rank must call these at the same time, with the same weights, and gets the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..distributed import max_over_ranks, sums_and_agreement, world_size
from .gradients import gathered, gradients_of, largest_magnitude, norms_of, squares_in_units

__all__ = ["any_sharded", "exact_norm_over_ranks", "largest_over_ranks", "norms_over_ranks", "shares_of"]


def any_sharded(params: Sequence[Tensor]) -> bool:
    """Whether one of the gradients is a DTensor, of which this rank may hold but a part."""
    return any(hasattr(p.grad, "to_local") for p in params)


def shares_of(params: Sequence[Tensor]) -> list[float]:
    """What this rank's part of each gradient counts in a sum over all ranks: 1/n where n ranks hold that part.

    Raises:
        ValueError: a gradient that the ranks have not added up yet.

    >>> shares_of([torch.nn.Parameter(torch.zeros(2))])
    [1.0]
    """
    shares = []
    for param in params:
        grad, holders = param.grad, 1
        for dim, placement in enumerate(getattr(grad, "placements", ())):
            if placement.is_partial():
                raise ValueError(f"a gradient of shape {tuple(param.shape)} is not added up over the ranks; reduce it")
            holders *= grad.device_mesh.size(dim) if placement.is_replicate() else 1  # type: ignore[union-attr]
        shares.append(1 / (holders if hasattr(grad, "placements") else world_size()))
    return shares


def norms_over_ranks(params: Sequence[Tensor], *extra: Tensor, code: int = 0) -> tuple[list[float], list[float], int]:
    """The L2 norm of each weight's gradient, in one all-reduce with ``extra`` and the ranks' agreement.

    Args:
        params: at least one, each with its gradient.
        extra: vectors of float64 to be summed over the ranks too. code: see ``distributed.agree``.

    Returns:
        The norms, in order of ``params``; the sums of ``extra``; the code agreed on.
    """
    norms = gathered(norms_of(gradients_of(params))).double()
    squares = norms.square() * torch.tensor(shares_of(params), dtype=torch.float64, device=norms.device)
    sums, code = sums_and_agreement(torch.cat([squares, *extra]), code)
    return [math.sqrt(square) for square in sums[: len(params)]], sums[len(params) :], code


def largest_over_ranks(grads: Sequence[Tensor]) -> float:
    """max|g| over all gradients of all ranks; NaN or Inf where one is."""
    return max_over_ranks(largest_magnitude(grads), grads[0].device)


def exact_norm_over_ranks(params: Sequence[Tensor], norm: float) -> float:
    """As ``gradients.exact_norm``: without overflow, where the gradients of all ranks are finite after all."""
    if math.isfinite(norm):
        return norm
    grads = gradients_of(params)
    largest = largest_over_ranks(grads)
    if not math.isfinite(largest) or largest == 0.0:
        return norm
    squares = zip(squares_in_units(grads, largest), shares_of(params), strict=True)
    here = torch.tensor([sum(square * share for square, share in squares)], dtype=torch.float64, device=grads[0].device)
    return largest * math.sqrt(sums_and_agreement(here, 0)[0][0])

"""What one process can say of gradients: their norms, their largest magnitude, and a clip, each in one pass.

A gradient with a NaN or an Inf has a norm that is not finite; one whose norm is below the clip threshold needs
no write. So a healthy step costs one read of the gradients, and clipping costs one more pass, when it is due.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce

import torch
from torch import Tensor, nn

__all__ = ["exact_norm", "gradients_of", "params_with_grad", "scale_to_norm"]

#: Added to the norm before the division, as in the formula g * min(1, tau / (norm + eps)).
CLIP_EPS = 1e-12

#: A factor below this is applied in two steps: near FP32's smallest normal number it would lose its digits.
SMALLEST_FACTOR = 1e-30

Params = Tensor | nn.Module | Iterable[Tensor]


def params_with_grad(params: Params) -> list[Tensor]:
    """Those of ``params`` (a module, one tensor, or an iterable) that have a dense gradient with something in it.

    With several ranks that is the same list on each: a weight of which a rank holds no element is in it, too.
    """
    if isinstance(params, nn.Module):
        params = params.parameters()
    elif isinstance(params, Tensor):
        params = [params]
    held = list({id(p): p for p in params if p.grad is not None and p.grad.numel() > 0}.values())
    for param in held:
        if param.grad is not None and param.grad.is_sparse:
            raise ValueError(
                f"sparse gradient of shape {tuple(param.shape)}: the guard reads dense ones; use sparse=False"
            )
    return held


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a DTensor (FSDP2, tensor parallelism), sharing its memory; any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def gradients_of(params: Params) -> list[Tensor]:
    """The dense gradients of ``params``, of DTensors what this rank holds: of a module, one tensor, or an iterable."""
    return [local(p.grad) for p in params_with_grad(params) if p.grad is not None]


def norms_of(tensors: Sequence[Tensor], order: float = 2.0) -> list[Tensor]:
    """The L2 norm, or that of ``order``, of each tensor: 0-dim float32 or wider, a fused pass per device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(i)
    norms: dict[int, Tensor] = {}
    for (_, dtype), members in groups.items():
        # Half precision is summed in FP32: 60000 in four places has a norm that FP16 cannot hold.
        wide = torch.float32 if dtype.itemsize < 4 else None
        norms.update(zip(members, torch._foreach_norm([tensors[i] for i in members], order, wide), strict=True))
    return [norms[i] for i in range(len(tensors))]


def gathered(values: Sequence[Tensor]) -> Tensor:
    """0-dim tensors as one vector, on the first one's device, in a dtype that holds them all: one read for the host."""
    wide = reduce(torch.promote_types, (v.dtype for v in values))
    return torch.stack([v.to(values[0].device, wide) for v in values])


def magnitudes_of(tensors: Sequence[Tensor]) -> Tensor:
    """max|x| of each tensor as one vector, not yet read by the host; NaN where one holds a NaN. One pass."""
    tensors = [t for t in tensors if t.numel() > 0]
    if not tensors:
        return torch.zeros(1)
    if all(t.device.type == "cpu" and not t.is_complex() for t in tensors):
        # A tenth of the time of the fused infinity norm, which is not vectorized on a CPU (tried, torch 2.13).
        spans = [torch.aminmax(t) for t in tensors]
        return torch.maximum(gathered([s.max for s in spans]), -gathered([s.min for s in spans]))
    return gathered(norms_of(tensors, math.inf))


def largest_magnitude(grads: Sequence[Tensor]) -> float:
    """max|g| over all gradients; NaN or Inf where one is. Reads the host once."""
    return float(magnitudes_of(grads).max().item())


def all_finite(tensors: Sequence[Tensor]) -> Tensor:
    """A 0-dim bool tensor, not yet read by the host: whether no float or complex tensor holds a NaN or an Inf."""
    real = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in map(local, tensors)]
    floating = [t for t in real if t.is_floating_point() and t.numel() > 0]
    floating = [t.float() if t.dtype.itemsize == 1 else t for t in floating]  # float8, which few kernels know
    return magnitudes_of(floating).isfinite().all() if floating else torch.tensor(True)


def exact_norm(grads: Sequence[Tensor], norm: float) -> float:
    """``norm`` itself, or the norm computed again without overflow where the gradients are finite after all.

    A finite gradient must never vanish: [1e20] * 100 has a norm, although its FP32 sum of squares has not.
    """
    if math.isfinite(norm):
        return norm
    largest = largest_magnitude(grads)
    if not math.isfinite(largest) or largest == 0.0:
        return norm
    return largest * math.sqrt(sum(squares_in_units(grads, largest)))


def squares_in_units(grads: Sequence[Tensor], unit: float) -> list[float]:
    """The squared L2 norm of each gradient divided by ``unit``.

    One tensor at a time, so that this rare path never holds a second copy of all gradients.
    """
    units = (g.to(torch.promote_types(g.dtype, torch.float32)) / unit for g in grads)
    return [float(torch.linalg.vector_norm(u).item()) ** 2 for u in units]


def scale_to_norm(grads: list[Tensor], norm: float, max_norm: float) -> float:
    """Multiply by max_norm / (norm + eps) where ``norm`` exceeds ``max_norm``; return the norm afterwards."""
    if not norm > max_norm:
        return norm
    factor = max_norm / (norm + CLIP_EPS)
    steps = [factor] if factor >= SMALLEST_FACTOR else [math.sqrt(factor)] * 2
    for step in steps:
        torch._foreach_mul_(grads, step)
    return max_norm

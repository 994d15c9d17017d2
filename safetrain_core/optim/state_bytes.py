"""Bytes of an optimizer's state: counted, and predicted before training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .inner import Factory, is_eligible
from .projection import projected_shape

__all__ = ["optimizer_state_bytes", "predict_state_bytes"]


def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes that an optimizer's state holds in tensors, whole storages, each counted once.

    A view counts as the storage that it keeps alive. Tensors in objects of other libraries are found too.

    >>> weight = torch.nn.Parameter(torch.zeros(100))
    >>> weight.grad = torch.ones(100)
    >>> optimizer = torch.optim.AdamW([weight])
    >>> optimizer.step()
    >>> optimizer_state_bytes(optimizer)  # two moments of 100 float32, and the step count
    804
    """
    return _bytes_in(list(optimizer.state.values()), set())


def _bytes_in(value: Any, seen: set[int]) -> int:
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        known = storage.data_ptr() in seen
        seen.add(storage.data_ptr())
        return 0 if known else storage.nbytes()
    if isinstance(value, dict):
        value = list(value.values())
    elif hasattr(value, "__dict__"):
        value = list(vars(value).values())
    return sum(_bytes_in(v, seen) for v in value) if isinstance(value, list | tuple) else 0


def predict_state_bytes(
    params: Iterable[Any],
    optimizer_factory: Factory,
    *,
    rank: int | None = None,
    max_dim: int | None = None,
    exclude: Iterable[Tensor] = (),
) -> int:
    """What ``optimizer_state_bytes`` will count after the first update, before there is any.

    The plain optimizer takes one step on zeros on the CPU, with one weight of each shape and dtype in each group; the
    bases of GaLore are computed from the shapes.

    Args:
        params: weights, or groups of them; only shapes and dtypes are used. optimizer_factory: of the plain optimizer.
        rank: of GaLore around it, with ``max_dim`` and ``exclude``; None = without GaLore.

    >>> weights = [torch.nn.Parameter(torch.zeros(512, 1024)) for _ in range(8)]
    >>> plain = predict_state_bytes(weights, torch.optim.AdamW)
    >>> plain, predict_state_bytes(weights, torch.optim.AdamW, rank=64) / plain  # moments 0.125, bases 0.03125
    (33554464, 0.15625...)
    """
    given = list(params)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    excluded, bases = {id(weight) for weight in exclude}, 0
    probes: list[dict[str, Any]] = []
    counts: dict[Tensor, int] = {}
    for group in groups:
        of_kind: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = {}
        for weight in group["params"]:
            weight = weight[1] if isinstance(weight, tuple) else weight  # (name, weight), as torch takes them too
            shape: tuple[int, ...] = tuple(weight.shape)
            if rank is not None and id(weight) not in excluded and is_eligible(weight, rank, max_dim):
                bases += min(shape) * rank * weight.element_size()
                shape = projected_shape(shape, rank)
            probe = of_kind.setdefault(
                (shape, weight.dtype), torch.nn.Parameter(torch.zeros(shape, dtype=weight.dtype))
            )
            probe.grad = torch.zeros_like(probe)
            counts[probe] = counts.get(probe, 0) + 1
        probes.append({**group, "params": list(of_kind.values())})
    optimizer = optimizer_factory(probes)
    optimizer.step()
    return bases + sum(count * _bytes_in(optimizer.state.get(probe, {}), set()) for probe, count in counts.items())

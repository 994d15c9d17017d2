"""Counts bytes and FLOPs of whatever runs, by watching each operation. Exact, and the same every time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ..live_bytes import LiveBytes
from .moment import is_recomputing

__all__ = ["Counter"]


def _formulas() -> dict[Any, Any]:
    """torch's FLOP formulas, and those of the CPU's fused attention, which it would count as 0."""
    aten = torch.ops.aten
    return {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(
            q.shape, k.shape, v.shape
        ),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *_, **__: (
            sdpa_backward_flop_count(g.shape, q.shape, k.shape, v.shape)
        ),
        **flop_registry,
    }


class Counter(LiveBytes):
    """While entered: FLOPs by phase, and the bytes on the model's device beyond weights, buffers and inputs.

    Args:
        model: its weights' gradients are told apart from activations once they are accumulated.
        inputs: tensors that were there before, on the same device.

    Attributes:
        now, peak, total_peak, gradients: as of ``LiveBytes``. flops: by ``phase``, and ``recompute``.
        phase: the key under which FLOPs are counted; set by the caller.

    >>> model = nn.Linear(4, 2)
    >>> with Counter(model, []) as counter:
    ...     output = model(torch.ones(8, 4))
    >>> counter.flops, counter.now  # 2 * 8 * 4 * 2 FLOPs; the ones and the output, 4 bytes a value
    ({'forward': 128}, 192)
    """

    def __init__(self, model: nn.Module, inputs: Iterable[Any]) -> None:
        first = next(iter(model.parameters()), None)
        device = first.device if first is not None else torch.device("cpu")
        super().__init__(device, model.parameters(), [*model.parameters(), *model.buffers(), *inputs])
        self.flops: dict[str, int] = {}
        self.phase = "forward"
        self._formulas = _formulas()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = super().__torch_dispatch__(func, types, args, kwargs)
        formula = self._formulas.get(func._overloadpacket)
        if formula is not None:
            phase = "recompute" if is_recomputing() else self.phase
            self.flops[phase] = self.flops.get(phase, 0) + int(formula(*args, **(kwargs or {}), out_val=output))
        return output

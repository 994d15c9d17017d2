"""Counts bytes and FLOPs of whatever runs, by watching each operation. Exact, and the same every time.

Works on a CPU, on a GPU, and in a ``FakeTensorMode``, where sizes are real and memory and time are not spent. What is
seen: every tensor that an operation returns, until it is freed. Not seen: what a kernel uses inside.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

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


class Counter(TorchDispatchMode):
    """While entered: FLOPs by phase, and the bytes on the model's device beyond weights, buffers and inputs.

    Args:
        model: its weights' gradients are told apart from activations once they are accumulated.
        inputs: tensors that were there before, on the same device.

    Attributes:
        now, peak: bytes of activations at present, and at most: what is kept for backward and temporaries.
        total_peak: the same with gradients. gradients: bytes of gradients. flops: by ``phase``, and ``recompute``.
        phase: the key under which FLOPs are counted; set by the caller.

    >>> model = nn.Linear(4, 2)
    >>> with Counter(model, []) as counter:
    ...     output = model(torch.ones(8, 4))
    >>> counter.flops, counter.now  # 2 * 8 * 4 * 2 FLOPs; the ones and the output, 4 bytes a value
    ({'forward': 128}, 192)
    """

    def __init__(self, model: nn.Module, inputs: Iterable[Any]) -> None:
        super().__init__()
        first = next(iter(model.parameters()), None)
        self.device = first.device if first is not None else torch.device("cpu")
        self.now = self.peak = self.total_peak = self.gradients = self._recent = 0
        self.flops: dict[str, int] = {}
        self.phase = "forward"
        self._formulas = _formulas()
        self._known: dict[int, tuple[int, Any]] = {}
        self._gradients: set[int] = set()
        self._weights = [p for p in model.parameters() if p.requires_grad]
        self._handles: list[Any] = []
        self._before = [*model.parameters(), *model.buffers(), *inputs]  # alive, so that no new one takes their place
        for tensor in self._before:
            if isinstance(tensor, Tensor):
                self._known[tensor.untyped_storage()._cdata] = (0, None)

    def __enter__(self) -> Counter:
        self._handles = [p.register_post_accumulate_grad_hook(self._is_gradient) for p in self._weights]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        formula = self._formulas.get(func._overloadpacket)
        if formula is not None:
            phase = "recompute" if is_recomputing() else self.phase
            self.flops[phase] = self.flops.get(phase, 0) + int(formula(*args, **kwargs, out_val=output))
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.device == self.device:
                self._see(leaf)
        self.peak = max(self.peak, self.now)
        self._recent = max(self._recent, self.now)
        self.total_peak = max(self.total_peak, self.now + self.gradients)
        return output

    def peak_since(self) -> int:
        """The peak of ``now`` since this was last asked."""
        peak, self._recent = self._recent, self.now
        return peak

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            size = storage.nbytes()
            self._known[key] = (size, weakref.ref(storage, lambda _: self._gone(key)))
            self.now += size

    def _gone(self, key: int) -> None:
        size, _ = self._known.pop(key)
        if key in self._gradients:
            self._gradients.discard(key)
            self.gradients -= size
        else:
            self.now -= size

    def _is_gradient(self, weight: Tensor) -> None:
        gradient = weight.grad
        if gradient is None:
            return
        key = gradient.untyped_storage()._cdata
        if key in self._known and key not in self._gradients:
            self._gradients.add(key)
            self.now -= self._known[key][0]
            self.gradients += self._known[key][0]

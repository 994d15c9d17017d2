"""Counts the bytes that whatever runs holds, by watching each operation. Exact, and the same every time.

Works on a CPU, on a GPU, and in a ``FakeTensorMode``, where sizes are real and memory and time are not spent. What is
seen: every tensor that an operation returns, until it is freed. Not seen: what a kernel uses inside.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """While entered: the bytes on one device beyond what was there before.

    Args:
        device: where to count. weights: their gradients are told apart from activations once they are accumulated.
        before: tensors that were there before, on the same device; what is no tensor is left out.

    Attributes:
        now, peak: bytes of activations at present, and at most: what is kept for backward and temporaries.
        total_peak: the same with gradients. gradients: bytes of gradients.
        counting: set to False, what is new from then on counts as nothing, whenever it is freed.

    >>> layer = torch.nn.Linear(4, 2)
    >>> with LiveBytes(torch.device("cpu"), layer.parameters(), layer.parameters()) as held:
    ...     output = layer(torch.ones(8, 4))
    >>> held.now  # the ones and the output, 4 bytes a value
    192
    """

    def __init__(self, device: torch.device, weights: Iterable[Tensor], before: Iterable[Any]) -> None:
        super().__init__()
        self.device, self.counting = device, True
        self.now = self.peak = self.total_peak = self.gradients = self._recent = 0
        self._known: dict[int, tuple[int, Any]] = {}
        self._gradients: set[int] = set()
        self._weights = [p for p in weights if p.requires_grad]
        self._handles: list[Any] = []
        self._before = [t for t in before if isinstance(t, Tensor)]  # alive, so that no new one takes their place
        for tensor in self._before:
            self._known[tensor.untyped_storage()._cdata] = (0, None)

    def __enter__(self) -> Self:
        self._handles = [p.register_post_accumulate_grad_hook(self.is_gradient) for p in self._weights]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.device == self.device:
                self.see(leaf)
        self.peak = max(self.peak, self.now)
        self._recent = max(self._recent, self.now)
        self.total_peak = max(self.total_peak, self.now + self.gradients)
        return output

    def peak_since(self) -> int:
        """The peak of ``now`` since this was last asked."""
        peak, self._recent = self._recent, self.now
        return peak

    def see(self, tensor: Tensor) -> None:
        """Count a tensor until it is freed, if it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            size = storage.nbytes() if self.counting else 0
            self._known[key] = (size, weakref.ref(storage, lambda _: self.gone(key)))
            self.now += size

    def gone(self, key: int) -> None:
        """A storage was freed."""
        size, _ = self._known.pop(key)
        if key in self._gradients:
            self._gradients.discard(key)
            self.gradients -= size
        else:
            self.now -= size

    def is_gradient(self, weight: Tensor) -> None:
        """From now on what ``weight.grad`` holds counts as a gradient."""
        gradient = weight.grad
        if gradient is None:
            return
        key = gradient.untyped_storage()._cdata
        if key in self._known and key not in self._gradients:
            self._gradients.add(key)
            self.now -= self._known[key][0]
            self.gradients += self._known[key][0]

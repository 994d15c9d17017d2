"""The last state known to be good: what a skip, a NaN in the weights, and a loss jump go back to."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from ..step.amp import AmpTrainState
from ..step.buffers import BufferKeeper
from ..step.gradients import local

__all__ = ["SafeState"]


class SafeState:
    """One copy of weights, buffers, optimizer, scaler and schedule, with the updates and losses they came from.

    Attempts, retries and the data position are not in it: going back in weights is not going back in data.

    >>> amp = AmpTrainState(torch.nn.Linear(1, 1), amp_dtype=torch.float32)
    >>> safe = SafeState(amp)
    >>> safe.capture()
    >>> _ = amp.step(torch.ones(1, 1), torch.zeros(1, 1))
    >>> safe.restore()
    >>> amp.counters.updates, amp.counters.step
    (0, 1)
    """

    def __init__(self, amp: AmpTrainState) -> None:
        self.amp = amp
        self._weights: list[Tensor] = []
        self._buffers = BufferKeeper(amp.model)
        self._rest: dict[str, Any] = {}

    def _live(self) -> list[Tensor]:
        return [local(weight.detach()) for weight in self.amp.model.parameters()]

    @torch.no_grad()
    def capture(self) -> None:
        """Copy the present state; weights into the memory of the last copy, and never two copies of the optimizer."""
        live = self._live()
        if len(live) == len(self._weights):
            torch._foreach_copy_(self._weights, live)
        else:
            self._weights = [tensor.detach().clone() for tensor in live]
        self._buffers.keep()
        self._rest = {}
        state = self.amp.state_dict()
        del state["counters"], state["skip_count"]
        self._rest = copy.deepcopy(state)
        self._rest["updates"] = self.amp.counters.updates
        self._rest["losses"] = list(self.amp.counters.losses)

    @torch.no_grad()
    def restore(self) -> None:
        """Put the captured state back, and keep it. Without a capture, nothing happens."""
        if not self._rest:
            return
        torch._foreach_copy_(self._live(), self._weights)
        self._buffers.restore()
        counters = self.amp.counters
        counters.updates, counters.losses = self._rest["updates"], list(self._rest["losses"])
        state = {name: copy.deepcopy(self._rest[name]) for name in ("optimizer", "scaler", "scheduler")}
        self.amp.load_state_dict({**state, "counters": counters.to_dict(), "skip_count": self.amp.skip_count})

    def saved_bytes(self) -> int:
        """Bytes of the tensors held."""
        return sum(
            t.numel() * t.element_size() for t in [*self._weights, *self._buffers.copies, *_tensors_in(self._rest)]
        )


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in _tensors_in(v)] if isinstance(value, list | tuple) else []

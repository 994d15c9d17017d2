"""What one window of a run holds in memory beside its state, counted while the user's own step runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..live_bytes import LiveBytes
from .finding import Evidence
from .gradients import tensors_of
from .parts import Parts

__all__ = ["Counted", "MemoryWatch"]

#: A micro-batch counts as held where it has more than this share of what the largest holds.
HELD = 0.5


@dataclass(frozen=True)
class Counted:
    """Bytes of a step. ``together``: activations and gradients at their joint peak; ``left``: outlives the window."""

    weights: int
    gradients: int
    optimizer: int
    batch: int
    activations: int
    together: int
    left: int
    at_once: int | None

    @property
    def state(self) -> int:
        return self.weights + self.gradients + self.optimizer

    @property
    def needed(self) -> int:
        return self.batch + max(self.state, self.weights + self.optimizer + self.together)

    def told(self, limit: float | None = None, **more: int) -> Evidence:
        """As evidence, with ``more`` behind."""
        values: dict[str, float | int | str | None] = {
            "weight bytes": self.weights,
            "gradient bytes": self.gradients,
            "optimizer state bytes": self.optimizer,
            "batch bytes": self.batch,
            "activation bytes": self.activations,
        }
        if self.at_once is not None:
            values["micro-batches at once"] = self.at_once
        if limit is not None:
            values["limit bytes"] = int(limit)
        return Evidence(None, {**values, **more})


class MemoryWatch(LiveBytes):
    """One window: what is held beside state and batch, by the calls of the model that made it."""

    def __init__(self, parts: Parts, micro_batches: list[Any]) -> None:
        self.parts, self.count = parts, len(micro_batches)
        self.weights = parts.weights()
        self.held = [t for module in parts.modules for t in (*module.parameters(), *module.buffers())]
        self.batch = tensors_of(micro_batches)
        self.optimizers = list(parts.optimizers)
        self.steps = self.calls = self.most_gradients = self._inside = 0
        self.made_by: dict[int, int] = {}
        self.by_call: dict[int, int] = {}
        self.at_peak: dict[int, int] = {}
        self.most_by_calls = 0
        state = [tensor for optimizer in self.optimizers for tensor in _state_of(optimizer)]
        super().__init__(self.weights[0].device, self.weights, [*self.held, *self.batch, *state])
        for weight in self.weights:
            if weight.grad is not None:  # left by the window before
                self.see(weight.grad)
                self.is_gradient(weight)

    def __enter__(self) -> MemoryWatch:
        super().__enter__()
        self._handles += [module.register_forward_pre_hook(self._called) for module in self.parts.modules]
        self._handles += [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        return self

    def _called(self, *_: Any) -> None:
        self.calls += 1

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not any(optimizer is known for known in self.optimizers):
            self.optimizers.append(optimizer)
        self.steps += 1
        self._inside += 1
        self.most_gradients = max(self.most_gradients, _bytes((p.grad for p in self.weights), self.device))
        # The optimizer's state and temporaries are no activations; those of a closure's forward pass are.
        self.counting = kwargs.get("closure") is not None or any(map(callable, args[1:]))

    def _after_step(self, *_: Any) -> None:
        self._inside -= 1
        self.counting = self._inside == 0 or self.counting
        self.most_gradients = max(self.most_gradients, _bytes((p.grad for p in self.weights), self.device))

    def see(self, tensor: Tensor) -> None:
        before = self.now
        super().see(tensor)
        # What the backward pass makes belongs to no call; torch's id of the pass is -1 outside of one.
        if self.now > before and torch._C._current_graph_task_id() == -1:
            self.made_by[tensor.untyped_storage()._cdata] = self.calls
            self.by_call[self.calls] = self.by_call.get(self.calls, 0) + self.now - before

    def _release(self, key: int) -> None:
        call = self.made_by.pop(key, None)
        if call is not None:
            self.by_call[call] -= self._known[key][0]

    def gone(self, key: int) -> None:
        self._release(key)
        super().gone(key)

    def is_gradient(self, weight: Tensor) -> None:
        if weight.grad is not None:
            self._release(weight.grad.untyped_storage()._cdata)
        super().is_gradient(weight)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = super().__torch_dispatch__(func, types, args, kwargs)
        if (held := sum(self.by_call.values())) > self.most_by_calls:
            self.most_by_calls, self.at_peak = held, dict(self.by_call)
        return output

    def _at_once(self) -> int | None:
        """Of how many micro-batches activations were held at most; None where the calls do not tell."""
        if not self.calls or self.calls % self.count:
            return None
        each = self.calls // self.count
        by_part: dict[int, int] = {}
        for call, size in self.at_peak.items():
            part = (max(call, 1) - 1) // each
            by_part[part] = by_part.get(part, 0) + size
        return sum(size > HELD * max(by_part.values()) for size in by_part.values())

    def counted(self) -> Counted:
        """What was seen, once the window is over."""
        state = [tensor for optimizer in self.optimizers for tensor in _state_of(optimizer)]
        return Counted(
            weights=_bytes(self.held, self.device),
            gradients=self.most_gradients,
            optimizer=_bytes(state, self.device),
            batch=_bytes(self.batch, self.device),
            activations=self.peak,
            together=self.total_peak,
            left=self.now,
            at_once=self._at_once() if self.count > 1 else None,
        )


def _state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return tensors_of(list(optimizer.state.values()))


def _bytes(tensors: Iterable[Tensor | None], device: torch.device) -> int:
    """Of whole storages on ``device``, each once."""
    storages = [t.untyped_storage() for t in tensors if t is not None and t.device == device]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())

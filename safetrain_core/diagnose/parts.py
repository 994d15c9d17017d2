"""The parts of a run that is not ours, and their state, bit for bit."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Parts", "changed", "parts_of", "same"]

#: How deep and how far a run's attributes are followed to find its parts.
DEPTH, MOST = 3, 5000


@dataclass
class Parts:
    """What was found in a run: outermost modules, optimizers, schedules and enabled GradScalers."""

    modules: list[nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    schedules: list[Any] = field(default_factory=list)
    scalers: list[Any] = field(default_factory=list)

    def weights(self) -> list[Tensor]:
        """Every weight that is trained, once."""
        unique = {id(p): p for module in self.modules for p in module.parameters() if p.requires_grad}
        return list(unique.values())

    def scale(self) -> float | None:
        """The loss scaling factor now; None without a GradScaler."""
        return float(self.scalers[0].get_scale()) if self.scalers else None

    def state(self) -> dict[str, dict[str, Any]]:
        """A copy of all that a refused step must leave as it is, by kind and name: tensors, and plain values."""
        flat: dict[str, dict[str, Any]] = {
            "weights": {}, "buffers": {}, "optimizer": {}, "schedule": {}, "scaler": {}
        }  # fmt: skip
        for module in self.modules:
            flat["weights"] |= {name: p.detach().clone() for name, p in module.named_parameters()}
            flat["buffers"] |= {name: b.detach().clone() for name, b in module.named_buffers()}
        for number, optimizer in enumerate(self.optimizers):
            told = optimizer.state_dict()
            _flatten(told["state"], f"{number}.state", flat["optimizer"])
            for at, group in enumerate(told["param_groups"]):
                rates = {key: value for key, value in group.items() if key in ("lr", "initial_lr")}
                rest = {key: value for key, value in group.items() if key not in rates}
                _flatten(rates, f"{number}.group {at}", flat["schedule"])
                _flatten(rest, f"{number}.group {at}", flat["optimizer"])
        for number, schedule in enumerate(self.schedules):
            _flatten(schedule.state_dict(), f"schedule {number}", flat["schedule"])
        for number, scaler in enumerate(self.scalers):
            _flatten(scaler.state_dict(), f"scaler {number}", flat["scaler"])
        return flat


def _flatten(value: Any, name: str, into: dict[str, Any]) -> None:
    """Tensors and plain values of a nested state, by path; what is neither (a function, say) is left out."""
    if isinstance(value, Tensor):
        into[name] = value.detach().clone()
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            _flatten(entry, f"{name}.{key}", into)
    elif isinstance(value, list | tuple):
        for at, entry in enumerate(value):
            _flatten(entry, f"{name}.{at}", into)
    elif value is None or isinstance(value, bool | int | float | str):
        into[name] = value


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The names whose values differ, bit for bit; NaN equals NaN.

    >>> changed({"a": torch.ones(2), "b": 1}, {"a": torch.ones(2), "b": 2})
    ['b']
    """
    missing = sorted(before.keys() ^ after.keys())
    return missing + [name for name, value in before.items() if name in after and not same(value, after[name])]


def same(a: Any, b: Any) -> bool:
    """Whether two values of a state are equal."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    return bool(a == b or (a != a and b != b))


def parts_of(run: Any) -> Parts:
    """The parts of ``run``: a module, a tuple, list or dict with parts, or an object that has them as attributes.

    >>> model = nn.Linear(1, 1)
    >>> found = parts_of((model, torch.optim.SGD(model.parameters(), lr=0.1)))
    >>> found.modules == [model], len(found.optimizers), found.scalers
    (True, 1, [])
    """
    parts, level = Parts(), [run]
    seen: set[int] = set()
    for _ in range(DEPTH + 1):
        below: list[Any] = []
        for value in level:
            if id(value) in seen or len(seen) > MOST:
                continue
            seen.add(id(value))
            if isinstance(value, nn.Module):
                if next(value.parameters(), None) is not None:
                    parts.modules.append(value)
            elif isinstance(value, torch.optim.Optimizer) and hasattr(value, "state"):
                parts.optimizers.append(value)
            elif isinstance(value, torch.optim.lr_scheduler.LRScheduler):
                parts.schedules.append(value)
            elif isinstance(value, torch.amp.GradScaler):
                parts.scalers += [value] if value.is_enabled() else []
            else:
                below += _inside(value)
        level = below
    inner = {id(sub) for module in parts.modules for sub in module.modules() if sub is not module}
    parts.modules = [module for module in parts.modules if id(module) not in inner]
    return parts


#: What holds no part.
PLAIN = (
    str,
    bytes,
    int,
    float,
    complex,
    Tensor,
    np.ndarray,
    type,
    types.FunctionType,
    types.MethodType,
    types.ModuleType,
)


def _inside(value: Any) -> list[Any]:
    if value is None or isinstance(value, PLAIN):
        return []
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | set):
        return list(value)
    slots = [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
    return slots + (list(vars(value).values()) if hasattr(value, "__dict__") else [])

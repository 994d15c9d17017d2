"""A model's own state under its own names, whatever it is wrapped in."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["genuine", "model_state", "unwrapped"]

#: Wrapping by torch.compile stands in names as this; no module is really called so.
COMPILED = "_orig_mod"


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, out of DistributedDataParallel, DataParallel and torch.compile, however nested.

    >>> inner = nn.Linear(1, 1)
    >>> unwrapped(nn.DataParallel(inner)) is inner
    True
    """
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(getattr(model, COMPILED, None), nn.Module):
            model = getattr(model, COMPILED)
        else:
            return model


def genuine(name: str) -> str:
    """A name of a state_dict without what torch.compile has put into it.

    >>> genuine("blocks.0._orig_mod.weight")
    'blocks.0.weight'
    """
    return ".".join(part for part in name.split(".") if part != COMPILED)


def model_state(model: nn.Module) -> dict[str, Any]:
    """The state_dict of the unwrapped model, under genuine names: also where a submodule was compiled.

    >>> list(model_state(nn.DataParallel(nn.Linear(1, 1, bias=False))))
    ['weight']
    """
    state = unwrapped(model).state_dict()
    if not any(COMPILED in name for name in state):
        return state
    return {genuine(name): value for name, value in state.items()}

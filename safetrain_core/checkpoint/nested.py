"""A nested state taken apart into tensors by name and plain values, and put together again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["joined", "plain_part", "tensors_in"]


def tensors_in(state: Any) -> dict[str, Tensor]:
    """The tensors of a nested state, detached, by the keys that lead to them, joined by ``/``.

    Raises:
        ValueError: two have one name.

    >>> tensors_in({"model": {"w": Tensor([1.0])}, "moments": [Tensor([2.0])], "lr": 0.1})
    {'model/w': tensor([1.]), 'moments/0': tensor([2.])}
    """
    made: dict[str, Tensor] = {}
    for name, tensor in _walk(state, ""):
        if name in made:
            raise ValueError(f"two tensors of the state are called {name}; rename one")
        made[name] = tensor.detach()
    return made


def _walk(state: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(state, Tensor):
        yield path, state
    elif isinstance(state, Mapping | list | tuple):
        for key, value in state.items() if isinstance(state, Mapping) else enumerate(state):
            yield from _walk(value, f"{path}/{key}" if path else str(key))


def plain_part(state: Any) -> Any:
    """The nesting without its tensors; in a list None stands for one.

    >>> plain_part({"model": {"w": Tensor([1.0])}, "moments": [Tensor([2.0]), 3], "lr": 0.1})
    {'model': {}, 'moments': [None, 3], 'lr': 0.1}
    """
    if isinstance(state, Mapping):
        return {key: plain_part(value) for key, value in state.items() if not isinstance(value, Tensor)}
    if type(state) in (list, tuple):  # a named tuple stays, and is refused for what it is
        return type(state)(plain_part(value) for value in state)
    return None if isinstance(state, Tensor) else state


def joined(state: Any, saved: Any) -> Any:
    """The tensors of ``state``, with the plain values of ``saved`` around them.

    >>> joined({"w": Tensor([1.0]), "lr": 0.5}, {"lr": 0.1, "step": 3})
    {'w': tensor([1.]), 'lr': 0.1, 'step': 3}
    """
    if isinstance(state, Tensor):
        return state
    if isinstance(state, Mapping) and isinstance(saved, Mapping):
        tensors = {key: joined(v, saved.get(key)) for key, v in state.items() if key in saved or tensors_in(v)}
        return {**tensors, **{key: value for key, value in saved.items() if key not in tensors}}
    if isinstance(state, list | tuple) and isinstance(saved, list | tuple) and tensors_in(state):
        return type(state)(joined(v, s) for v, s in zip(state, saved, strict=True))
    return saved

"""A nested state as flat names and leaves, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["flattened", "refilled", "split"]


def flattened(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """``(name, leaf)`` of a nested state, names joined by ``/``; a list without tensors is a leaf.

    >>> dict(flattened({"a": {"lr": 0.1, 0: [1, 2]}}))
    {'a/lr': 0.1, 'a/0': [1, 2]}
    """
    if isinstance(state, Mapping) and (state or not path):
        for key, value in state.items():
            yield from flattened(value, f"{path}/{key}" if path else str(key))
    elif isinstance(state, list | tuple) and any(isinstance(leaf, Tensor) for _, leaf in _leaves(state)):
        for i, value in enumerate(state):
            yield from flattened(value, f"{path}/{i}")
    else:
        yield path, state


def _leaves(values: list[Any] | tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    for value in values:
        yield from flattened(value, "-")
        if isinstance(value, list | tuple):
            yield from _leaves(value)


def refilled(state: Any, leaves: Mapping[str, Any], path: str = "") -> Any:
    """The nesting of ``state`` with the leaves that ``flattened`` has named.

    >>> refilled({"a": {"lr": 0.1}}, {"a/lr": 0.5})
    {'a': {'lr': 0.5}}
    """
    if path in leaves:
        return leaves[path]
    if isinstance(state, Mapping):
        return {key: refilled(value, leaves, f"{path}/{key}" if path else str(key)) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(refilled(value, leaves, f"{path}/{i}") for i, value in enumerate(state))
    return state


def split(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a nested state by flat name, detached, and its other leaves.

    Raises:
        ValueError: two leaves have one name.

    >>> split({"w": Tensor([1.0]), "lr": 0.1})
    ({'w': tensor([1.])}, {'lr': 0.1})
    """
    tensors: dict[str, Tensor] = {}
    rest: dict[str, Any] = {}
    for name, leaf in flattened(state):
        if name in tensors or name in rest:
            raise ValueError(f"two entries of the state are called {name}; rename one")
        if isinstance(leaf, Tensor):
            tensors[name] = leaf.detach()
        else:
            rest[name] = leaf
    return tensors, rest

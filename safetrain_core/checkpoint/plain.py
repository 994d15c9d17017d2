"""What ``torch.load(weights_only=True)`` reads back, made of what a program holds; or a refusal that says where."""

from __future__ import annotations

import pathlib
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..errors import type_of

__all__ = ["plain"]

#: What ``weights_only=True`` reads back by itself.
READABLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size, torch.device)


def plain(
    value: Any, where: str = "payload", *, tensor: Callable[[torch.Tensor], torch.Tensor] = lambda same: same
) -> Any:
    """``value`` as what ``torch.load(weights_only=True)`` reads back, its containers rebuilt, its tensors shared.

    Args:
        where: what it is called in an error. tensor: what becomes of each tensor in it.

    Raises:
        ValueError: something in it cannot be; the message says where and what it is.

    >>> plain({"lr": np.float64(0.5), "path": pathlib.PurePosixPath("a/b"), "shape": (1, 2)})
    {'lr': 0.5, 'path': 'a/b', 'shape': (1, 2)}
    >>> plain({"args": object()})
    Traceback (most recent call last):
    ...
    ValueError: payload['args'] is an object, which weights_only=True cannot read back; save plain types and tensors
    """
    kind = type(value)
    if kind is str:
        return sys.intern(value)  # a pickle tells one object from two equal ones: the same payload, the same bytes
    if kind in READABLE:
        return value
    if kind in (torch.Tensor, torch.nn.Parameter):
        return tensor(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, pathlib.PurePath):
        return str(value)
    if isinstance(value, dict):
        made = {plain(k, f"{where} key {k!r}"): plain(v, f"{where}[{k!r}]", tensor=tensor) for k, v in value.items()}
        if hasattr(value, "_metadata"):  # a module's state_dict carries the versions of its modules
            made = OrderedDict(made)
            made._metadata = plain(dict(value._metadata), where)  # type: ignore[attr-defined]
        return made
    if kind in (list, tuple):
        return kind(plain(v, f"{where}[{i}]", tensor=tensor) for i, v in enumerate(value))
    raise ValueError(
        f"{where} is {type_of(value)}, which weights_only=True cannot read back; save plain types and tensors"
    )

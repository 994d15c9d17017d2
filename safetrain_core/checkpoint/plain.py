"""What ``torch.load(weights_only=True)`` reads back, made of what a program holds; or a refusal that says where."""

from __future__ import annotations

import codecs
import pathlib
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..errors import type_of

__all__ = ["ordinary", "plain"]

#: What ``weights_only=True`` reads back by itself.
READABLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size, torch.device)

#: Bits of the largest integer that it reads back: a pickle tells the length of a longer one in another way.
LARGEST_INTEGER = 8 * 255 - 1


class _NoBytes(bytes):
    """``b""``, pickled as other bytes are: torch's reader knows nothing of the short way that pickle has for it."""

    def __reduce__(self) -> Any:
        return codecs.encode, ("", "latin1")


NO_BYTES = _NoBytes()


def plain(
    value: Any, where: str = "payload", *, tensor: Callable[[torch.Tensor], torch.Tensor] = lambda same: same
) -> Any:
    """``value`` as what ``torch.load(weights_only=True)`` reads back, its containers rebuilt, its tensors shared.

    Args:
        where: what it is called in an error. tensor: what becomes of each tensor in it.

    Raises:
        ValueError: something in it cannot be, or two keys of a dict become one; the message says where and what it is.

    >>> plain({"lr": np.float64(0.5), "path": pathlib.PurePosixPath("a/b"), "shape": (1, 2)})
    {'lr': 0.5, 'path': 'a/b', 'shape': (1, 2)}
    >>> plain({"args": object()})
    Traceback (most recent call last):
    ...
    ValueError: payload['args'] is an object, which weights_only=True cannot read back; save plain types and tensors
    """
    try:
        return _plain(value, where, tensor)
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply to be saved, or holds itself; flatten it") from None


def _plain(value: Any, where: str, tensor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    kind = type(value)
    if kind is str:
        return sys.intern(value)  # a pickle tells one object from two equal ones: the same payload, the same bytes
    if kind is int and value.bit_length() > LARGEST_INTEGER:
        raise ValueError(
            f"{where} is an integer of {value.bit_length()} bits, weights_only=True reads back {LARGEST_INTEGER}; save "
            "it as text"
        )
    if kind in (bytes, _NoBytes):
        return value or NO_BYTES
    if kind in READABLE:
        return value
    if kind in (torch.Tensor, torch.nn.Parameter):
        for name, attribute in vars(value).items():  # they are pickled with it
            _plain(attribute, f"{where}.{name}", tensor)
        return tensor(value)
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):  # as a long double stays one
        return _plain(value.item(), where, tensor)
    if isinstance(value, pathlib.PurePath):
        return str(value)
    if isinstance(value, dict):
        made = {_plain(k, f"{where} key {k!r}", tensor): _plain(v, f"{where}[{k!r}]", tensor) for k, v in value.items()}
        if len(made) < len(value):
            raise ValueError(
                f"{where} has keys that are the same once saved, a path and its text for example; rename one"
            )
        if hasattr(value, "_metadata"):  # a module's state_dict carries the versions of its modules
            made = OrderedDict(made)
            made._metadata = _plain(dict(value._metadata), where, tensor)  # type: ignore[attr-defined]
        return made
    if kind in (list, tuple):
        return kind(_plain(v, f"{where}[{i}]", tensor) for i, v in enumerate(value))
    raise ValueError(
        f"{where} is {type_of(value)}, which weights_only=True cannot read back; save plain types and tensors"
    )


def ordinary(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but numbers in memory that its shape and strides lead to.

    Others are sparse, nested, quantized, without memory, or read their memory conjugated or negated.

    >>> complex_ones = torch.ones(2, dtype=torch.complex64)
    >>> ordinary(complex_ones), ordinary(complex_ones.conj()), ordinary(torch.eye(2).to_sparse())
    (True, False, False)
    """
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return not (tensor.is_meta or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())

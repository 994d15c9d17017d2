"""The moment of a layer's forward pass: what its output depends on beside its arguments, kept for the second run.

torch.utils.checkpoint keeps torch's random state and autocast. Here stand the four things that it leaves to chance:
buffers, which a second run would move twice; the random states of Python and NumPy; the attention kernels allowed by
``sdpa_kernel``, which the backward pass runs outside of; and a model put into eval mode between forward and backward.
"""

from __future__ import annotations

import random
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

__all__ = ["Moment", "is_recomputing"]

KERNELS = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")

#: Depth of second runs going on. Not thread-local: backward passes on a GPU run in a thread of their own.
_running = 0


def is_recomputing() -> bool:
    """Whether a layer is being run for the second time just now, inside a backward pass.

    >>> is_recomputing()
    False
    """
    return _running > 0


def _kernels() -> list[bool]:
    return [getattr(torch.backends.cuda, f"{kernel}_enabled")() for kernel in KERNELS]


def _allow(kernels: list[bool]) -> None:
    for kernel, allowed in zip(KERNELS, kernels, strict=True):
        getattr(torch.backends.cuda, f"enable_{kernel}")(allowed)


def host_random() -> tuple[Any, Any]:
    """The random states of Python and NumPy."""
    return random.getstate(), np.random.get_state()


def put_host_random(states: tuple[Any, Any]) -> None:
    """Put back what ``host_random`` gave."""
    random.setstate(states[0])
    np.random.set_state(states[1])


def _alike(a: tuple[Any, Any], b: tuple[Any, Any]) -> bool:
    return a[0] == b[0] and a[1][2:] == b[1][2:] and bool(np.array_equal(a[1][1], b[1][1]))


class Moment:
    """Take one before a layer's forward, ``settle()`` it after, and enter it, any number of times, around a second run.

    Inside, the layer's buffers are clones with the values of the first run; outside, they are what the first run left.

    >>> layer = nn.BatchNorm1d(2)
    >>> moment = Moment(layer)
    >>> _ = layer(torch.ones(4, 2))
    >>> moment.settle()
    >>> with moment:
    ...     _ = layer(torch.ones(4, 2))
    >>> layer.num_batches_tracked
    tensor(1)
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.kernels = module, _kernels()
        # Owner, name, the buffer, its version, its value. The value is what a second run starts from; a norm's output
        # in training mode does not depend on it, and its kernels do not move the version.
        self.buffers: list[tuple[nn.Module, str, Tensor, int, Tensor | None]] = [
            (owner, name, buffer, buffer._version, None if isinstance(owner, _NormBase) else buffer.detach().clone())
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self.random: tuple[Any, Any] | None = host_random()
        self._outside: list[tuple[list[bool], list[tuple[nn.Module, str, Any]], tuple[Any, Any] | None]] = []

    def settle(self) -> None:
        """Forget the buffers and the random states that the first run did not move."""
        if self.random is not None and _alike(self.random, host_random()):
            self.random = None
        self.buffers = [
            kept
            for kept in self.buffers
            if kept[4] is None or kept[2]._version != kept[3] or kept[0]._buffers.get(kept[1]) is not kept[2]
        ]

    def __enter__(self) -> None:
        global _running
        if not self.module.training:
            raise RuntimeError(
                f"a recomputed {type(self.module).__name__} was put into eval mode between its forward and its "
                "backward; its second run would differ: call model.eval() after backward()"
            )
        buffers = [(owner, name, owner._buffers.get(name)) for owner, name, *_ in self.buffers]
        self._outside.append((_kernels(), buffers, None if self.random is None else host_random()))
        _allow(self.kernels)
        if self.random is not None:
            put_host_random(self.random)
        for owner, name, buffer, _, value in self.buffers:
            owner._buffers[name] = (buffer if value is None else value).detach().clone()
        _running += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _running
        _running -= 1
        kernels, buffers, drawn = self._outside.pop()
        if drawn is not None:
            put_host_random(drawn)
        for owner, name, buffer in buffers:
            owner._buffers[name] = buffer
        _allow(kernels)

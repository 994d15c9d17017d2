"""The moment of a layer's forward pass: what its output depends on beside its arguments, kept for the second run.

torch.utils.checkpoint keeps the random state and autocast. Here stand the three things that it leaves to chance:
buffers, which a second run would move twice; the attention kernels allowed by ``sdpa_kernel``, which the backward pass
runs outside of; and a model put into eval mode between forward and backward.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

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
        self._outside: list[tuple[list[bool], list[tuple[nn.Module, str, Any]]]] = []

    def settle(self) -> None:
        """Forget the buffers that the first run did not move."""
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
        self._outside.append(
            (_kernels(), [(owner, name, owner._buffers.get(name)) for owner, name, *_ in self.buffers])
        )
        _allow(self.kernels)
        for owner, name, buffer, _, value in self.buffers:
            owner._buffers[name] = (buffer if value is None else value).detach().clone()
        _running += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _running
        _running -= 1
        kernels, buffers = self._outside.pop()
        for owner, name, buffer in buffers:
            owner._buffers[name] = buffer
        _allow(kernels)

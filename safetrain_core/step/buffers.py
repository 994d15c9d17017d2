"""A copy of a model's buffers, so that a refused step leaves no trace in BatchNorm's running statistics."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["BufferKeeper"]


class BufferKeeper:
    """Keeps one copy of every buffer of ``model`` as it stands now, and puts it back when asked.

    A model without buffers costs nothing. All buffers are copied, the constant ones too: BatchNorm's kernels do
    not move a tensor's version counter, so what changed cannot be told without reading it (tried, torch 2.13).

    >>> model = nn.BatchNorm1d(2)
    >>> keeper = BufferKeeper(model)
    >>> keeper.keep()
    >>> _ = model(torch.ones(4, 2))
    >>> keeper.restore()
    >>> model.running_mean, model.num_batches_tracked
    (tensor([0., 0.]), tensor(0))
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._owners: list[tuple[nn.Module, str]] = []
        self._live: list[Tensor] = []
        self._copies: list[Tensor] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the buffers' present values, into the same memory as last time where it fits."""
        named = [(m, name, b) for m in self.model.modules() for name, b in m._buffers.items() if b is not None]
        live = [b for _, _, b in named]
        fits = len(live) == len(self._copies) and all(
            b.shape == c.shape and b.dtype == c.dtype and b.device == c.device
            for b, c in zip(live, self._copies, strict=True)
        )
        if not fits:
            self._copies = [b.detach().clone() for b in live]
        elif live:
            torch._foreach_copy_(self._copies, live)
        self._owners = [(m, name) for m, name, _ in named]
        self._live = live

    @torch.no_grad()
    def restore(self, where: Tensor | None = None) -> None:
        """Put back the kept values, and the kept tensor itself where the model has replaced it by another.

        Args:
            where: a 0-dim bool tensor on the device: put back only if it is True, decided there, unread by the host.
        """
        for (module, name), buffer, copy in zip(self._owners, self._live, self._copies, strict=True):
            now = module._buffers.get(name)
            if where is None or now is None or now.shape != copy.shape:
                buffer.copy_(copy)
            else:
                buffer.copy_(torch.where(where, copy, now))
            if now is not buffer:
                module._buffers[name] = buffer

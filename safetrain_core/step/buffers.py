"""A copy of a model's buffers, so that a refused step leaves no trace in BatchNorm's running statistics."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["BufferKeeper"]


class BufferKeeper:
    """Keeps one copy of every buffer of ``model`` as it stands now, and puts it back when asked.

    A model without buffers costs nothing. All buffers are copied, the constant ones too: BatchNorm's kernels do
    not move a tensor's version counter, so what changed cannot be told without reading it (tried, torch 2.13).
    Buffers that the forward has put in another's place, made, or filled where there was None, are put back as well.

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
        self._modules: list[tuple[nn.Module, tuple[str, ...]]] = []  # each, and the names of its buffers, None or not
        self._owners: list[tuple[nn.Module, str]] = []
        self._live: list[Tensor] = []
        self.copies: list[Tensor] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the buffers' present values, into the same memory as last time where it fits."""
        self._modules = [(m, tuple(m._buffers)) for m in self.model.modules()]
        named = [(m, name, b) for m, _ in self._modules for name, b in m._buffers.items() if b is not None]
        live = [b for _, _, b in named]
        if len(live) != len(self.copies) or not all(map(_fits, live, self.copies)):
            self.copies = [b.detach().clone() for b in live]
        elif live:
            torch._foreach_copy_(self.copies, live)
        self._owners = [(m, name) for m, name, _ in named]
        self._live = live

    @torch.no_grad()
    def restore(self, where: Tensor | None = None) -> None:
        """Put back the kept values, and the kept tensor itself where the model has replaced it by another.

        Args:
            where: a 0-dim bool tensor on the device: put back only if it is True, decided there, unread by the host;
                but for buffers that are new, or of another shape or dtype now, which no kernel can decide on.
        """
        made = self._made()
        now = [module._buffers.get(name) for module, name in self._owners]
        if where is not None and (made or not all(map(_fits, now, self.copies))):
            if not where.item():
                return
            where = None
        for (module, name), buffer, copy, current in zip(self._owners, self._live, self.copies, now, strict=True):
            buffer.copy_(copy if where is None or current is None else torch.where(where, copy, current))
            if current is not buffer:
                module._buffers[name] = buffer
        for module, name, was_there in made:
            if was_there:
                module._buffers[name] = None
            else:
                delattr(module, name)

    def _made(self) -> list[tuple[nn.Module, str, bool]]:
        """Buffers that are there since ``keep``, and whether there was a None in their place."""
        kept = {(id(module), name) for module, name in self._owners}
        return [
            (module, name, name in names)
            for module, names in self._modules
            for name, buffer in module._buffers.items()
            if buffer is not None and (id(module), name) not in kept
        ]


def _fits(buffer: Tensor | None, copy: Tensor) -> bool:
    return (
        buffer is not None
        and buffer.shape == copy.shape
        and buffer.dtype == copy.dtype
        and buffer.device == copy.device
    )

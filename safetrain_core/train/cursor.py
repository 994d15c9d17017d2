"""The data position of a run: which epoch, and how many batches of it are behind."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
from torch import Tensor

from ..records import TrainState
from ..step.accumulate import windows

__all__ = ["Cursor", "batch_to", "samples_in"]


class Cursor:
    """Yields windows of ``accum_steps`` batches on ``device``, and keeps ``state.epoch`` and ``state.batch_in_epoch``.

    A window never spans two epochs. A sampler with ``set_epoch`` is told each epoch, so that ranks shuffle alike.

    >>> state = TrainState()
    >>> cursor = Cursor([(1, 2), (3, 4), (5, 6)], 2, torch.device("cpu"), state)
    >>> next(iter(cursor.windows(epochs=1))), state.batch_in_epoch
    ([(1, 2), (3, 4)], 2)
    """

    def __init__(self, loader: Iterable[Any], accum_steps: int, device: torch.device, state: TrainState) -> None:
        self.loader, self.accum_steps, self.device, self.state = loader, accum_steps, device, state

    def windows(self, epochs: int | None = None) -> Iterator[list[tuple[Any, Any]]]:
        """The windows of ``epochs`` epochs, or without end.

        Raises:
            ValueError: an epoch without a batch, or a batch that is not a pair.
        """
        for epoch in range(epochs) if epochs is not None else itertools.count():
            self.state.epoch, self.state.batch_in_epoch = epoch, 0
            set_epoch = getattr(getattr(self.loader, "sampler", None), "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
            for window in windows(self.loader, self.accum_steps):
                self.state.batch_in_epoch += len(window)
                yield [batch_to(self.device, batch) for batch in window]
            if self.state.batch_in_epoch == 0:
                raise ValueError(f"train_loader is empty (0 batches) in epoch {epoch}; give it at least one batch")


def batch_to(device: torch.device, batch: Any) -> tuple[Any, Any]:
    """The pair ``(inputs, targets)`` with its tensors on ``device``; ``ValueError`` when it is no pair.

    >>> batch_to(torch.device("cpu"), {"x": 1})
    Traceback (most recent call last):
    ...
    ValueError: a batch is a dict of 1, expected a pair (inputs, targets)
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        size = f" of {len(batch)}" if isinstance(batch, Sized) else ""
        raise ValueError(f"a batch is a {type(batch).__name__}{size}, expected a pair (inputs, targets)")
    inputs, targets = (x.to(device, non_blocking=True) if isinstance(x, Tensor) else x for x in batch)
    return inputs, targets


def samples_in(targets: Any) -> int:
    """Samples in a batch, by its targets' first dimension.

    >>> samples_in(torch.zeros(3, 5)), samples_in(torch.tensor(1.0))
    (3, 1)
    """
    if isinstance(targets, Tensor):
        return targets.shape[0] if targets.dim() else 1
    return len(targets) if isinstance(targets, Sized) else 1

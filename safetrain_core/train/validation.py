"""The validation loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..checkpoint.rng import capture_rng_state, restore_rng_state
from ..distributed import sums_and_agreement
from ..step.amp import AmpTrainState
from .cursor import batch_to, samples_in

__all__ = ["validate"]


@torch.no_grad()
def validate(
    amp: AmpTrainState, loader: Iterable[Any], *, should_stop: Callable[[], bool] = lambda: False
) -> float | None:
    """Mean loss over ``loader`` in eval mode, batches weighted by their size; modes are put back as they were.

    Args:
        should_stop: asked before each batch; where it says so the answer is None, so that a signal is obeyed promptly.

    Each of several ranks gives its share of the data, in as many batches; the answer is that of all, on every rank.

    Raises:
        ValueError: no batch, or one that is not a pair.

    >>> amp = AmpTrainState(torch.nn.Linear(1, 1))
    >>> _ = torch.nn.init.zeros_(amp.model.weight), torch.nn.init.zeros_(amp.model.bias)
    >>> validate(amp, [(torch.ones(3, 1), torch.ones(3, 1)), (torch.ones(1, 1), torch.zeros(1, 1))])
    0.75
    """
    before = capture_rng_state()
    modes = [(module, module.training) for module in amp.model.modules()]
    amp.model.eval()
    total, samples = torch.zeros((), device=amp.device), 0
    try:
        for batch in loader:
            if should_stop():
                return None
            inputs, targets = batch_to(amp.device, batch)
            size = samples_in(inputs, targets)
            total += amp.passes.forward_loss(inputs, targets).float() * size
            samples += size
    finally:
        for module, mode in modes:
            module.training = mode
        # A loader draws a seed for its workers: with or without this validation, training draws the same numbers.
        restore_rng_state(before)
    if samples == 0:
        raise ValueError("val_loader is empty (0 batches); give it at least one batch")
    counted = torch.tensor([samples], dtype=torch.float64, device=amp.device)
    (loss, count), _ = sums_and_agreement(torch.cat([total.reshape(1).double(), counted]), 0)
    return loss / count

"""Loss scaling: torch's GradScaler, and what it is told at the end of each window, good or refused.

Source: Micikevicius et al. 2018, "Mixed Precision Training", arXiv:1710.03740, section 3.2;
https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch

__all__ = ["MIN_SCALE", "LossScaling"]

log = logging.getLogger(__name__)

#: torch's GradScaler has no floor; ours is 1, where float16 gradients are no longer scaled up at all.
MIN_SCALE = 1.0


class LossScaling:
    """A GradScaler that is always left ready for the next window, and whose factor is known without asking the device.

    Args:
        device: where losses are.
        enabled: False = no scaling, and every method does what a disabled GradScaler does.
        init_scale: the first factor, at least 1. growth_interval: good steps in a row before it doubles.

    Raises:
        ValueError: ``init_scale`` is not finite or below 1.

    >>> scaling = LossScaling(torch.device("cpu"), enabled=True, init_scale=1024.0, growth_interval=2000)
    >>> scaling.give_up(overflowed=False)
    >>> scaling.factor
    1024.0
    """

    def __init__(self, device: torch.device, *, enabled: bool, init_scale: float, growth_interval: int) -> None:
        if not MIN_SCALE <= init_scale < math.inf:
            raise ValueError(f"init_scale={init_scale} must be finite and at least {MIN_SCALE}")
        self.device = device
        self.scaler = torch.amp.GradScaler(
            device.type, init_scale=init_scale, growth_interval=growth_interval, enabled=enabled
        )
        self._factor: float | None = None
        self._until_growth = 0

    @property
    def factor(self) -> float | None:
        """The factor that the next window will use; None without scaling.

        It is read from the device only after it can have changed, since each read stalls an accelerator.
        """
        if self._factor is None and self.scaler.is_enabled():
            state = self.scaler.state_dict()
            self._factor = float(state["scale"])
            self._until_growth = state["growth_interval"] - state["_growth_tracker"]
        return self._factor

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """End a good window: step the optimizer; the factor doubles when its stretch of good steps is full."""
        factor = self.factor
        self.scaler.step(optimizer)
        self.scaler.update()
        if factor is not None:
            self._until_growth -= 1
            if self._until_growth <= 0:
                self._factor = None

    def give_up(self, *, overflowed: bool) -> None:
        """End a refused window. ``overflowed``: its gradients were not finite, so the factor halves; else it stays."""
        factor = self.factor
        if factor is None:
            return
        # Makes sure that there is something to update: torch asserts where nothing was ever scaled.
        self.scaler.scale(torch.zeros((), device=self.device))
        # update(factor) ends the window without halving, and without counting it as good.
        self.scaler.update(factor)
        if overflowed:
            # Not torch's update(): that has no floor, and keeps the factor where the overflow was another rank's.
            self.put(max(MIN_SCALE, factor * self.scaler.get_backoff_factor()), good_in_a_row=0)

    def put(self, factor: float, *, good_in_a_row: int) -> None:
        """Set the factor and the growth counter; only for an enabled scaler."""
        state = {**self.scaler.state_dict(), "scale": factor, "_growth_tracker": good_in_a_row}
        self.scaler.load_state_dict(state)
        self._factor, self._until_growth = factor, state["growth_interval"] - good_in_a_row

    @property
    def good_in_a_row(self) -> int:
        """Good windows since the factor last changed."""
        return 0 if self.factor is None else self.scaler.get_growth_interval() - self._until_growth

    def forget(self) -> None:
        """Read the factor anew: the GradScaler was loaded from outside."""
        self._factor = None

    def state_dict(self) -> dict[str, Any]:
        """The GradScaler's; empty when disabled."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over factor and growth counter. Enabled on one side only: nothing to take over, which is logged."""
        if self.scaler.is_enabled() and state:
            self.scaler.load_state_dict(state)
        elif self.scaler.is_enabled():
            log.warning("the saved GradScaler was disabled; this one keeps its factor %s", self.factor)
        elif state:
            log.warning("GradScaler is disabled here; the saved factor %s is dropped", state["scale"])
        self._factor = None

"""Moving a run to another device between two windows, and back: weights, optimizer state, autocast, scaler, batches."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from ..step.amp import AmpTrainState
from ..step.scaling import LossScaling
from ..step.window import WindowPass
from .cursor import Cursor

__all__ = ["DeviceSwitch", "precision_on"]

log = logging.getLogger(__name__)


def precision_on(device: torch.device, home: torch.device, home_dtype: torch.dtype) -> torch.dtype:
    """Where autocast goes on ``device``, for a run that began on ``home`` with ``home_dtype``.

    On the CPU 16 bits are bfloat16, which needs no scaler: float16 is an accelerator's format. float32 stays.

    >>> cpu, cuda = torch.device("cpu"), torch.device("cuda:0")
    >>> precision_on(cpu, cuda, torch.float16), precision_on(cuda, cuda, torch.float16)
    (torch.bfloat16, torch.float16)
    """
    if home_dtype is torch.float32 or device.type == home.type or device.type != "cpu":
        return home_dtype
    return torch.bfloat16


class DeviceSwitch:
    """Moves one run, between two windows. Nothing is recomputed or rounded: after a round trip each bit is as it was.

    Weights keep their identity, so that the optimizer, hooks and whoever holds them still hold them. The scaler's
    factor waits while the run is where it needs none; a checkpoint saved there holds no scaler. A loss function that is
    a module moves along; one that closes over a tensor on the old device does not, and its next step says so.

    >>> from ..records import TrainState
    >>> amp = AmpTrainState(nn.Linear(1, 1))
    >>> switch = DeviceSwitch(amp, Cursor([], 1, amp.device, TrainState()))
    >>> switch.move(torch.device("cpu")), amp.device_type
    (True, 'cpu')
    """

    def __init__(self, amp: AmpTrainState, cursor: Cursor) -> None:
        self.amp, self.cursor = amp, cursor
        self.home, self._home_dtype = amp.device, amp.amp_dtype
        self._scales = amp.scaler.is_enabled()
        self._scaler_state = amp.scaling.state_dict()

    def move(self, device: torch.device) -> bool:
        """Move to ``device``; False where it does not fit there, and then all is where it was."""
        here = self.amp.device
        try:
            self._move(device)
        except RuntimeError as error:  # out of memory
            log.warning("the run cannot move to %s (%s); it stays", device, str(error).splitlines()[0])
            self._move(here)
            return False
        return True

    def _move(self, device: torch.device) -> None:
        amp = self.amp
        amp.model.to(device)
        if isinstance(amp.passes.loss_fn, nn.Module):
            amp.passes.loss_fn.to(device)
        optimizer_state_to(amp.optimizer, device)
        self.cursor.device = device
        self.follow(device, precision_on(device, self.home, self._home_dtype))

    def follow(self, device: torch.device, dtype: torch.dtype) -> None:
        """Let autocast and scaler be those of ``device`` and ``dtype``."""
        amp = self.amp
        self._scaler_state = state = amp.scaling.state_dict() or self._scaler_state
        amp.device, amp.device_type, amp.amp_dtype = device, device.type, dtype
        amp.scaling = LossScaling(
            device,
            enabled=self._scales and dtype is torch.float16,
            init_scale=state.get("scale", 1.0),
            growth_interval=state.get("growth_interval", 1),
        )
        if amp.scaler.is_enabled():
            amp.scaling.load_state_dict(state)
        amp.passes = WindowPass(amp.model, amp.passes.loss_fn, device.type, dtype, amp.scaler, amp.passes.weighting)


@torch.no_grad()
def optimizer_state_to(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the state of each weight, as it is: ``load_state_dict`` would cast it to the weight's dtype.

    torch's step counters stay on the CPU unless the optimizer is fused or capturable.
    """
    for group in optimizer.param_groups:
        moves_step = bool(group.get("fused") or group.get("capturable"))
        for weight in group["params"]:
            state = optimizer.state.get(weight, {})
            for key, value in state.items():
                if key != "step" or moves_step:
                    state[key] = _to(value, device)


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _to(part, device) for key, part in value.items()}
    return type(value)(_to(part, device) for part in value) if isinstance(value, list | tuple) else value

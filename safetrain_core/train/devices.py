"""Which of several devices a run trains on: the first, in order of preference, that is cool enough."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..thermal.guard import ThermalGuard
from ..thermal.hold import Wish
from .switch import DeviceSwitch

__all__ = ["DeviceChoice", "usable_device"]

log = logging.getLogger(__name__)


def usable_device(name: str) -> torch.device:
    """The device of this name, tried.

    Raises:
        ValueError: it is not there, or holds no values, as ``meta``.

    >>> usable_device("cpu")
    device(type='cpu')
    >>> usable_device("banana")
    Traceback (most recent call last):
    ...
    ValueError: banana is not available (Expected one of cpu, ...)
    """
    try:
        tried = torch.zeros(1, device=name)
        tried.tolist()
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch built without that kind asserts
        why = str(error).splitlines()[0][:90]
        raise ValueError(f"{name} is not available ({why})") from error
    return tried.device


class DeviceChoice:
    """Keeps a run on the first of ``devices`` that is fit.

    The run's own first device is fit unless its guard is paused, so it returns there below resume. Another is fit to
    be moved to below resume, and to stay on until it is paused, too. A device without a sensor, as the CPU, is fit.

    Args:
        devices: names, the run's own first. guards: those of the devices that have a sensor; the first must have one.
    """

    def __init__(self, devices: Sequence[str], guards: Mapping[str, ThermalGuard], switch: DeviceSwitch) -> None:
        self.devices, self.guards, self.switch = tuple(devices), guards, switch
        self.home = self.current = self.devices[0]
        self._full: set[str] = set()

    def wish(self) -> Wish:
        """GO where some device is fit; ABORT where the one in use, or the run's own, is critical or cannot be seen."""
        if any(self.guards[n].wish() == Wish.ABORT for n in (self.home, self.current) if n in self.guards):
            return Wish.ABORT
        return Wish.PAUSE if self.best() is None else Wish.GO

    def best(self) -> str | None:
        """The first that is fit."""
        return next((name for name in self.devices if name not in self._full and self._fit(name)), None)

    def _fit(self, name: str) -> bool:
        guard = self.guards.get(name)
        if guard is None:
            return True
        if guard.wish() != Wish.GO:
            return False
        celsius = guard.reading.temperature_c
        cool = celsius is not None and celsius < guard.thresholds.resume_c
        return name in (self.home, self.current) or cool

    def settle(self, before: Callable[[], Any]) -> str | None:
        """Be on the best device; None where there is none just now.

        Args:
            before: called before a move away from the run's own device.
        """
        best = self.best()
        if best is None or best == self.current:
            return best
        if self.current == self.home:
            before()
        if not self.switch.move(torch.device(best)):
            self._full.add(best)  # it does not fit there, and will not later
            return None
        log.warning("training goes on on %s, after %s", best, self.current)
        self.current = best
        return best

    def go_home(self) -> None:
        """Move back, hot or not: where the run ends, its model is where its owner put it."""
        if self.current != self.home and self.switch.move(torch.device(self.home)):
            self.current = self.home

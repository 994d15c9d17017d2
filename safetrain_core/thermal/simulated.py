"""A simulated card, for trying the guard without one: work heats it, and it cools as warm things do."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from .reading import GpuReading

__all__ = ["SimulatedCard"]


class SimulatedCard:
    """A lump of metal with a fan: ``work(joules)`` heats it, time cools it, so that pausing really cools it.

    Newton's law of cooling, dT/dt = -(T - ambient) / tau, solved exactly from one look to the next::

        T(t + dt) = ambient + (T(t) - ambient) exp(-dt / tau),    and work adds joules / heat capacity

    At a steady power it settles at ambient + power x tau / heat capacity.

    Args:
        ambient_c: of the air, in C. start_c: of the card at first; None = as the air.
        heat_capacity_j_per_c: joules that heat it by one degree. cooling_time_s: tau, in seconds.
        clock: gives the present time in seconds; any clock, so that a lesson can run faster than the wall.

    Raises:
        ValueError: a heat capacity or cooling time that is not above 0.

    Source: Incropera et al., "Fundamentals of Heat and Mass Transfer", the lumped capacitance method.

    >>> now = [0.0]
    >>> card = SimulatedCard(25, heat_capacity_j_per_c=10, cooling_time_s=20, clock=lambda: now[0])
    >>> card.work(joules=600); card.read().temperature_c
    85.0
    >>> now[0] += 20 * math.log(2)  # the excess of 60 degrees halves
    >>> round(card.read().temperature_c, 9)
    55.0
    """

    def __init__(
        self,
        ambient_c: float = 25.0,
        *,
        start_c: float | None = None,
        heat_capacity_j_per_c: float = 500.0,
        cooling_time_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, value in (("heat_capacity_j_per_c", heat_capacity_j_per_c), ("cooling_time_s", cooling_time_s)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name}={value} must be finite and above 0")
        self.ambient_c, self.heat_capacity_j_per_c = ambient_c, heat_capacity_j_per_c
        self.cooling_time_s, self.clock = cooling_time_s, clock
        self._celsius = ambient_c if start_c is None else start_c
        self._at = self._read_at = clock()
        self._joules = 0.0
        self._lock = threading.Lock()  # the guard reads in one thread while training works in another

    def _cool(self) -> None:
        now = self.clock()
        left = math.exp(-(now - self._at) / self.cooling_time_s)
        self._celsius, self._at = self.ambient_c + (self._celsius - self.ambient_c) * left, now

    def work(self, joules: float) -> None:
        """Spend energy now: one training step, say; ``ValueError`` for less than 0."""
        if not joules >= 0:
            raise ValueError(f"joules={joules} must be at least 0; a card cools by itself")
        with self._lock:
            self._cool()
            self._celsius += joules / self.heat_capacity_j_per_c
            self._joules += joules

    def read(self) -> GpuReading:
        """Its temperature, and the mean power since the last reading."""
        with self._lock:
            self._cool()
            seconds, power = self._at - self._read_at, None
            if seconds > 0:
                power, self._joules, self._read_at = self._joules / seconds, 0.0, self._at
            return GpuReading(self._celsius, power)

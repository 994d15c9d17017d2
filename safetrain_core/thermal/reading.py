"""One look at a GPU: temperature and what goes with it. What is unknown is None, never 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..errors import type_of
from ..records import GPU_COLUMNS

__all__ = ["GpuReading", "Source", "as_reading", "callable_source", "is_temperature"]

ABSOLUTE_ZERO_C = -273.15


@dataclass(frozen=True, slots=True)
class GpuReading:
    """What a card said of itself; None where it said nothing.

    Args:
        temperature_c: of the GPU core, in degrees Celsius. power_w: of the board, in watts.
        utilization_pct: share of time in which a kernel ran, 0..100. memory_used_mib: by all processes, in MiB.
        sm_clock_mhz, memory_clock_mhz: present clocks.
        throttle_reasons: why the clocks are held down, in words; empty where they are not.

    >>> print(GpuReading(61.0, 123.4, 98.0, 2048.0))
    61 C, 123 W, 98 %, 2048 MiB
    >>> print(GpuReading())
    temperature unknown
    """

    temperature_c: float | None = None
    power_w: float | None = None
    utilization_pct: float | None = None
    memory_used_mib: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    throttle_reasons: tuple[str, ...] | None = None

    def __str__(self) -> str:
        values = (
            (self.temperature_c, "C"),
            (self.power_w, "W"),
            (self.utilization_pct, "%"),
            (self.memory_used_mib, "MiB"),
            (self.sm_clock_mhz, "MHz"),
        )
        told = [f"{value:.0f} {unit}" for value, unit in values if value is not None]
        if self.temperature_c is None:
            told.insert(0, "temperature unknown")
        if self.throttle_reasons:
            told.append("held down by " + " and ".join(self.throttle_reasons))
        return ", ".join(told)

    def cells(self) -> dict[str, float | None]:
        """Its cells in a run's log.

        >>> GpuReading(61.0, power_w=123.4).cells()
        {'gpu_temperature_c': 61.0, 'gpu_power_w': 123.4, 'gpu_utilization_pct': None, 'gpu_memory_used_mib': None}
        """
        values = (self.temperature_c, self.power_w, self.utilization_pct, self.memory_used_mib)
        return dict(zip(GPU_COLUMNS, values, strict=True))


#: Where temperatures come from: called without arguments, gives a reading, a number in C, or None for "unknown".
#: An object with a method ``read`` is one too.
Source = Callable[[], "GpuReading | float | None"]


def as_reading(value: GpuReading | float | None) -> GpuReading:
    """What a source gave, as a reading; a temperature that is none (NaN) is unknown.

    >>> as_reading(61), as_reading(float("nan")).temperature_c
    (GpuReading(temperature_c=61.0, ...), None)
    """
    reading = value if isinstance(value, GpuReading) else GpuReading(None if value is None else float(value))
    if reading.temperature_c is not None and not is_temperature(reading.temperature_c):
        return replace(reading, temperature_c=None)
    return reading


def is_temperature(value: float | None) -> bool:
    """Whether it is a temperature at all. NaN and -inf are not; +inf is, and above any limit.

    >>> [is_temperature(t) for t in (61.0, None, float("nan"), float("-inf"), float("inf"))]
    [True, False, False, False, True]
    """
    return value is not None and value > ABSOLUTE_ZERO_C


def callable_source(source: Any) -> Source:
    """The source as something to call; ``ValueError`` where it is neither callable nor has a ``read``.

    >>> callable_source(lambda: 61.0)()
    61.0
    >>> callable_source(61.0)
    Traceback (most recent call last):
    ...
    ValueError: a source of temperatures is called, or has a method read(); a float cannot be asked
    """
    found = getattr(source, "read", source)
    if not callable(found):
        raise ValueError(
            f"a source of temperatures is called, or has a method read(); {type_of(source)} cannot be asked"
        )
    return found

"""The thermal state machine: pause training above one temperature, resume below a lower one, end it above a third.

::

    state     t > critical   t > pause   resume <= t <= pause   t < resume   unknown
    normal    aborted        paused      normal                 normal       normal
    paused    aborted        paused      paused                 normal       paused
    aborted   aborted        aborted     aborted                aborted      aborted

Two thresholds make a hysteresis, as in a thermostat: with one alone, training would stop and go with each degree. Three
unknown readings in a row count as a lost sensor, and abort from any state: what cannot be seen must not be heated.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .reading import is_temperature

__all__ = ["LOST_AFTER", "ThermalState", "Thresholds", "next_state"]

#: Unknown readings in a row that count as a lost sensor.
LOST_AFTER = 3

#: The range of a threshold, in C.
COLDEST_C, HOTTEST_C = 0.0, 120.0


class ThermalState(StrEnum):
    """What the guard says of training: go on, wait, or end."""

    NORMAL = "normal"
    PAUSED = "paused"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Temperatures in C, each in 0..120: ``resume_c`` < ``pause_c`` < ``critical_c``.

    Raises:
        ValueError: one is out of range, or they do not rise.

    >>> Thresholds(pause_c=80, resume_c=80)
    Traceback (most recent call last):
    ...
    ValueError: thresholds must rise: resume 80 C < pause 80 C < critical 95 C does not hold
    """

    pause_c: float = 85.0
    resume_c: float = 75.0
    critical_c: float = 95.0

    def __post_init__(self) -> None:
        for name in ("pause_c", "resume_c", "critical_c"):
            value = getattr(self, name)
            if not COLDEST_C <= value <= HOTTEST_C:
                raise ValueError(f"{name}={value:g} is out of range; allowed: {COLDEST_C:g}..{HOTTEST_C:g} C")
        if not self.resume_c < self.pause_c < self.critical_c:
            raise ValueError(
                f"thresholds must rise: resume {self.resume_c:g} C < pause {self.pause_c:g} C < "
                f"critical {self.critical_c:g} C does not hold"
            )


def next_state(state: ThermalState, temperature_c: float | None, thresholds: Thresholds) -> ThermalState:
    """The state after one reading; see the table at the top. NaN and None are unknown, and never count as cool.

    Args:
        state: the present one. temperature_c: the reading, in C.

    >>> limits, state = Thresholds(pause_c=85, resume_c=75, critical_c=95), ThermalState.NORMAL
    >>> for celsius in (80, 86, 80, None, 74, 96, 20):
    ...     state = next_state(state, celsius, limits)
    ...     print(celsius, state)
    80 normal
    86 paused
    80 paused
    None paused
    74 normal
    96 aborted
    20 aborted
    """
    if state == ThermalState.ABORTED or temperature_c is None or not is_temperature(temperature_c):
        return state
    if not temperature_c <= thresholds.critical_c:
        return ThermalState.ABORTED
    if not temperature_c <= thresholds.pause_c:
        return ThermalState.PAUSED
    return ThermalState.NORMAL if temperature_c < thresholds.resume_c else state

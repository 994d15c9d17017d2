"""The thermal guard: a poller feeds the state machine, and training asks it between two steps whether to go on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import ThermalAbort
from .hold import Wish, wait_while_hot
from .poller import Poller
from .reading import GpuReading, as_reading
from .states import LOST_AFTER, ThermalState, Thresholds, next_state

__all__ = ["ThermalEvent", "ThermalGuard", "ThermalState"]

log = logging.getLogger(__name__)

#: After three intervals without a reading, how much longer to wait for one: a process that was stopped polls at once.
SILENT_FOR_S = 1.0


@dataclass(frozen=True, slots=True)
class ThermalEvent:
    """A change of state: into which, at what temperature (None = unknown), after how many seconds of guarding.

    >>> print(ThermalEvent(ThermalState.PAUSED, 86.0, 12.0, "86 C is above pause 85 C"))
    paused: 86 C is above pause 85 C
    """

    state: ThermalState
    temperature_c: float | None
    at_s: float
    why: str

    def __str__(self) -> str:
        return f"{self.state}: {self.why}"


class ThermalGuard:
    """Watches a source of temperatures while entered; ``hold()`` between two steps is what protects the card.

    Args:
        source: called without arguments, gives a ``GpuReading``, a number in C, or None for unknown; or has a method
            ``read`` that does, as ``GpuMonitor`` has.
        pause_c, resume_c, critical_c: see ``Thresholds``. poll_interval_s: seconds between readings.
        slowdown_c: where the card itself slows down; a pause threshold above it is warned about.
        name: what is watched, for messages. on_event: called with each ``ThermalEvent``; None = it is logged. What it
            raises is logged.

    Attributes:
        state, reading, events: the present state, the last reading, the changes of state so far. Each is logged.
        paused_s: seconds spent in ``hold()``.

    Raises:
        ValueError: thresholds out of range or not rising; on entering, a source that gives no temperature.

    A loop of your own: ``hold`` returns at once while the card is cool; it reads nothing itself.

    >>> celsius = iter([70, 86, 80, 74, 96])
    >>> with ThermalGuard(lambda: next(celsius), poll_interval_s=0.02) as guard:
    ...     for step in range(1000):
    ...         guard.hold(save=lambda: None)
    ...         time.sleep(0.01)
    Traceback (most recent call last):
    ...
    safetrain_core.errors.ThermalAbort: GPU: 96 C is above critical 95 C; let it cool, look at fans and airflow, ...
    >>> [event.state.value for event in guard.events]
    ['paused', 'normal', 'aborted']
    """

    def __init__(
        self,
        source: Any,
        pause_c: float = 85.0,
        resume_c: float = 75.0,
        critical_c: float = 95.0,
        poll_interval_s: float = 5.0,
        *,
        slowdown_c: float | None = None,
        name: str = "GPU",
        on_event: Callable[[ThermalEvent], Any] | None = None,
    ) -> None:
        self.thresholds = Thresholds(pause_c, resume_c, critical_c)
        self.name, self.on_event = name, on_event or (lambda event: log.warning("%s %s", name, event))
        self.state = ThermalState.NORMAL
        self.events: list[ThermalEvent] = []
        self.paused_s = 0.0
        self.unknown_in_a_row = 0
        self.poller = Poller(source, poll_interval_s, self.see)
        self._began = time.monotonic()
        self._last_c: float | None = None
        self._lock = threading.RLock()  # on_event is called inside, and may ask the guard
        if slowdown_c is not None and not pause_c <= slowdown_c:
            log.warning(
                "%s slows itself down at %g C, below the pause threshold of %g C, which it may never reach; "
                "set the pause threshold lower",
                name,
                slowdown_c,
                pause_c,
            )

    @property
    def reading(self) -> GpuReading:
        """The last one."""
        return self.poller.reading

    def see(self, reading: GpuReading | float | None) -> ThermalState:
        """Take in one reading; the state after it."""
        celsius = as_reading(reading).temperature_c
        with self._lock:
            self.unknown_in_a_row = self.unknown_in_a_row + 1 if celsius is None else 0
            if celsius is None and self.unknown_in_a_row >= LOST_AFTER:
                self._lose(f"{self.unknown_in_a_row} readings in a row without a temperature")
            else:
                self._go(next_state(self.state, celsius, self.thresholds), celsius)
            self._last_c = celsius if celsius is not None else self._last_c
            return self.state

    def _lose(self, how: str) -> None:
        last = "never gave any" if self._last_c is None else f"the last one was {self._last_c:g} C"
        self._go(ThermalState.ABORTED, None, f"the sensor was lost ({how}, {last})")

    def _go(self, state: ThermalState, celsius: float | None, why: str | None = None) -> None:
        if state == self.state or self.state == ThermalState.ABORTED:
            return
        if why is None:
            limits = self.thresholds
            side = {
                ThermalState.NORMAL: f"below resume {limits.resume_c:g} C",
                ThermalState.PAUSED: f"above pause {limits.pause_c:g} C",
                ThermalState.ABORTED: f"above critical {limits.critical_c:g} C",
            }
            why = f"{celsius:g} C is {side[state]}"
        self.state = state
        event = ThermalEvent(state, celsius, time.monotonic() - self._began, why)
        self.events.append(event)
        try:
            self.on_event(event)
        except Exception as error:  # noqa: BLE001  it is called in the poller's thread, which has to go on
            log.error("on_event of the thermal guard failed (%s: %s) at: %s", type(error).__name__, error, event)

    def wish(self) -> Wish:
        """Whether training may go on now, by the readings so far. A poller that has fallen silent is a lost sensor."""
        poller = self.poller
        if poller.running and poller.silent_s > LOST_AFTER * poller.interval_s and not poller.wait(SILENT_FOR_S):
            with self._lock:
                self._lose(f"no answer for {poller.silent_s:.0f} s: the driver hangs")
        return {ThermalState.NORMAL: Wish.GO, ThermalState.PAUSED: Wish.PAUSE}.get(self.state, Wish.ABORT)

    def hold(self, save: Callable[[], Any] = lambda: None, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Call it before each step. While the card is too hot: ``save()`` once, then wait until it is below resume.

        Args:
            save: called before waiting, and before an abort. should_stop: asked ten times a second; True ends the wait.

        Returns:
            True to go on; False where ``should_stop`` said so.

        Raises:
            ThermalAbort: above critical, or the sensor is lost; what ``save`` raises before a pause.
            ValueError: the guard was not entered, or was left: nothing is watching.
        """
        if not self.poller.running and self.state != ThermalState.ABORTED:
            raise ValueError(
                f"the thermal guard of {self.name} is not watching; step inside its block: with ThermalGuard(...) as g:"
            )
        ended, seconds = wait_while_hot(lambda: Wish.STOP if should_stop() else self.wish(), self.poller.wait, save)
        self.paused_s += seconds
        if ended == Wish.ABORT:
            raise ThermalAbort(self.abort_message())
        return ended == Wish.GO

    def abort_message(self, checkpoint: str | None = None) -> str:
        """What happened and what to do, for a ``ThermalAbort``."""
        why = self.events[-1].why if self.events else "aborted"
        advice = "look at nvidia-smi" if self.unknown_in_a_row else "let it cool, look at fans and airflow"
        return f"{self.name}: {why}; {advice}, then resume" + (f" from {checkpoint}" if checkpoint else "")

    def __enter__(self) -> ThermalGuard:
        self._began = time.monotonic()
        if not self.poller.running:  # entered again: what an earlier block ended in is over
            self.state, self.unknown_in_a_row, self._last_c = ThermalState.NORMAL, 0, None
        self.poller.__enter__()
        if self.reading.temperature_c is None:
            self.poller.__exit__()
            raise ValueError(
                f"the thermal guard got no temperature of {self.name} at the start; without one it cannot protect it: "
                "look at `safetrain watch --once`, pass a source that returns degrees Celsius, or leave the guard out"
            )
        return self

    def __exit__(self, *error: object) -> None:
        self.poller.__exit__(*error)

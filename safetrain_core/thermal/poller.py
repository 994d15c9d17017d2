"""A thread that reads a source every few seconds, so that training never waits for a reading."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from .reading import GpuReading, as_reading, callable_source

__all__ = ["Poller"]

log = logging.getLogger(__name__)

#: How long the end of a run waits for a reading under way. A driver that hangs must not hang the run's end.
LEAVE_AFTER_S = 1.0


class Poller:
    """While entered, reads ``source`` every ``interval_s`` in a thread of its own; the first time in the caller's.

    Args:
        source: see ``Source``. One that raises is an unknown reading; the error is logged once.
        interval_s: seconds from one reading to the next.
        on_reading: called with each reading, in the thread that took it.

    Raises:
        ValueError: an interval that is not above 0, or a source that cannot be asked.

    >>> with Poller(lambda: 61.0, interval_s=3600) as poller:
    ...     print(poller.reading, poller.polls)
    61 C 1
    """

    def __init__(
        self, source: Any, interval_s: float = 5.0, on_reading: Callable[[GpuReading], Any] = lambda reading: None
    ) -> None:
        if not 0 < interval_s < threading.TIMEOUT_MAX:
            raise ValueError(f"poll_interval_s={interval_s} must be above 0 and below {threading.TIMEOUT_MAX:.0e}")
        self.source, self.interval_s, self.on_reading = callable_source(source), interval_s, on_reading
        self.reading = GpuReading()
        self.polls = 0
        self._changed = threading.Condition()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._polled_at = time.monotonic()
        self._pid = os.getpid()
        self._failed = False

    def poll(self) -> GpuReading:
        """Read now, in this thread."""
        try:
            reading = as_reading(self.source())
        except Exception as error:  # noqa: BLE001  whatever a source raises, the guard must hear of it
            if not self._failed:
                log.warning("the source of GPU temperatures failed (%s: %s)", type(error).__name__, error)
            self._failed, reading = True, GpuReading()
        self.reading, self._polled_at = reading, time.monotonic()
        self.on_reading(reading)
        with self._changed:
            self.polls += 1
            self._changed.notify_all()
        return reading

    def _run(self) -> None:
        while not self._end.wait(self.interval_s):
            self.poll()

    @property
    def running(self) -> bool:
        """Whether the thread is there; a forked child has none."""
        return self._thread is not None and self._pid == os.getpid()

    @property
    def silent_s(self) -> float:
        """Seconds since the last reading."""
        return time.monotonic() - self._polled_at

    def wait(self, timeout_s: float) -> bool:
        """Wait for the next reading; False where none came in ``timeout_s``."""
        with self._changed:
            seen = self.polls
            return self._changed.wait_for(lambda: self.polls != seen, timeout_s)

    def __enter__(self) -> Poller:
        if self.running:
            raise ValueError("this poller is running already; build another")
        self._pid = os.getpid()
        self._end.clear()
        self.poll()
        self._thread = threading.Thread(target=self._run, name="gpu-poller", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if not self.running or self._thread is None:
            return
        self._end.set()
        with contextlib.suppress(RuntimeError):
            self._thread.join(LEAVE_AFTER_S)
        self._thread = None

"""SIGINT and SIGTERM as a request to end after the present step, instead of an exception in the middle of it."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["StopSignals"]

WATCHED = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """While entered, the first SIGINT or SIGTERM sets ``received``; a second SIGINT raises KeyboardInterrupt at once.

    Outside the main thread, where Python allows no handlers, it watches nothing.

    >>> with StopSignals() as stop:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     print(stop.received.name)
    SIGTERM
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or signal.Signals(number)

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in WATCHED}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

"""Signals as requests: SIGINT and SIGTERM to end after the present step, SIGUSR1 to save and go on."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["StopSignals"]

WATCHED = (signal.SIGINT, signal.SIGTERM)

#: Asks for a checkpoint; Windows has no such signal.
SAVE: signal.Signals | None = getattr(signal, "SIGUSR1", None)


class StopSignals:
    """While entered, the first SIGINT or SIGTERM sets ``received``; a second SIGINT raises KeyboardInterrupt at once.

    SIGUSR1 sets ``save_requested``.

    Outside the main thread, where Python allows no handlers, it watches nothing.

    >>> with StopSignals() as stop:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     print(stop.received.name)
    SIGTERM
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.save_requested = False
        self._before: dict[signal.Signals, Any] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == SAVE:
            self.save_requested = True
            return
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or signal.Signals(number)

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {
                number: signal.signal(number, self._note) for number in (*WATCHED, *([SAVE] if SAVE else []))
            }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

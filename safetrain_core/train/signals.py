"""Signals as requests: SIGINT and SIGTERM to end after the present step, SIGUSR1 to save and go on."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from ..distributed import INTERRUPT, TERMINATE, world_size
from ..distributed import SAVE as SAVE_BIT

__all__ = ["StopSignals"]

WATCHED = (signal.SIGINT, signal.SIGTERM)

#: Asks for a checkpoint; Windows has no such signal.
SAVE: signal.Signals | None = getattr(signal, "SIGUSR1", None)


class StopSignals:
    """While entered, the first SIGINT or SIGTERM sets ``received``; a second SIGINT raises KeyboardInterrupt at once.

    SIGUSR1 sets ``save_requested``. With several ranks a signal to one of them counts once ``obey`` has heard of it.

    Outside the main thread, where Python allows no handlers, it watches nothing.

    >>> with StopSignals() as stop:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     print(stop.received.name)
    SIGTERM
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.save_requested = False
        self._alone = world_size() == 1
        self._wishes = 0
        self._before: dict[signal.Signals, Any] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        again = self._wishes & (INTERRUPT | TERMINATE)
        if again and number == signal.SIGINT:
            raise KeyboardInterrupt
        wish = SAVE_BIT if number == SAVE else (INTERRUPT if number == signal.SIGINT else TERMINATE)
        self._wishes |= wish
        if self._alone:
            self.obey(wish)

    def requests(self, *, take: bool = False) -> int:
        """What this rank has been asked for, for ``distributed.agree``; on one process nothing is left to ask.

        Args:
            take: the others hear of it now: a save is then asked for no more.
        """
        wishes = self._wishes
        if take:
            self._wishes &= ~SAVE_BIT
        return 0 if self._alone else wishes & (INTERRUPT | TERMINATE | (SAVE_BIT if take else 0))

    def obey(self, agreed: int) -> None:
        """Do what any rank was asked for; all ranks do so at the same step."""
        if self.received is None and agreed & (INTERRUPT | TERMINATE):
            self.received = signal.SIGINT if agreed & INTERRUPT else signal.SIGTERM
        self.save_requested |= bool(agreed & SAVE_BIT)

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

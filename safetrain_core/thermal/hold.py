"""Waiting while something is too hot: save once, look ten times a second, stay interruptible."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Any

__all__ = ["Wish", "wait_while_hot"]

log = logging.getLogger(__name__)

#: Seconds between two looks while waiting: how long a signal waits to be heard.
LOOK_EVERY_S = 0.1


class Wish(IntEnum):
    """What is wanted of training before its next step; among ranks that differ, the largest counts."""

    GO = 0
    PAUSE = 1
    STOP = 2
    ABORT = 3


def wait_while_hot(
    wish: Callable[[], Wish], wait: Callable[[float], Any], save: Callable[[], Any]
) -> tuple[Wish, float]:
    """Wait while ``wish()`` is PAUSE.

    Args:
        wish: asked first, and after each wait. wait: ``wait(seconds)`` returns then, or earlier on news.
        save: called once, before the first wait and before an abort. What it raises before an abort is only logged.

    Returns:
        The wish that ended it (GO, STOP or ABORT), and the seconds spent waiting.

    >>> wishes, said = iter([Wish.PAUSE, Wish.PAUSE, Wish.GO]), []
    >>> ended, seconds = wait_while_hot(lambda: next(wishes), lambda s: said.append(s), lambda: said.append("save"))
    >>> ended.name, said
    ('GO', ['save', 0.1, 0.1])
    """
    now = wish()
    if now in (Wish.GO, Wish.STOP):
        return now, 0.0
    try:
        save()
    except Exception as error:
        if now != Wish.ABORT:
            raise
        log.error("the checkpoint before the thermal abort failed (%s: %s)", type(error).__name__, error)
    if now == Wish.ABORT:
        return now, 0.0
    start = time.monotonic()
    while now == Wish.PAUSE:
        wait(LOOK_EVERY_S)
        now = wish()
    return now, time.monotonic() - start

"""One writer at a time: advisory locks. Where the system has none (Windows), nothing is checked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

__all__ = ["folder_lock", "lock", "unlock"]


def lock(file: IO[Any], busy: str) -> None:
    """Lock an open file until it is closed; ``ValueError(busy)`` where another process holds it.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as first, open(first.name) as second:
    ...     lock(first, "busy")
    ...     lock(second, "busy: another run")
    Traceback (most recent call last):
    ...
    ValueError: busy: another run
    """
    with contextlib.suppress(ImportError):
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(busy) from None


def unlock(file: IO[Any]) -> None:
    """Give the lock back, also where forked processes still have the file open."""
    with contextlib.suppress(ImportError):
        import fcntl

        fcntl.flock(file, fcntl.LOCK_UN)


@contextlib.contextmanager
def folder_lock(folder: Path, busy: str) -> Iterator[None]:
    """Hold ``folder/.lock`` while entered; ``ValueError(busy)`` where another process holds it."""
    with open(folder / ".lock", "a") as file:
        lock(file, busy)
        try:
            yield
        finally:
            unlock(file)

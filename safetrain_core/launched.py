"""What a process does that ``launch`` has started: join the others, work, tell how it went; and never outlive it."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

__all__ = ["IGNORED", "Place", "run_rank"]

#: Signals that the server of the ranks ignores, and a rank does not.
IGNORED = ("SIGTERM", "SIGHUP", "SIGUSR1")


class Place(NamedTuple):
    """What a rank is told at its start."""

    rank: int
    world_size: int
    folder: str
    timeout_s: float
    backend: str
    show: bool
    environment: dict[str, str]


def run_rank(answer: Connection, life: Connection, place: Place, job: bytes) -> None:
    """Run the job in a process group, hand its result to ``answer``, and end the process; end it when ``life`` does."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # a Ctrl-C at the terminal reaches the launching process, which decides
    threading.Thread(target=_die_with_parent, args=(life,), daemon=True).start()
    for name in IGNORED:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(place.environment)
    if not place.show:
        said = os.open(os.path.join(place.folder, f"rank{place.rank}.log"), os.O_WRONLY | os.O_CREAT)
        os.dup2(said, 1)
        os.dup2(said, 2)
    try:
        with _telling(answer):
            from .distributed import process_group  # torch: told to the launching process, should it fail

            worker, args = pickle.loads(job)  # noqa: S301  from the launching process
            meeting = Path(place.folder, "rendezvous").as_uri()
            where = {"init_method": meeting, "rank": place.rank, "world_size": place.world_size}
            with process_group(place.backend, timeout_s=place.timeout_s, **where), _telling(answer):
                # Told before the ranks wait for each other, and before a fall closes connections: so that it is known
                # who is late, and the cause comes before what it makes of the others.
                answer.send_bytes(pickle.dumps(("done", worker(*args))))
        status = 0
    except BaseException:  # noqa: BLE001  told, and the launching process raises
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Past the interpreter's end: gloo's threads now and then abort the process there (torch 2.13).
    os._exit(status)


@contextlib.contextmanager
def _telling(answer: Connection) -> Iterator[None]:
    """Hand what is raised to the launching process. It takes the first word of a rank, and no second."""
    try:
        yield
    except BaseException as error:
        told = (type(error).__name__, str(error), traceback.format_exc(), time.monotonic())
        with contextlib.suppress(OSError):
            answer.send_bytes(pickle.dumps(("raised", told)))
        raise


def _die_with_parent(life: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        life.recv_bytes()
    with contextlib.suppress(OSError, AttributeError):
        if os.getpgid(0) == os.getpid():
            os.killpg(0, signal.SIGKILL)  # with its children
    os._exit(1)

"""Start a worker on several ranks of this machine: for notebooks, tests and ``train --world-size``.

The ranks are forked by a server process that has torch, FSDP and DCP imported already, so that a second launch starts
at once. They meet in a file of a temporary folder: no port, and two launches never meet. For several machines use
``torchrun``, with the same worker.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .errors import type_of
from .launched import Place
from .rank_processes import Ranks

__all__ = ["launch"]

#: Imported once by the server that forks the ranks.
PRELOADED = [
    "safetrain_core.rank_server",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
]

#: Held while ``__main__`` or the environment is another for a moment: two threads may launch at once.
PROCESS_WIDE = threading.RLock()


def launch(
    worker: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float | None = 600.0,
    backend: str = "gloo",
    show: bool = False,
    forward_signals: bool = False,
) -> list[Any]:
    """``worker(*args)`` on ``world_size`` processes in one process group; what each returned, in order of rank.

    Args:
        worker: a function of a module (not one defined in a notebook cell), called with the process group ready.
        args: picklable, as is what the worker returns; each rank gets a copy of its own.
        timeout_s: bound on the whole launch, and on each wait for another rank; None = only the waits, at 600 s.
        show: let the ranks print; else what they print is kept out of sight, and shown only where one dies.
        forward_signals: hand SIGINT, SIGTERM and SIGUSR1 on to the ranks, and wait for what they make of them. Else
            a Ctrl-C ends them at once.

    Raises:
        RankFailed: one raised, exited, was killed, or the time was up; it says which and why. All have ended then.
        ValueError: an argument that cannot be used; nothing was started.

    >>> import os
    >>> launch(os.getcwd, 0)
    Traceback (most recent call last):
    ...
    ValueError: world_size=0 must be at least 1
    """
    job, in_main = _packed(worker, world_size, args, timeout_s)
    context = _context()
    with tempfile.TemporaryDirectory(prefix="safetrain-") as folder, contextlib.ExitStack() as stack:
        ranks = Ranks(Path(folder))
        stack.callback(ranks.end)
        if forward_signals:
            stack.enter_context(_forwarding(ranks))
        for rank in range(world_size):
            environment = {"OMP_NUM_THREADS": "1", **os.environ}
            place = Place(rank, world_size, folder, timeout_s or 600.0, backend, show, environment)
            with _starting(in_main):
                ranks.start(context, place, job)
        return ranks.results(timeout_s)


def _packed(
    worker: Callable[..., Any], world_size: int, args: Sequence[Any], timeout_s: float | None
) -> tuple[bytes, bool]:
    """Worker and arguments as bytes, and whether a part of them lives in the caller's script.

    Bytes, since what multiprocessing itself sends shares a tensor's memory: ranks would write into each other's.
    """
    if not callable(worker):
        raise ValueError(f"worker is {type_of(worker)}, expected a function of a module")
    if type(world_size) is not int:
        raise ValueError(f"world_size={world_size!r} must be an integer")
    if world_size < 1:
        raise ValueError(f"world_size={world_size} must be at least 1")
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"timeout_s={timeout_s} must be above 0, or None for no bound on the whole")
    name = getattr(worker, "__qualname__", repr(worker))
    try:
        with _main_hidden():
            return pickle.dumps((worker, args)), False
    except Exception:  # noqa: BLE001  told below, where the script does not help
        try:
            job = pickle.dumps((worker, args))
        except Exception as error:
            raise ValueError(
                f"the worker {name} or its arguments cannot be sent to another process: {error}"
            ) from error
    if not hasattr(sys.modules["__main__"], "__file__"):
        raise ValueError(
            f"the worker {name}, or one of its arguments, was defined in a notebook or at a prompt; "
            "put it into a module (a .py file)"
        )
    return job, True


@contextlib.contextmanager
def _main_hidden() -> Iterator[None]:
    with PROCESS_WIDE:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def _context() -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():  # Windows
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


@contextlib.contextmanager
def _starting(in_main: bool) -> Iterator[None]:
    """One thread for each rank, as torchrun has it; and the caller's script is not run anew in each rank.

    multiprocessing imports the script that the caller runs; a script without a ``__main__`` guard, as a lesson is,
    would start itself again there. Only a worker that lives in the script needs that.

    The server that forks the ranks is a ``python -c``, which looks for modules in the current folder first: it is told
    to look where this process does.
    """
    places = os.pathsep.join(path or os.getcwd() for path in sys.path)
    changed = {"PYTHONPATH": places, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with PROCESS_WIDE:
        before = {name: os.environ.get(name) for name in changed}
        os.environ.update(changed)
        try:
            with contextlib.nullcontext() if in_main else _main_hidden():
                yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


@contextlib.contextmanager
def _forwarding(ranks: Ranks) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    watched = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)]
    before = {number: signal.signal(number, lambda number, frame: ranks.send(number)) for number in watched}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

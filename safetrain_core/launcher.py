"""Start a worker on several ranks of this machine: for notebooks, tests and ``train --world-size``.

The ranks are forked by a server process that has torch, FSDP and DCP imported already, so that a second launch starts
at once. They meet in a file of a temporary folder: no port, and two launches never meet. For several machines use
``torchrun``, with the same worker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from .errors import RankFailed
from .launched import Place, run_rank

__all__ = ["launch"]

#: Imported once by the server that forks the ranks.
PRELOADED = [
    "safetrain_core.rank_server",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
]

#: After the first sign of a failure: how long to wait for what the other ranks have to say, which may be the cause.
GRACE_S = 0.5

#: How long ranks that have handed in their results may take to end.
LEAVE_S = 10.0

#: Held while ``__main__`` or the environment is another for a moment: two threads may launch at once.
PROCESS_WIDE = threading.RLock()

#: What a rank raises because another one has gone.
PEER_SIGNS = ("gloo", "Connection closed", "Connection reset", "Broken pipe", "NCCL", "ProcessGroup", "TCPStore")


@dataclasses.dataclass
class Fall:
    """How a rank ended without a result."""

    rank: int
    kind: str
    text: str
    trace: str = ""
    at: float = 0.0

    def order(self) -> tuple[int, float]:
        """Causes before consequences: what was raised, then what died without a word, then lost connections."""
        lost = self.kind not in ("exited", "killed") and any(sign in self.text for sign in PEER_SIGNS)
        return (2 if lost else int(self.kind in ("exited", "killed"))), self.at


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
        ranks = _Ranks(Path(folder))
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


class _Ranks:
    """The processes of one launch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[Any] = []
        self._answers: list[Connection] = []
        self._lives: list[Connection] = []
        self._all_done = False

    def start(self, context: Any, place: Place, job: bytes) -> None:
        answer, theirs = context.Pipe(duplex=False)
        life, ours = context.Pipe(duplex=False)
        # No daemon: a daemon may have no children, and a DataLoader's workers are that.
        process = context.Process(target=run_rank, args=(theirs, life, place, job), daemon=False)
        process.start()
        theirs.close()
        life.close()
        self.processes.append(process)
        self._answers.append(answer)
        self._lives.append(ours)

    def results(self, timeout_s: float | None) -> list[Any]:
        """What each rank returned; RankFailed with the cause when one has fallen, or time is up."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        got: dict[int, Any] = {}
        falls: list[Fall] = []
        while len(got) < len(self.processes):
            rest = None if until is None else until - time.monotonic()
            if rest is not None and rest <= 0:
                if falls:
                    break
                late = sorted(set(range(len(self.processes))) - got.keys())
                raise RankFailed(
                    f"rank {late[0]} had not ended after timeout_s={timeout_s:g} ({len(late)} of {len(self.processes)} "
                    "ranks); all were ended. Look for a rank that waits for another, or give it more time",
                    rank=late[0],
                    kind="timeout",
                )
            open_ranks = [r for r in range(len(self.processes)) if r not in got and r not in {f.rank for f in falls}]
            if not open_ranks:
                break
            waiting = [self._answers[r] for r in open_ranks]
            ready = multiprocessing.connection.wait([*waiting, *(self.processes[r].sentinel for r in open_ranks)], rest)
            for r in open_ranks:
                if self._answers[r] in ready or self.processes[r].sentinel in ready:
                    self._take(r, got, falls)
            if falls and until != (soon := self._soon(until, falls)):
                until = soon
        if falls:
            first = min(falls, key=Fall.order)
            raise RankFailed(
                f"rank {first.rank} {_told(first)}; the other ranks were ended",
                rank=first.rank,
                kind=first.kind,
                text=first.text,
                trace=first.trace,
            )
        self._all_done = True
        return [got[r] for r in range(len(self.processes))]

    def _soon(self, until: float | None, falls: list[Fall]) -> float:
        soon = min(fall.at for fall in falls) + GRACE_S
        return soon if until is None else min(until, soon)

    def _take(self, r: int, got: dict[int, Any], falls: list[Fall]) -> None:
        try:
            told = self._answers[r].recv_bytes() if self._answers[r].poll() else None
        except (EOFError, OSError):
            told = None
        if told is not None:
            try:
                kind, value = pickle.loads(told)  # noqa: S301  from a process of our own
            except Exception as error:  # noqa: BLE001  a class that this process cannot find, or makes trouble of
                kind, value = "", (type(error).__name__, f"its result cannot be read here: {error}")
            if kind == "done":
                got[r] = value
            else:
                falls.append(Fall(r, *value))
            return
        self.processes[r].join(1.0)
        code = self.processes[r].exitcode
        said = _tail(self.folder / f"rank{r}.log")
        if code is not None and code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
            falls.append(Fall(r, "killed", f"by {name}{said}", at=time.monotonic()))
        else:
            falls.append(Fall(r, "exited", f"with status {code} and no result{said}", at=time.monotonic()))

    def send(self, number: int) -> None:
        for process in self.processes:
            if process.pid is not None and process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def end(self) -> None:
        """Leave no process behind: those that have handed in get a moment, the others none."""
        until = time.monotonic() + (LEAVE_S if self._all_done else 0.0)
        try:
            for process in self.processes:
                process.join(max(0.0, until - time.monotonic()))
        finally:
            for process in self.processes:
                if process.is_alive():
                    _kill(process)
                process.join()
                process.close()
            for pipe in (*self._answers, *self._lives):
                pipe.close()


def _kill(process: Any) -> None:
    """With its children: a rank leads a process group of its own, once it has begun."""
    with contextlib.suppress(OSError, AttributeError):  # AttributeError: Windows
        if os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def _told(fall: Fall) -> str:
    if fall.kind in ("killed", "exited"):
        return f"was killed {fall.text}" if fall.kind == "killed" else f"exited {fall.text}"
    return f"raised {fall.kind}: {fall.text}"


def _tail(path: Path, lines: int = 5) -> str:
    with contextlib.suppress(OSError):
        said = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-lines:]
        return "; it said: " + " | ".join(said) if said else ""
    return ""


@contextlib.contextmanager
def _forwarding(ranks: _Ranks) -> Iterator[None]:
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

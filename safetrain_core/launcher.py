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
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from .errors import RankFailed

__all__ = ["launch"]

#: Imported once by the server that forks the ranks.
PRELOADED = [
    "safetrain_core.rank_server",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
]

#: What the server ignores, and a rank does not.
IGNORED = ("SIGTERM", "SIGHUP", "SIGUSR1")

#: After the first sign of a failure: how long to wait for what the other ranks have to say, which may be the cause.
GRACE_S = 0.5

#: How long ranks that have handed in their results may take to end.
LEAVE_S = 10.0

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
        args: picklable.
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
    _refuse(worker, world_size, args, timeout_s)
    context = _context()
    with tempfile.TemporaryDirectory(prefix="safetrain-") as folder, contextlib.ExitStack() as stack:
        ranks = _Ranks(Path(folder))
        stack.callback(ranks.end)
        if forward_signals:
            stack.enter_context(_forwarding(ranks))
        for rank in range(world_size):
            ranks.start(context, (rank, world_size, folder, timeout_s or 600.0, backend, show, worker, args))
        return ranks.results(timeout_s)


def _refuse(worker: Callable[..., Any], world_size: int, args: Sequence[Any], timeout_s: float | None) -> None:
    if world_size < 1:
        raise ValueError(f"world_size={world_size} must be at least 1")
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"timeout_s={timeout_s} must be above 0, or None for no bound on the whole")
    name = getattr(worker, "__qualname__", repr(worker))
    if _in_main(worker) and not hasattr(sys.modules["__main__"], "__file__"):
        raise ValueError(
            f"the worker {name} was defined in a notebook or at a prompt; put it into a module (a .py file)"
        )
    try:
        pickle.dumps((worker, args))
    except Exception as error:
        raise ValueError(f"the worker {name} or its arguments cannot be sent to another process: {error}") from error


def _in_main(worker: Callable[..., Any]) -> bool:
    return getattr(worker, "__module__", None) == "__main__"


def _context() -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():  # Windows
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


@contextlib.contextmanager
def _starting(worker: Callable[..., Any]) -> Iterator[None]:
    """One thread for each rank, as torchrun has it; and the caller's script is not run anew in each rank.

    multiprocessing imports the script that the caller runs; a script without a ``__main__`` guard, as a lesson is,
    would start itself again there. Only a worker that lives in the script needs that.
    """
    main, threads = sys.modules["__main__"], os.environ.get("OMP_NUM_THREADS")
    if not _in_main(worker):
        sys.modules["__main__"] = types.ModuleType("__main__")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        if threads is None:
            del os.environ["OMP_NUM_THREADS"]


class _Ranks:
    """The processes of one launch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[Any] = []
        self._answers: list[Connection] = []
        self._lives: list[Connection] = []

    def start(self, context: Any, job: tuple[Any, ...]) -> None:
        answer, theirs = context.Pipe(duplex=False)
        life, ours = context.Pipe(duplex=False)
        process = context.Process(target=_rank_main, args=(theirs, life, *job), daemon=True)
        with _starting(job[-2]):
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
        return [got[r] for r in range(len(self.processes))]

    def _soon(self, until: float | None, falls: list[Fall]) -> float:
        soon = min(fall.at for fall in falls) + GRACE_S
        return soon if until is None else min(until, soon)

    def _take(self, r: int, got: dict[int, Any], falls: list[Fall]) -> None:
        try:
            if self._answers[r].poll():
                kind, value = self._answers[r].recv()
                if kind == "done":
                    got[r] = value
                else:
                    falls.append(Fall(r, *value))
                return
        except (EOFError, OSError):
            pass
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
        until = time.monotonic() + (LEAVE_S if sys.exc_info()[0] is None else 0.0)
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
        for pipe in (*self._answers, *self._lives):
            pipe.close()


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


# --- in the rank ------------------------------------------------------------------------------------------------


def _rank_main(
    answer: Connection,
    life: Connection,
    rank: int,
    world_size: int,
    folder: str,
    timeout_s: float,
    backend: str,
    show: bool,
    worker: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    threading.Thread(target=_die_with_parent, args=(life,), daemon=True).start()
    for name in IGNORED:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # a Ctrl-C at the terminal reaches the launching process, which decides
    if not show:
        said = os.open(os.path.join(folder, f"rank{rank}.log"), os.O_WRONLY | os.O_CREAT)
        os.dup2(said, 1)
        os.dup2(said, 2)
    status = 0
    try:
        from .distributed import process_group

        meeting = Path(folder, "rendezvous").as_uri()
        place = {"init_method": meeting, "rank": rank, "world_size": world_size}
        with process_group(backend, timeout_s=timeout_s, **place):
            value = worker(*args)
        answer.send(("done", value))
    except BaseException as error:  # noqa: BLE001  told to the launching process, which raises
        status = 1
        told = (type(error).__name__, str(error), traceback.format_exc(), time.monotonic())
        with contextlib.suppress(OSError):
            answer.send(("raised", told))
    sys.stdout.flush()
    sys.stderr.flush()
    # Past the interpreter's end: gloo's threads now and then abort the process there (torch 2.13).
    os._exit(status)


def _die_with_parent(life: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        life.recv_bytes()
    os._exit(1)

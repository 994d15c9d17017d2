"""The processes of one launch, seen from the process that has launched them: their results, or how one of them fell."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing.connection
import os
import pickle
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from .errors import RankFailed
from .launched import Place, run_rank

__all__ = ["Ranks"]

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


class Ranks:
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

"""Two real data-parallel processes for lesson 02: started, waited for within a bound, and their findings read."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetrain_core import next_token_loss
from torch import Tensor

from . import accumulation as lab
from . import toy

RANKS, LR = 2, 0.1

#: The ways to train. The first three take text, in which every row has the same number of tokens; the others lines.
EVERY, LAST, GUARDED = "sync on every one", "sync on the last", "AmpTrainState"
BY_COUNT, BY_TOKENS = "lines, loss / K", "lines, by tokens"
WAYS = (EVERY, LAST, GUARDED, BY_COUNT, BY_TOKENS)
OF_LINES = (BY_COUNT, BY_TOKENS)


@dataclass(frozen=True)
class Ranked:
    """What two ranks found in one of the ways: all-reduces of each update, bytes per update, seconds, weights."""

    per_update: list[int]
    bytes_per_update: float
    seconds: float
    weights: Tensor


def two_ranks(
    updates: int = 3, accum: int = 4, rows: int = 8, seed: int = 0, timeout_s: float = 60
) -> dict[str, Ranked]:
    """Train the tiny GPT on two data-parallel processes in each of ``WAYS``, one after the other.

    The processes meet at a file and talk through gloo over the loopback device. Both must agree on what they count
    and end with the same weights.

    Raises:
        RuntimeError: a rank failed (with the last line of its error), was too slow, or the two do not agree.
    """
    with tempfile.TemporaryDirectory(prefix="lesson02-") as folder:
        results = [Path(folder, f"rank{rank}.json") for rank in range(RANKS)]
        spec = {
            "ranks": RANKS, "updates": updates, "accum": accum, "rows": rows, "seed": seed, "timeout_s": timeout_s,
            "rendezvous": str(Path(folder, "rendezvous")), "results": [str(path) for path in results],
        }  # fmt: skip
        worker = [sys.executable, "-m", "support.ddp_worker"]
        commands = [[*worker, str(rank), json.dumps(spec)] for rank in range(RANKS)]
        run_together(commands, Path(folder), timeout_s)
        found = [json.loads(path.read_text(encoding="utf-8")) for path in results]
    merged = {}
    for way in WAYS:
        one, other = (
            Ranked(**{**rank[way], "weights": torch.tensor(rank[way]["weights"])})
            for rank in found
        )
        if one.per_update != other.per_update or not one.weights.equal(other.weights):
            raise RuntimeError(f"the two ranks do not agree after {way!r}")
        merged[way] = one
    return merged


def run_together(commands: Sequence[Sequence[str]], folder: Path, timeout_s: float) -> None:
    """Start one process per rank and wait for all; the first that fails, or the clock, ends the others.

    Args:
        folder: where the ranks' error output goes.

    Raises:
        RuntimeError: a rank ended with another status than 0, or not within ``timeout_s``.
    """
    here = str(Path(__file__).resolve().parent.parent)
    paths = filter(None, [here, os.environ.get("PYTHONPATH")])
    # The ranks share one machine, so each takes one thread.
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
    }
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if loopback:  # so that no host name has to be looked up
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback.pop())
    logs = [folder / f"rank{rank}.err" for rank in range(len(commands))]
    running: list[subprocess.Popen[bytes]] = []
    deadline = time.monotonic() + timeout_s
    try:
        for command, log in zip(commands, logs, strict=True):
            with log.open("wb") as stderr:
                quiet = subprocess.DEVNULL
                running.append(
                    subprocess.Popen(
                        command, env=environment, stdin=quiet, stdout=quiet, stderr=stderr
                    )
                )
        while any(process.poll() is None for process in running):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the ranks did not end within {timeout_s:g} s")
            if any(process.poll() for process in running):
                break
            time.sleep(0.05)
        failed = [
            f"rank {rank} ended with status {process.returncode}: {_last_line(logs[rank])}"
            for rank, process in enumerate(running)
            if process.poll()
        ]
        if failed:
            raise RuntimeError("; ".join(failed))
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
            process.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def one_process(
    updates: int = 3,
    accum: int = 4,
    rows: int = 8,
    seed: int = 0,
    *,
    of_lines: bool = False,
) -> Tensor:
    """The weights after the same updates on one process, each on one big batch of both ranks' rows."""
    model = toy.tiny_gpt(seed)
    sgd = torch.optim.SGD(model.parameters(), lr=LR)
    num = RANKS * accum
    if of_lines:
        batches = [whole for _, whole in lab.line_windows(updates, num, rows, seed)]
    else:
        batches = list(toy.text_batches(updates, seed, num * rows))
    for x, y in batches:
        sgd.zero_grad()
        next_token_loss(model(x), y).backward()
        sgd.step()
    return lab.weights(model)

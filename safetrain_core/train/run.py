"""A job on one process, on ranks that are started here, or on those that torchrun has started; and what it shows."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from ..distributed import everyones, is_main, process_group
from ..errors import RankFailed, SafeTrainError
from ..launcher import launch
from .console import print_ranks, print_summary, say
from .resume_check import checkpoint_to_check, clear, resumed, verdict
from .worker import Job, Report, train

__all__ = ["run_everywhere"]

#: Calls a function on every rank; what each returned.
Everywhere = Callable[..., list[Any]]


def run_everywhere(job: Job, ranks: int, *, under_torchrun: bool = False) -> int:
    """Run ``job``, print its summary, prove its resume where that was asked for; the exit status."""
    backend = "nccl" if job.device.startswith("cuda") else "gloo"
    if backend == "nccl" and not torch.cuda.is_available():
        raise ValueError(f"--device {job.device} is not available (torch sees no CUDA here); use --device cpu")
    if under_torchrun:
        with process_group(backend):
            return _run(job, lambda work, *args: everyones(work(*args)))
    if ranks == 1:
        return _run(job, lambda work, *args: [work(*args)])

    def launched(work: Callable[..., Any], *args: Any) -> list[Any]:
        return launch(work, ranks, *args, timeout_s=None, backend=backend, show=True, forward_signals=True)

    try:
        return _run(job, launched)
    except RankFailed as fall:
        if fall.kind in ("ValueError", "CheckpointDoesNotFit"):
            raise ValueError(fall.text) from fall
        if fall.kind == "KeyboardInterrupt":
            raise KeyboardInterrupt from fall
        if fall.kind.endswith("Error") and fall.kind in {kind.__name__ for kind in SafeTrainError.__subclasses__()}:
            # What is wrong with a checkpoint is the same on every rank.
            rank = "" if fall.kind == "CheckpointError" else f"rank {fall.rank}: "
            raise SafeTrainError(rank + fall.text) from fall
        raise


def _run(job: Job, everywhere: Everywhere) -> int:
    reports: list[Report] = everywhere(train, job)
    first = reports[0]
    if is_main():
        if first.failure is not None:
            say(f"safetrain: {first.failure}", file=sys.stderr)
        print_summary(job.out, job.config, first.result)
        if len(reports) > 1:
            print_ranks([report.facts for report in reports])
    if first.status != 0 or not job.witness:
        return first.status
    step = checkpoint_to_check(job, first)
    if is_main():
        clear(job)
    holds, words = verdict(reports, everywhere(resumed, job, step), step)
    if is_main():
        say(words)
    return 0 if holds else 1

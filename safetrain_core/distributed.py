"""Rank, and agreement between ranks; on one process, the identity.

A *code* says what one rank has found: a verdict from 0 (all is well) to ``WORST``, plus requests, a bit each. What the
ranks agree on is the worst verdict and every request.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "INTERRUPT",
    "PAUSE",
    "SAVE",
    "TERMINATE",
    "VERDICT",
    "agree",
    "everyones",
    "is_main",
    "mains",
    "max_over_ranks",
    "process_group",
    "rank",
    "sum_over_ranks",
    "sums_and_agreement",
    "world_size",
]

#: The largest verdict; ``code & VERDICT`` takes the requests away.
WORST = VERDICT = 7
#: Requests: end the run as SIGINT or SIGTERM do, save a checkpoint, wait for a cooler device.
INTERRUPT, TERMINATE, SAVE, PAUSE = 8, 16, 32, 64
REQUESTS = (INTERRUPT, TERMINATE, SAVE, PAUSE)


def world_size() -> int:
    """Number of processes in the run: 1 unless ``torch.distributed`` is initialised.

    >>> world_size()
    1
    """
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process in the run, from 0.

    >>> rank()
    0
    """
    return dist.get_rank() if world_size() > 1 else 0


def is_main() -> bool:
    """True on the one process that writes logs and prints.

    >>> is_main()
    True
    """
    return rank() == 0


def agree(code: int, device: torch.device | None = None) -> int:
    """The worst verdict of all ranks with the requests of each, on every rank; ``code`` itself on one process.

    Args:
        code: a verdict from 0 to 7, plus any of ``INTERRUPT``, ``TERMINATE``, ``SAVE``, ``PAUSE``.
        device: the rank's own device; nccl needs it, gloo reduces on the CPU.

    Raises:
        ValueError: another code.

    >>> agree(2), agree(1 + SAVE)
    (2, 33)
    """
    checked(code)
    return code if world_size() == 1 else sums_and_agreement(torch.zeros(0, device=device), code)[1]


def checked(code: int) -> int:
    """``code`` itself; ``ValueError`` where it is none."""
    if not 0 <= code < 2 * PAUSE:
        raise ValueError(f"code={code} must be a verdict from 0 to {WORST}, plus requests below {2 * PAUSE}")
    return code


def sums_and_agreement(values: Tensor, code: int) -> tuple[list[float], int]:
    """The sums of ``values`` over all ranks, and what ``agree(code)`` says, in one all-reduce and one host read.

    Everything is added up, the code as a count for each of its meanings. A NaN or Inf of one rank stays in the sum,
    where gloo's MAX over floats would lose a NaN.

    Args:
        values: a 1-D float tensor of the same length on every rank.

    >>> sums_and_agreement(torch.tensor([0.5, 2.0]), 3)
    ([0.5, 2.0], 3)
    """
    if world_size() == 1:
        return values.tolist(), checked(code)
    checked(code)
    verdict = [float(i == code & VERDICT) for i in range(WORST + 1)]
    requests = [float(bool(code & bit)) for bit in REQUESTS]
    device = _reducing_on(values.device)
    told = torch.tensor([*verdict, *requests], dtype=torch.float64, device=device)
    summed = torch.cat([told, values.to(device, torch.float64)])
    dist.all_reduce(summed)
    read = summed.tolist()
    worst = max(i for i in range(WORST + 1) if read[i] > 0)
    asked = sum(bit for bit, count in zip(REQUESTS, read[WORST + 1 :], strict=False) if count > 0)
    return read[len(told) :], worst + asked


def sum_over_ranks(count: int, device: torch.device | None = None) -> int:
    """The sum of ``count`` over all ranks, on every rank; ``count`` itself on one process.

    >>> sum_over_ranks(3)
    3
    """
    if world_size() == 1:
        return count
    total = torch.tensor(count, dtype=torch.int64, device=_reducing_on(device))
    dist.all_reduce(total)
    return int(total.item())


def max_over_ranks(value: float, device: torch.device | None = None) -> float:
    """The largest ``value`` of all ranks; NaN where one is NaN.

    >>> max_over_ranks(2.5)
    2.5
    """
    if world_size() == 1:
        return value
    # A NaN is told beside the maximum, since gloo's MAX loses it.
    pair = torch.tensor([value, float(value != value)], dtype=torch.float64, device=_reducing_on(device))
    dist.all_reduce(pair, op=dist.ReduceOp.MAX)
    largest, is_nan = pair.tolist()
    return float("nan") if is_nan else largest


def everyones(value: Any) -> list[Any]:
    """The plain value of each rank, in order of rank, on every rank. They are pickled between the run's own processes.

    >>> everyones("here")
    ['here']
    """
    if world_size() == 1:
        return [value]
    told: list[Any] = [None] * world_size()
    dist.all_gather_object(told, value)
    return told


def mains(value: Any) -> Any:
    """The main process's ``value``, on every rank.

    >>> mains(5)
    5
    """
    return everyones(value if is_main() else None)[0]


def _reducing_on(device: torch.device | None) -> torch.device:
    on_gpu = device is not None and device.type == "cuda" and "nccl" in str(dist.get_backend())
    return device if on_gpu and device is not None else torch.device("cpu")


@contextlib.contextmanager
def process_group(backend: str = "gloo", *, timeout_s: float = 600.0, **place: Any) -> Iterator[None]:
    """A process group while entered; each wait for another rank is bounded by ``timeout_s``.

    Args:
        backend: gloo on CPUs, nccl on GPUs.
        place: ``init_method``, ``rank`` and ``world_size``; without them they are torchrun's environment.

    On a good end the ranks wait for each other, so that none leaves while another still talks to it.
    """
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s), **place)
    if "nccl" in backend:  # plain values travel by the present device, which is to be another on each rank
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", dist.get_rank())) % torch.cuda.device_count())
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()

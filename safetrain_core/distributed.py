"""Rank, and agreement between ranks; on one process, the identity."""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["agree", "is_main", "sum_over_ranks", "world_size"]


def world_size() -> int:
    """Number of processes in the run: 1 unless ``torch.distributed`` is initialised.

    >>> world_size()
    1
    """
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_main() -> bool:
    """True on the one process that writes logs and prints.

    >>> is_main()
    True
    """
    return world_size() == 1 or dist.get_rank() == 0


def agree(code: int, device: torch.device | None = None) -> int:
    """The largest ``code`` of all ranks, on every rank; ``code`` itself on one process.

    Integers are reduced, never floats: gloo's MAX over floats loses NaN.

    Args:
        code: a small integer, 0 for "all is well", larger for worse.
        device: the rank's own device; nccl needs it, gloo reduces on the CPU.

    >>> agree(2)
    2
    """
    return _reduced(code, dist.ReduceOp.MAX, device) if world_size() > 1 else code


def sum_over_ranks(count: int, device: torch.device | None = None) -> int:
    """The sum of ``count`` over all ranks, on every rank; ``count`` itself on one process.

    >>> sum_over_ranks(3)
    3
    """
    return _reduced(count, dist.ReduceOp.SUM, device) if world_size() > 1 else count


def _reduced(value: int, op: dist.ReduceOp.RedOpType, device: torch.device | None) -> int:
    on_gpu = device is not None and device.type == "cuda" and "nccl" in str(dist.get_backend())
    tensor = torch.tensor(value, dtype=torch.int64, device=device if on_gpu else "cpu")
    dist.all_reduce(tensor, op=op)
    return int(tensor.item())

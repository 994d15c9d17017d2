"""Rank, and agreement between ranks; on one process, the identity."""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["agree", "is_main", "world_size"]


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
        device: where to reduce; nccl needs the rank's own CUDA device, gloo the CPU (default).

    >>> agree(2)
    2
    """
    if world_size() == 1:
        return code
    on_gpu = device is not None and device.type == "cuda" and "nccl" in str(dist.get_backend())
    worst = torch.tensor(code, dtype=torch.int64, device=device if on_gpu else "cpu")
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return int(worst.item())

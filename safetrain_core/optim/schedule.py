"""Learning-rate schedules as pure functions of the update count."""

from __future__ import annotations

import math

import torch
from torch.optim.lr_scheduler import LambdaLR

__all__ = ["SCHEDULES", "Schedule", "lr_factor", "make_schedule"]

#: The schedules there are.
SCHEDULES = ("cosine", "constant", "linear_warmup_then_constant")


def lr_factor(updates: int, kind: str, *, total_steps: int | None = None, warmup_ratio: float = 0.0) -> float:
    """What the peak learning rate is multiplied by for the update after ``updates`` updates.

    With W = warmup_ratio x total_steps, T = total_steps: warm-up (u + 1) / W while u < W; then
    (1 + cos(pi (u - W) / (T - W))) / 2 for ``cosine``, 1 for the others; past T the last value.

    Args:
        updates: optimizer steps taken so far, from 0.
        kind: one of ``SCHEDULES``; ``constant`` ignores the rest.
        total_steps: T, in updates, at least 1; needed by all but ``constant``.
        warmup_ratio: 0..1.

    Raises:
        ValueError: an unknown kind, or a value out of range.

    Source: Loshchilov and Hutter 2017, "SGDR", arXiv:1608.03983, equation 5 with one cycle and a floor of 0.

    >>> [round(lr_factor(u, "cosine", total_steps=4, warmup_ratio=0.5), 3) for u in range(6)]
    [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    """
    if kind not in SCHEDULES:
        raise ValueError(f"scheduler_type={kind!r} is unknown; choose one of {', '.join(SCHEDULES)}")
    if kind == "constant":
        return 1.0
    if total_steps is None or total_steps < 1:
        raise ValueError(f"scheduler_total_steps={total_steps} must be at least 1 for scheduler_type={kind}")
    if not 0 <= warmup_ratio <= 1:
        raise ValueError(f"scheduler_warmup_ratio={warmup_ratio} must be within 0..1")
    u, warmup = min(updates, total_steps), round(warmup_ratio * total_steps)
    if u < warmup:
        return (u + 1) / warmup
    if kind == "linear_warmup_then_constant":
        return 1.0
    return (1 + math.cos(math.pi * (u - warmup) / max(1, total_steps - warmup))) / 2


class Schedule:
    """``lr_factor`` with its knobs held: an object, so that a checkpoint holds them and another schedule is noticed.

    >>> Schedule("cosine", total_steps=4)(2)
    0.5
    """

    def __init__(self, kind: str, *, total_steps: int | None = None, warmup_ratio: float = 0.0) -> None:
        self.kind, self.total_steps, self.warmup_ratio = kind, total_steps, warmup_ratio

    def __call__(self, updates: int) -> float:
        return lr_factor(updates, self.kind, total_steps=self.total_steps, warmup_ratio=self.warmup_ratio)


def make_schedule(
    optimizer: torch.optim.Optimizer, kind: str, *, total_steps: int | None = None, warmup_ratio: float = 0.0
) -> LambdaLR:
    """``lr_factor`` as a torch scheduler over ``optimizer``; call its ``step()`` once per optimizer step taken.

    Args:
        kind, total_steps, warmup_ratio: as for ``lr_factor``. The peak is the learning rate that ``optimizer`` has.

    Raises:
        ValueError: as ``lr_factor``.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    >>> make_schedule(optimizer, "cosine", total_steps=8, warmup_ratio=0.5).get_last_lr()
    [0.025]
    """
    if kind == "constant":  # whatever the length: two constant schedules are the same one
        return LambdaLR(optimizer, Schedule(kind))
    return LambdaLR(optimizer, Schedule(kind, total_steps=total_steps, warmup_ratio=warmup_ratio))

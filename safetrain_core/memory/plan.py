"""Which recompute policy fits a GPT of a given size into a budget, and what it costs, before anything is run.

No torch here: the answer comes at once. The closed forms are in ``shape``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .rules import checked_count
from .shape import RecomputeOption, Shape

__all__ = ["RecomputePlan", "plan_recompute"]

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}

#: Share of the budget that a plan leaves free: for the allocator's gaps, and for what is not modelled.
HEADROOM = 0.10


@dataclass(frozen=True, slots=True)
class RecomputePlan:
    """What ``plan_recompute`` found.

    Attributes:
        choice: the cheapest option that fits, or None. options: all, the simplest first.
        budget_bytes, usable_bytes: as given, and less the headroom. advice: what to do, in a sentence.
        micro_batch, accumulation_steps: the largest micro-batch that fits, which is the batch asked for if there is a
            ``choice``; None where not even one sequence does.
        state_bytes: weights, gradients and AdamW's two moments in the same dtype, which come on top.

    >>> plan = plan_recompute(8, 64, 32, 16, 4, "float32", budget_bytes=5_000_000)
    >>> plan.choice.name, plan.micro_batch, plan.usable_bytes
    ('full', 16, 4500000)
    >>> print(plan.report().splitlines()[0])
    policy            activations  more FLOPs   fits 4.50 MB
    """

    choice: RecomputeOption | None
    options: tuple[RecomputeOption, ...]
    budget_bytes: int
    usable_bytes: int
    micro_batch: int | None
    accumulation_steps: int | None
    state_bytes: int
    advice: str

    def report(self) -> str:
        """A table of the options, and the advice."""
        rows = [f"{'policy':<15}{'activations':>14}{'more FLOPs':>12}   fits {_size(self.usable_bytes)}"]
        for option in self.options:
            fits = "yes" if option.activation_bytes <= self.usable_bytes else "no"
            host = f", {_size(option.host_bytes)} on the host" if option.host_bytes else ""
            mark = "   <- the plan" if option == self.choice else ""
            size, overhead = f"{_size(option.activation_bytes):>14}", f"{option.overhead:>11.1%}"
            rows.append(f"{option.name:<15}{size}{overhead}   {fits}{host}{mark}")
        return "\n".join([*rows, "", self.advice])


def plan_recompute(
    layers: int,
    hidden: int,
    seq: int,
    batch: int,
    heads: int,
    dtype: Any,
    budget_bytes: int,
    attention: str = "flash",
    vocab: int = 0,
) -> RecomputePlan:
    """The cheapest policy whose activations fit into ``budget_bytes`` with 10 % headroom, or what would fit.

    Args:
        layers, hidden, seq, batch, heads: the GPT's depth and width, tokens per sequence, sequences per micro-batch.
        dtype: of weights and activations: a torch dtype or its name.
        budget_bytes: memory for activations alone; weights, gradients and optimizer state come on top.
        attention: the kernel: "flash" keeps no scores, so that recomputing the core buys next to nothing; "math" keeps
            them all.
        vocab: size of the embedding and the head, which share a weight; 0 leaves them and the loss out.

    Cheapest is by recomputed FLOPs, then by simplicity. ``offload`` is told, never chosen: its time depends on the bus.

    Raises:
        ValueError: a size below 1, heads that do not divide the width, another dtype or kernel.

    >>> plan_recompute(64, 8192, 8192, 1, 64, "bfloat16", 80_000_000_000).choice.policy
    'full'
    >>> plan_recompute(64, 8192, 8192, 1, 64, "bfloat16", 8_000_000_000).choice is None
    True
    """
    sizes = {"layers": layers, "hidden": hidden, "seq": seq, "batch": batch, "heads": heads}
    for name, value in {**sizes, "budget_bytes": budget_bytes}.items():
        checked_count(name, value)
    checked_count("vocab", vocab, least=0)
    if hidden % heads:
        raise ValueError(f"hidden={hidden} is not a multiple of heads={heads}; change one")
    dtype = str(dtype).removeprefix("torch.")
    if dtype not in BYTES:
        raise ValueError(f"dtype={dtype} is not one that is planned for; use {', '.join(BYTES)}")
    if attention not in ("flash", "math"):
        raise ValueError(f"attention={attention!r} is not a kernel that is planned for; use flash or math")
    shape = Shape(layers, hidden, seq, batch, heads, BYTES[dtype], attention, vocab)
    usable = int(budget_bytes * (1 - HEADROOM))
    options = tuple(shape.options())
    choice = _cheapest(options, usable)
    micro = batch if choice else _largest(lambda b: _fits(dataclasses.replace(shape, batch=b), usable), batch)
    steps = math.ceil(batch / micro) if micro else None
    state = 4 * BYTES[dtype] * (layers * (12 * hidden**2 + 9 * hidden) + (vocab + seq + 2) * hidden)
    advice = _advice(shape, options, choice, usable, micro, steps)
    advice += f"\nNot in the budget: weights, gradients and AdamW moments in {dtype}, {_size(state)}."
    return RecomputePlan(choice, options, budget_bytes, usable, micro, steps, state, advice)


def _size(count: float) -> str:
    """Bytes in words; a small model's are not 0.00 GB.

    >>> [_size(count) for count in (72e9, 12_345_678, 4_321_000, 12_300, 0)]
    ['72.00 GB', '12.35 MB', '4.32 MB', '12.30 kB', '0.00 kB']
    """
    unit, name = (1e9, "GB") if count >= 1e9 else (1e6, "MB") if count >= 1e6 else (1e3, "kB")
    return f"{count / unit:.2f} {name}"


def _cheapest(options: tuple[RecomputeOption, ...], usable: int) -> RecomputeOption | None:
    fitting = [o for o in options if o.activation_bytes <= usable and o.policy != "offload"]
    return min(fitting, key=lambda option: option.overhead, default=None)  # of equals the first, the simplest


def _fits(shape: Shape, usable: int) -> bool:
    return _cheapest(tuple(shape.options()), usable) is not None


def _largest(fits: Callable[[int], bool], limit: int) -> int | None:
    """The largest number below ``limit`` that fits; bytes grow with it, so that halving finds it."""
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low or None


def _advice(
    shape: Shape,
    options: tuple[RecomputeOption, ...],
    choice: RecomputeOption | None,
    usable: int,
    micro: int | None,
    steps: int | None,
) -> str:
    if choice is not None:
        return (
            f"Plan: {choice.name}, {_size(choice.activation_bytes)} of activations at the peak, "
            f"{choice.overhead:.1%} more FLOPs."
        )
    least = min((o for o in options if o.policy != "offload"), key=lambda o: o.activation_bytes)
    told = f"Nothing fits: the least is {least.name} with {_size(least.activation_bytes)}"
    if micro is not None:
        cheapest = _cheapest(tuple(dataclasses.replace(shape, batch=micro).options()), usable)
        how = cheapest.name if cheapest is not None else ""
        return f"{told}. What would: batch {micro} with {steps} accumulation steps, and {how}."
    seq = _largest(lambda length: _fits(dataclasses.replace(shape, batch=1, seq=length), usable), shape.seq)
    if seq is not None:
        return f"{told}, and one sequence is too much. What would: sequences of {seq} tokens at batch 1."
    return f"{told}, and not even one token fits. What would: a smaller model, or a larger budget."

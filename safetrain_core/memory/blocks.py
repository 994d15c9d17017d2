"""Which layers of a model in hand to recompute, so that its activations fit a budget at the fewest FLOPs.

Layers differ: in a model of unequal blocks the right ones save more for less. Two counted steps, one that keeps
everything and one that recomputes every layer, tell for each layer what it leaves behind either way, what its own
forward and backward take on top, and what running it again costs. What is alive while layer i runs backward is what the
layers before it left, and its own share; so the best choice is a shortest path over the layers, exact up to the
assumption that layers run in order and do not share storage. The choice is then counted, too.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .count import Counter
from .measure import LossFn, measure_recompute, step_of
from .recompute import Policy, layers_of, recomputed
from .rules import checked_count

__all__ = ["BlockPlan", "plan_recompute_for"]

#: More partial choices than this are thinned out: then the plan is near the best, no longer the best itself.
FRONTIER = 2000


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """What ``plan_recompute_for`` found: ``apply_recompute(model, plan.layers)`` carries it out.

    Attributes:
        layers: names of the layers to recompute; all of them where not even that fits.
        fits: whether the count is within the budget. activation_bytes: counted at the peak, with this plan.
        plain_bytes: counted with none recomputed. recompute_flops, overhead: as ``measure_recompute`` counts them.

    >>> plan = BlockPlan(("blocks.1",), True, 3_000_000, 5_000_000, 4_000_000, 10**9, overhead=0.125)
    >>> plan.report()
    'recompute blocks.1: 3.00 MB of 4.00 MB, 12.5% more FLOPs (kept whole: 5.00 MB)'
    """

    layers: tuple[str, ...]
    fits: bool
    activation_bytes: int
    plain_bytes: int
    budget_bytes: int
    recompute_flops: int
    overhead: float

    def report(self) -> str:
        """In words."""
        what = ", ".join(self.layers) or "nothing"
        told = (
            f"{self.activation_bytes / 1e6:.2f} MB of {self.budget_bytes / 1e6:.2f} MB, {self.overhead:.1%} more FLOPs"
        )
        if self.fits:
            return f"recompute {what}: {told} (kept whole: {self.plain_bytes / 1e6:.2f} MB)"
        return f"nothing fits: even with every layer recomputed {told}; take a smaller micro-batch and accumulate"


@dataclass(slots=True)
class _Layer:
    """Bytes counted around one layer in one of the two steps."""

    starts_at: int = 0
    leaves: int = 0
    forward_peak: int = 0
    backward_peak: int = 0
    recompute_flops: int = 0


@dataclass(slots=True)
class _Profile:
    layers: list[_Layer]
    before: int  # alive when the first layer starts
    loss_peak: int  # from the last layer's end to its backward
    end_peak: int  # after the first layer's backward


def _profile(model: nn.Module, batch: tuple[Any, Any], loss_fn: LossFn | None, policy: Policy) -> _Profile:
    """One counted step. A layer's backward begins when the gradient of its output is there."""
    modules = [module for stack in layers_of(model) for _, module in stack]
    layers = [_Layer() for _ in modules]
    handles: list[Any] = []
    backward: list[int] = []  # layers in the order of their backward passes
    loss_peak = 0
    with step_of(model, batch, loss_fn) as step, recomputed(model, policy):
        counter = Counter(model, tree_leaves(batch))
        flops = 0

        def close() -> int:
            """End the present phase; its peak goes to the layer whose backward it was."""
            nonlocal flops
            peak, now = counter.peak_since(), counter.flops.get("recompute", 0)
            if backward:
                layers[backward[-1]].backward_peak = max(layers[backward[-1]].backward_peak, peak)
                layers[backward[-1]].recompute_flops += now - flops
            flops = now
            return peak

        def starts(i: int, *_: Any) -> None:
            counter.peak_since()
            layers[i].starts_at = counter.now

        def ends(i: int, module: nn.Module, args: Any, output: Any) -> None:
            layers[i].forward_peak = counter.peak_since()
            layers[i].leaves = counter.now - layers[i].starts_at
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    handles.append(leaf.register_hook(functools.partial(arrives, i)))

        def arrives(i: int, gradient: Tensor) -> None:
            nonlocal loss_peak
            if backward and backward[-1] == i:
                return  # of several outputs
            peak = close()
            loss_peak = loss_peak if backward else peak
            backward.append(i)

        for i, module in enumerate(modules):
            handles.append(module.register_forward_pre_hook(functools.partial(starts, i)))
            handles.append(module.register_forward_hook(functools.partial(ends, i)))
        try:
            with counter:
                step(counter)
                end_peak = close()
        finally:
            for handle in handles:
                handle.remove()
    for layer, following in itertools.pairwise(layers):
        layer.leaves = following.starts_at - layer.starts_at
    return _Profile(layers, layers[0].starts_at, loss_peak, end_peak)


def _best(plain: _Profile, again: _Profile, budget: int) -> list[bool] | None:
    """Which layers to recompute for the fewest FLOPs, or None where nothing fits; see the top of this module."""
    # What is left behind so far -> (FLOPs, layers recomputed, choices). Only those that no other beats in both.
    paths: list[tuple[int, int, int, tuple[bool, ...]]] = [(plain.before, 0, 0, ())]
    for kept, redone in zip(plain.layers, again.layers, strict=True):
        longer = []
        for left, flops, count, chosen in paths:
            for choice, layer in ((False, kept), (True, redone)):
                work = max(layer.forward_peak - layer.starts_at, layer.backward_peak - layer.starts_at)
                if left + work <= budget:
                    cost = layer.recompute_flops if choice else 0
                    longer.append((left + layer.leaves, flops + cost, count + choice, (*chosen, choice)))
        longer.sort(key=lambda path: path[:3])
        paths = []
        for path in longer:
            if not paths or path[1:3] < paths[-1][1:3]:
                paths.append(path)
        if len(paths) > FRONTIER:
            paths = list({path[0] * FRONTIER // budget: path for path in paths}.values())
    loss = plain.loss_peak - _left(plain)
    fitting = [path for path in paths if path[0] + loss <= budget]
    return list(min(fitting, key=lambda path: path[1:3])[3]) if fitting else None


def _left(profile: _Profile) -> int:
    return profile.before + sum(layer.leaves for layer in profile.layers)


def plan_recompute_for(
    model: nn.Module,
    batch: tuple[Any, Any],
    budget_bytes: int,
    *,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    headroom: float = 0.0,
) -> BlockPlan:
    """Measure the model's layers, and pick which to recompute. The model is left as it was.

    Args:
        batch: ``(inputs, targets)`` as it is trained on; see ``measure_recompute``, which counts.
        budget_bytes: for activations at their peak, as ``RecomputeCost.activation_bytes``; weights, gradients and
            optimizer state come on top.
        headroom: share of the budget left free. The count is exact; a GPU's allocator needs some 10 % more.

    Raises:
        ValueError: a budget below 1, headroom outside 0..1, a model without layers.

    >>> import torch
    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8 * n), nn.Tanh(), nn.Linear(8 * n, 8)) for n in (2, 4, 2)))
    >>> plan_recompute_for(model, (torch.ones(16, 8), torch.ones(16, 8)), 8_000).layers
    ('0',)
    """
    checked_count("budget_bytes", budget_bytes)
    if not 0 <= headroom < 1:
        raise ValueError(f"headroom={headroom} must be a share of at least 0 and below 1")
    names = list(dict.fromkeys(name for stack in layers_of(model) for name, _ in stack))
    usable = int(budget_bytes * (1 - headroom))
    measure = functools.partial(measure_recompute, model, batch, loss_fn=loss_fn, timed_runs=0)
    plain = measure(policy="none")
    chosen, cost = list[str](), plain
    if plain.activation_bytes > usable:
        kept, redone = (_profile(model, batch, loss_fn, policy) for policy in ("none", names))
        aim = usable
        for _ in range(5):  # where layers are not as independent as assumed, the count says so: aim lower
            best = _best(kept, redone, aim)
            if best is None:
                break
            chosen = [name for name, choice in zip(names, best, strict=True) if choice]
            cost = measure(policy=chosen)
            if cost.activation_bytes <= usable:
                break
            aim -= cost.activation_bytes - usable
        if cost.activation_bytes > usable:
            chosen, cost = names, measure(policy=names)
    return BlockPlan(
        layers=tuple(chosen),
        fits=cost.activation_bytes <= usable,
        activation_bytes=cost.activation_bytes,
        plain_bytes=plain.activation_bytes,
        budget_bytes=budget_bytes,
        recompute_flops=cost.recompute_flops,
        overhead=cost.overhead,
    )

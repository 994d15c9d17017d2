"""Whether a step clips what it should, in the right place: by planting gradients of a known norm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .finding import Evidence, Finding
from .gradients import Bench, StepFn, cut, samples_in
from .known import found
from .watched import kept_rng

__all__ = ["probe_clip_order"]

#: Gradients are made this small to see them unclipped, even multiplied by a loss scaling factor; a power of two.
TINIEST = 2.0**-40
#: The norm that reaches the optimizer may be this far from what it should be: half-precision rounding stays below.
SLACK = 0.02
#: A cosine below this is another direction.
STRAIGHT = 0.999
#: A GradScaler that is kept where nobody finds it is known by its factor, a power of two, of at least this.
SCALE = 2.0**8


def probe_clip_order(
    step_fn: StepFn,
    make_model: Callable[[], Any],
    batch: Any,
    max_norm: float,
    *,
    accum_steps: int = 1,
    times: float = 16.0,
    seed: int = 0,
) -> list[Finding]:
    """Whether the step clips unscaled gradients by their global L2 norm: above ``max_norm`` to it, below not at all.

    Gradients of norm ``times * max_norm``, and of half of ``max_norm``, are planted on their way to the weights, and
    the norm that the optimizer is given is compared with what it should be. On gradients that are still scaled by S,
    a clip leaves max_norm / S.

    Args:
        step_fn, make_model, batch: as for ``probe_accumulation``.
        max_norm: the threshold that the step clips to, above 0.
        accum_steps: micro-batches per window; 1 = the whole batch at once.
        times: how far above the threshold the planted gradient is; lower it for a step that refuses such a norm.

    Returns:
        ``clip_before_unscale``, ``clip_without_effect``, ``clip_at_another_norm``, ``clip_bends_gradient``,
        ``clip_below_threshold``; or nothing, where all holds.

    Raises:
        ValueError: a step that cannot be judged, as for ``probe_accumulation``.

    >>> def make():
    ...     model = torch.nn.Linear(4, 1)
    ...     return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    >>> def step(run, micro_batches):
    ...     model, optimizer, scaler = run
    ...     optimizer.zero_grad()
    ...     for x, y in micro_batches:
    ...         scaler.scale(torch.nn.functional.mse_loss(model(x), y)).backward()
    ...     torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # no unscale_ before it
    ...     scaler.step(optimizer)
    ...     scaler.update()
    >>> print(probe_clip_order(step, make, (torch.rand(8, 4), torch.rand(8, 1)), max_norm=1.0)[0].symptom)
    gradients of norm 16 reach the optimizer with norm 1.526e-05 instead of 1
    """
    if not 0 < max_norm < math.inf or not 1 < times < math.inf:
        raise ValueError(f"max_norm={max_norm} must be above 0 and times={times} above 1, both finite")
    samples = samples_in(batch)
    if not 1 <= accum_steps <= samples:
        raise ValueError(f"accum_steps={accum_steps} must be from 1 to the batch's {samples} samples")
    size = samples // accum_steps
    window = cut(batch, [size] * accum_steps) if accum_steps > 1 else [batch]
    with kept_rng():
        bench = Bench(step_fn, make_model, seed)
        free = bench.gradient(window, TINIEST)[0] / TINIEST
        norm = free.norm().item()
        if not 0 < norm < math.inf:
            raise ValueError(f"the batch makes a gradient of norm {norm}; give an ordinary batch")
        above, scale = bench.gradient(window, times * max_norm / norm)
        below, _ = bench.gradient(window, 0.5 * max_norm / norm)
    return [*_judge_above(above, free, max_norm, times, scale), *_judge_below(below, max_norm)]


def _judge_above(above: Tensor, free: Tensor, max_norm: float, times: float, scale: float | None) -> list[Finding]:
    got = above.norm().item()
    told = Evidence(None, {"norm planted": times * max_norm, "norm at the optimizer": got, "max_norm": max_norm})
    symptom = (
        f"gradients of norm {times * max_norm:.4g} reach the optimizer with norm {got:.4g} instead of {max_norm:.4g}"
    )
    if not got <= max_norm * times * (1 - SLACK):
        return [found("clip_without_effect", symptom, told)]
    cosine = torch.dot(above, free).item() / (got * free.norm().item() or 1.0)
    if not cosine >= STRAIGHT and got > max_norm * (1 + SLACK):
        return [found("clip_without_effect", symptom, told)]  # on some of the weights only
    if not cosine >= STRAIGHT:
        bent = f"the clip turns the gradient: cosine {cosine:.3f} with what it was"
        return [found("clip_bends_gradient", bent, told)]
    ratio = max_norm / got
    if abs(ratio - 1) < SLACK:
        return []
    if scale is not None and scale > 1 and abs(ratio / scale - 1) < SLACK:
        told = Evidence(None, {**told.values, "loss scaling factor": scale})
        return [found("clip_before_unscale", symptom, told)]
    if scale is None and ratio >= SCALE and abs(math.log2(ratio) - round(math.log2(ratio))) < SLACK:
        return [found("clip_before_unscale", symptom, told)]
    return [found("clip_at_another_norm", symptom, told)]


def _judge_below(below: Tensor, max_norm: float) -> list[Finding]:
    got, planted = below.norm().item(), 0.5 * max_norm
    if not got > planted * (1 + SLACK):
        return []  # smaller: the finding above has said it
    told = Evidence(None, {"norm planted": planted, "norm at the optimizer": got, "max_norm": max_norm})
    return [found("clip_below_threshold", f"gradients of norm {planted:.4g} are scaled up to {got:.4g}", told)]

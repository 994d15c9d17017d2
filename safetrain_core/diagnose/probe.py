"""Faults that no log shows, found by running the user's own step: what its optimizer is given, and what it should be.

A probe calls ``step_fn(run, micro_batches)``, which takes one optimizer step of ``run = make_model()`` on a list of
micro-batches, several times on fresh models, with gradients made small or large on their way to the weights. ``run``
may be the model, a tuple, or any object that has model and optimizer among its attributes, ours too::

    probe_accumulation(lambda amp, window: amp.step_window(window), lambda: AmpTrainState(tiny()), (x, y))
    probe_clip_order(lambda run, window: train_step(*run, window[0]), make_parts, batch, max_norm=1.0)

An empty list says that all that was looked at holds. Dropout modules are switched off in the models made; random states
of the caller are put back. One process; small models: a few copies of all gradients are held, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .finding import Evidence, Finding
from .gradients import Bench, StepFn, cut, samples_in, steps_per_weight
from .known import found
from .watched import kept_rng

__all__ = ["probe_accumulation"]

#: Gradients are made this small, so that no clip acts on them; a power of two, which rounds nothing.
TINY = 2.0**-20
#: A factor, or a share of the window, this far from what it should be is a fault: half-precision rounding stays below.
SLACK = 0.05
#: The same where the forward pass is random beyond dropout modules.
RANDOM_SLACK = 0.3
#: Below this share of the largest weight a micro-batch does not count at all.
LOST = 0.02
#: Above this share, what the micro-batches do not explain shows that the window is no sum of them.
UNEXPLAINED = 0.02


def probe_accumulation(
    step_fn: StepFn,
    make_model: Callable[[], Any],
    batch: Any,
    *,
    accum_steps: int = 4,
    whole_loss: Callable[[Any, Any], Tensor] | None = None,
    unequal: bool = True,
    seed: int = 0,
) -> list[Finding]:
    """Whether K micro-batches make the gradient that one batch of all their samples makes.

    The batch is cut into K pieces, the first larger than the others. The gradient of the window is then written as a
    weighted sum of the pieces' own gradients: the weights should be each piece's share of the samples (of the valid
    targets, where the loss is a mean over those). All 1 means that nothing was divided, 1/K^2 that it was so twice.

    Args:
        step_fn: ``step_fn(run, micro_batches)``, one optimizer step for any number of micro-batches.
        make_model: makes ``run`` with the same weights each time (it is called under ``seed``).
        batch: tensors with samples first, in tuples, lists or dicts; at least ``2 * accum_steps`` different samples.
        accum_steps: K, at least 2.
        whole_loss: ``whole_loss(run, batch) -> scalar``, the mean loss of a batch, undivided. Needed where the step
            divides by a constant K or counts micro-batches itself; by default ``step_fn`` on one piece is the measure.
        unequal: also judge how pieces of unequal size are weighed; False where yours never are.

    Returns:
        ``loss_not_divided``, ``loss_divided_twice``, ``loss_wrongly_divided``, ``micro_batches_lost``,
        ``step_per_micro_batch``, ``not_a_sum``, ``unequal_micro_batches``; or nothing, where all holds.

    Raises:
        ValueError: a step that cannot be judged: none taken, models that differ, samples that are all alike.

    >>> def step(run, micro_batches):
    ...     model, optimizer = run
    ...     optimizer.zero_grad()
    ...     for x, y in micro_batches:
    ...         torch.nn.functional.mse_loss(model(x), y).backward()  # not divided
    ...     optimizer.step()
    >>> def make():
    ...     model = torch.nn.Linear(4, 1)
    ...     return model, torch.optim.AdamW(model.parameters())
    >>> [f.rule for f in probe_accumulation(step, make, (torch.rand(8, 4), torch.rand(8, 1)), unequal=False)]
    ['loss_not_divided']
    """
    samples = samples_in(batch)
    if not 2 <= accum_steps <= samples // 2:
        raise ValueError(f"accum_steps={accum_steps} must be from 2 to half of the batch's {samples} samples")
    small = samples // accum_steps
    if unequal:  # one sample alone only where it must be: BatchNorm takes none
        small = max(1 if small == 2 else 2, small // 2)
    sizes = [samples - small * (accum_steps - 1)] + [small] * (accum_steps - 1)
    pieces = cut(batch, sizes)
    with kept_rng():
        bench = Bench(step_fn, make_model, seed)
        taken, _ = bench.updates(pieces, TINY)
        steps = steps_per_weight(taken)
        if steps > 1:
            told = Evidence(None, {"optimizer steps": steps, "micro-batches": accum_steps})
            return [found("step_per_micro_batch", f"{steps} optimizer steps in one window of {accum_steps}", told)]
        window, _ = bench.gradient(pieces, TINY)

        def alone(part: Any, seed: int | None = None) -> Tensor:
            if whole_loss is not None:
                return bench.gradient_of(whole_loss, part)
            return bench.gradient([part], TINY, seed)[0] / TINY

        singles = torch.stack([alone(piece) for piece in pieces])
        whole = alone(batch)
        random = whole_loss is None and _apart(alone(pieces[0], seed + 1), singles[0]) > UNEXPLAINED
    weights, rest = _weights(window / TINY, singles)
    expected, whole_rest = _weights(whole, singles)
    if whole_rest > UNEXPLAINED:  # BatchNorm: the whole batch has statistics of its own
        expected = torch.tensor(sizes, dtype=torch.float64) / samples
    return _judge_weights(weights, expected, rest, random=random, unequal=unequal)


def _weights(gradient: Tensor, singles: Tensor) -> tuple[Tensor, float]:
    """What each of ``singles`` (K, N) weighs in ``gradient`` (N), by least squares; and the share left unexplained."""
    norms = singles.norm(dim=1)
    if not (norms.min() > 0) or not gradient.isfinite().all():
        raise ValueError("a micro-batch has no gradient, or one that is not finite; give an ordinary batch")
    unit = singles / norms[:, None]
    smallest = torch.linalg.svdvals(unit)[-1].item() if len(unit) <= unit.shape[1] else 0.0
    if not (smallest > 1e-4):
        raise ValueError(
            f"the gradients of {len(unit)} micro-batches are not independent of one another: give a batch of different "
            "samples, or fewer accum_steps, or a model with more weights"
        )
    fitted = torch.linalg.lstsq(unit.T, gradient[:, None]).solution[:, 0]
    return fitted / norms, _apart(unit.T @ fitted, gradient)


def _apart(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm().clamp_min(1e-300)).item()


def _judge_weights(weights: Tensor, expected: Tensor, rest: float, *, random: bool, unequal: bool) -> list[Finding]:
    """Findings by what each micro-batch weighs; where the forward pass is random, only by the sum of the weights."""
    count = len(weights)
    got, right = (" ".join(f"{w:.4g}" for w in values.tolist()) for values in (weights, expected))
    evidence = Evidence(None, {"weights of the micro-batches": got, "right": right})
    if rest > UNEXPLAINED and not random:
        symptom = "the gradient of a window is no sum of its micro-batches' gradients"
        return [found("not_a_sum", symptom, Evidence(None, {"unexplained share": rest}))]
    lost = int((weights.abs() < LOST * weights.abs().max()).sum())
    if lost and not random:
        return [found("micro_batches_lost", f"{lost} of {count} micro-batches leave no gradient", evidence)]
    factor = (weights.sum() / expected.sum()).item()
    findings = []
    if not abs(factor - 1) < (RANDOM_SLACK if random else SLACK):
        rules = {float(count): "loss_not_divided", 1 / count: "loss_divided_twice"}
        rule = next((rule for f, rule in rules.items() if abs(factor / f - 1) < 2 * SLACK), "loss_wrongly_divided")
        findings.append(
            found(rule, f"the gradient of {count} micro-batches is {factor:.3g} x that of one batch", evidence)
        )
    shares, told = weights / weights.sum(), expected / expected.sum()
    if unequal and not random and (shares - told).abs().max() > SLACK:
        measure = "equally" if (shares - 1 / count).abs().max() < SLACK else "by another measure"
        symptom = f"micro-batches of unequal size are weighed {measure}"
        findings.append(found("unequal_micro_batches", symptom, evidence))
    return findings

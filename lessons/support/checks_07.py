"""The checks of lesson 07's exercises: each takes an answer and returns a sentence.

It starts with "Right" or "Not yet", and then says what is wrong and where to look next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from safetrain_core import GaLore
from torch import Tensor, nn

from . import low_rank as lab
from .progress import exercise

#: Of the repaired step's trial.
LR, RANK, INTERVAL, SCALE = 0.01, 2, 4, 0.25
WIDE, TALL = (6, 10), (9, 5)

Step = Callable[..., Any]


def _raised(error: Exception) -> str:
    return f"Not yet: it raised {type(error).__name__}: {error}."


# --- A: how many numbers --------------------------------------------------------------------------------------


@exercise
def check_numbers(numbers: Callable[[int, int, int], Any]) -> str:
    """Exercise A: ``numbers(m, n, rank)`` that GaLore around AdamW keeps for one weight, the step count left out."""
    for m, n, rank in (
        (64, 256, 8),
        (256, 64, 8),
        (64, 64, 60),
        (64, 256, 64),
        (8, 8, 200),
    ):
        try:
            answer = numbers(m, n, rank)
        except Exception as error:  # noqa: BLE001 - whatever a learner's code raises is worth a sentence
            return _raised(error)
        with lab.quiet():
            right = lab.one_weight_bytes(m, n, rank) // 4
        if answer == right:
            continue
        told = f"for a weight of {m} x {n} and rank {rank}, {right} numbers are counted, and you said {answer}"
        small, large = sorted((m, n))
        if rank >= small:
            return f"Not yet: {told}. A side of {small} is not above this rank: the weight is not projected."
        if answer == 2 * rank * large:
            return (
                f"Not yet: {told}. These are the moments; the basis has to be kept as well."
            )
        if answer == rank * (small + large):
            return f"Not yet: {told}. AdamW keeps two moments of the projected gradient."
        if answer == rank * (large + 2 * small):
            return (
                f"Not yet: {told}. The basis stands on the smaller side; what is left for the moments to run along "
                "is the larger one."
            )
        return f"Not yet: {told}. Which shapes do the basis and a projected gradient have?"
    return (
        "Right: rank x smaller for the basis, 2 x rank x larger for the moments; at 64 x 64 and rank 60 that is more "
        "than AdamW's own 8,192."
    )


# --- B: which rank --------------------------------------------------------------------------------------------


@exercise
def check_rank_for(rank_for: Callable[[Tensor, float], Any]) -> str:
    """Exercise B: ``rank_for(gradient, share)``: the lowest rank whose directions hold at least this share of energy."""
    draws = torch.Generator().manual_seed(4)
    noise = torch.randn(12, 30, generator=draws)
    two = torch.diag(torch.tensor([4.0, 3.0]))
    cases = [
        (two, 0.6, "singular values 4 and 3, share 0.60"),
        (two, 0.7, "singular values 4 and 3, share 0.70"),
        (1000 * two, 0.6, "singular values 4000 and 3000, share 0.60"),
        (torch.outer(torch.ones(5), torch.arange(1.0, 9.0)), 0.99, "a matrix of rank 1, share 0.99"),
        (noise, 0.9, "12 x 30 of noise, share 0.90"),
        (noise.T, 0.5, "30 x 12 of noise, share 0.50"),
    ]  # fmt: skip
    answers = []
    for gradient, share, _ in cases:
        try:
            answers.append(int(rank_for(gradient, share)))
        except Exception as error:  # noqa: BLE001 - as above
            return _raised(error)
    right = [_lowest(lab.shares(gradient), share) for gradient, share, _ in cases]
    if answers != right:
        told, best, answer = next(
            (told, best, answer)
            for (_, _, told), best, answer in zip(cases, right, answers, strict=True)
            if best != answer
        )
        begin = f"Not yet: for {told} it is rank {best}, and you said {answer}."
        if answers == [best - 1 for best in right]:
            return f"{begin} One direction fewer holds less than that share: count from 1."
        values = [torch.linalg.svdvals(gradient) for gradient, _, _ in cases]
        if answers == [
            _lowest(v.cumsum(0) / v.sum(), share)
            for v, (_, share, _) in zip(values, cases, strict=True)
        ]:
            return (
                f"{begin} Energy is the sum of squares: square the singular values first."
            )
        return f"{begin} Square the singular values, add them up from the largest on, divide by their sum."
    return "Right: and it is what you would look at before you choose a rank."


def _lowest(held: Tensor, share: float) -> int:
    return int((held < share).sum()) + 1


# --- C: a step to repair --------------------------------------------------------------------------------------


def start(shapes: Sequence[tuple[int, int]] = (WIDE, TALL)) -> list[nn.Parameter]:
    """Weights of these shapes, always the same."""
    draws = torch.Generator().manual_seed(7)
    return [nn.Parameter(torch.randn(shape, generator=draws)) for shape in shapes]


def give_gradients(weights: Sequence[nn.Parameter], update: int) -> None:
    """The gradients of update number ``update``."""
    draws = torch.Generator().manual_seed(100 + update)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=draws)


def reference(shapes: Sequence[tuple[int, int]], updates: int) -> list[nn.Parameter]:
    """Where the package goes."""
    weights = start(shapes)
    galore = GaLore(
        weights, lambda params: torch.optim.AdamW(params, lr=LR, weight_decay=0.0),
        rank=RANK, update_interval=INTERVAL, scale=SCALE,
    )  # fmt: skip
    for update in range(updates):
        give_gradients(weights, update)
        galore.step()
    return weights


def trial(
    step: Step,
    shapes: Sequence[tuple[int, int]],
    updates: int,
    poison: Sequence[int] = (),
) -> tuple[list[nn.Parameter], list[Any]]:
    """Run a learner's step; before the updates in ``poison`` it meets a NaN in the last weight's gradient.

    Returns:
        The weights, and what the step returned for each gradient with a NaN.
    """
    weights: list[nn.Parameter] = start(shapes)
    states: list[dict[str, Any]] = [{} for _ in weights]
    verdicts = []
    for update in range(updates):
        if update in poison:
            give_gradients(weights, 50 + update)
            _gradient(weights[-1])[0, 0] = math.nan
            verdicts.append(step(weights, states, LR, RANK, INTERVAL, SCALE))
        give_gradients(weights, update)
        step(weights, states, LR, RANK, INTERVAL, SCALE)
    return weights, verdicts


@exercise
def check_step(step: Step) -> str:
    """Exercise C: ``step(weights, states, lr, rank, interval, scale)`` -> True, or False where it refused."""
    for shape, kind in ((WIDE, "wide"), (TALL, "tall")):
        try:
            (weight,), _ = trial(step, [shape], 1)
        except Exception as error:  # noqa: BLE001 - as above
            return f"{_raised(error)} That was one step of a {kind} weight, {shape[0]} x {shape[1]}."
        (right,), (before,) = reference([shape], 1), start([shape])
        moved, wanted = weight.detach() - before.detach(), right.detach() - before.detach()
        if _same(moved, wanted):
            continue
        if _same(SCALE * moved, wanted):
            return (
                f"Not yet: the first step of a {kind} weight is {1 / SCALE:g} times too long. "
                "The change is scaled when it goes back."
            )
        if kind == "tall":
            return (
                f"Not yet: the wide weight moves as it should, and the tall one, {shape[0]} x {shape[1]}, does not. Its "
                f"basis belongs on the smaller side: {shape[1]} x {RANK}, and it multiplies from the right."
            )
        return (
            "Not yet: the first step of a wide weight is not lr x scale x P (m / sqrt(v)), with Adam's two "
            "corrections for the first steps."
        )
    if not _close(trial(step, [WIDE], INTERVAL)[0], reference([WIDE], INTERVAL)):
        return (
            f"Not yet: the first step is right, and after {INTERVAL} steps the weight is not. Are the moments and the "
            "basis kept from step to step?"
        )
    ranks = []
    for updates in (INTERVAL, INTERVAL + 1):
        (weight,), _ = trial(step, [WIDE], updates)
        ranks.append(lab.rank_of(weight.detach() - start([WIDE])[0].detach()))
    if ranks == [RANK, RANK]:
        return (
            f"Not yet: after {INTERVAL + 1} steps at interval {INTERVAL} the weight's change has still rank {RANK}. "
            "The basis of the first gradient is used for ever."
        )
    if ranks != [RANK, 2 * RANK]:
        return (
            f"Not yet: a new basis is due at updates 1, {INTERVAL + 1}, {2 * INTERVAL + 1}, ...: the ranks of the "
            f"change before and after the second are {RANK} and {2 * RANK}, and yours are {ranks[0]} and {ranks[1]}."
        )
    return _check_refusal(step)


def _check_refusal(step: Step) -> str:
    right = reference([WIDE, TALL], 3)
    for poison, when in (((0,), "where a basis is due"), ((2,), "between two bases")):
        try:
            weights, verdicts = trial(step, [WIDE, TALL], 3, poison)
        except Exception as error:  # noqa: BLE001 - as above
            return (
                f"{_raised(error)} The last gradient had a NaN in it, {when}: look at all gradients before "
                "anything else, and return False."
            )
        if not all(bool(weight.isfinite().all()) for weight in weights):
            return (
                f"Not yet: a NaN in a gradient, {when}, reached the weights or the moments."
            )
        if not _close(weights, right):
            return (
                f"Not yet: a gradient with a NaN, {when}, left a trace. The weights before it in the list had moved "
                "already, or a counter had: look at all gradients before anything is changed."
            )
        if verdicts != [False]:
            return f"Not yet: a refused step returns False, and yours returned {verdicts[0]!r}."
    (weight,), _ = trial(step, [WIDE], 1)
    states: list[dict[str, Any]] = [{}]
    if step([weight], states, LR, RANK, INTERVAL, SCALE) is not True:
        return "Not yet: a step that was taken returns True."
    return "Right: the smaller side, a new basis when it is due, the scale, and no trace of a gradient with a NaN."


def _gradient(weight: nn.Parameter) -> Tensor:
    if weight.grad is None:
        raise ValueError("this weight has no gradient yet")
    return weight.grad


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-3, atol=1e-6)


def _close(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(_same(a.detach(), b.detach()) for a, b in zip(one, other, strict=True))

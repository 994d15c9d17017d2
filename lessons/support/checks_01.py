"""The checks of lesson 01's exercises: each takes an answer and returns a sentence.

It starts with "Right" or "Not yet", and then says what is wrong and where to look next.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from safetrain_core import AmpTrainState
from torch import Tensor, nn

from . import toy
from .progress import exercise

Loop = Callable[..., list[tuple[float, float, bool]]]


@exercise
def check_clip(clip: Callable[[list[Tensor], float], Any]) -> str:
    """Exercise A: ``clip(grads, max_norm) -> (norm before, norm after)``, in place, by one global norm."""
    grads = [torch.tensor([3.0, 3.0]), torch.tensor([4.0, 4.0])]
    before = [g.clone() for g in grads]
    try:
        answer = clip(grads, 1.0)
    except Exception as error:  # noqa: BLE001 - whatever a learner's code raises is worth a sentence
        return f"Not yet: it raised {type(error).__name__}: {error}."
    if answer is None:
        return "Not yet: it returned None. Return the norm before and the norm after, in this order."
    try:
        pre, post = (float(value) for value in answer)
    except (TypeError, ValueError):
        return f"Not yet: it returned {answer!r}. Return two numbers, the norm before and the norm after."
    if not math.isclose(pre, math.sqrt(50), rel_tol=1e-4):
        return (
            f"Not yet: for the gradients (3, 3) and (4, 4) the norm before the clip is sqrt(50), about 7.07; you "
            f"returned {pre:.4g}. Square every element of every tensor, add them all up, take one square root."
        )
    if all(torch.equal(g, b) for g, b in zip(grads, before, strict=True)):
        return "Not yet: the gradients have not moved. Change them in place, for example with g.mul_(factor)."
    if torch.allclose(grads[0], torch.ones(2)) and torch.allclose(grads[1], torch.ones(2)):
        return (
            "Not yet: each element was cut off at 1, so (3, 3) and (4, 4) became the same. That points another "
            "way. Multiply all of them by one factor."
        )
    if torch.allclose(grads[0].norm(), grads[1].norm()):
        return (
            "Not yet: each tensor was clipped by its own norm, so a layer with a small gradient now pulls as "
            "hard as one with a large gradient. Use one norm over all tensors, and one factor."
        )
    expected = [b / math.sqrt(50) for b in before]
    if not all(
        torch.allclose(g, e, atol=1e-5) for g, e in zip(grads, expected, strict=True)
    ):
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads))
        return f"Not yet: after the clip to 1 the global norm is {norm:.4g}. Multiply by max_norm / norm."
    if not math.isclose(post, 1.0, rel_tol=1e-4):
        return f"Not yet: the gradients are right, but the norm after the clip is 1, and you returned {post:.4g}."
    small = [torch.tensor([0.3]), torch.tensor([0.4])]
    pre, post = (float(value) for value in clip(small, 1.0))
    if not torch.allclose(torch.cat(small), torch.tensor([0.3, 0.4])):
        return (
            "Not yet: a gradient of norm 0.5 was made larger. A clip only ever shrinks: leave it alone unless "
            "the norm is above max_norm."
        )
    if not math.isclose(post, 0.5, rel_tol=1e-4):
        return f"Not yet: the norm of (0.3, 0.4) stays 0.5 after the clip, and you returned {post:.4g}."
    return "Right: one norm, one factor, and small gradients are left alone."


@exercise
def check_next_scale(next_scale: Callable[[float, int, str | None, int], Any]) -> str:
    """Exercise B: ``next_scale(scale, clean, reason, growth_interval) -> (scale, clean)``."""
    draws = random.Random(1)
    story: list[str | None] = [
        None,
        None,
        "non_finite_grad",
        None,
        "non_finite_loss",
        None,
        None,
    ]
    story += draws.choices(
        [None, None, None, "non_finite_grad", "non_finite_loss", "loss_jump"], k=40
    )
    scale, clean, past = 1024.0, 0, []
    for reason in story:
        past.append(reason or "good")
        try:
            answer = next_scale(scale, clean, reason, 3)
            new_scale, new_clean = answer
        except Exception as error:  # noqa: BLE001 - whatever a learner's code raises is worth a sentence
            return f"Not yet: it raised {type(error).__name__}: {error}. Return a pair (scale, clean)."
        right = _next_scale(scale, clean, reason, 3)
        if (new_scale, new_clean) != right:
            return f"Not yet: {_about_scale(scale, clean, reason, (new_scale, new_clean), right)}"
        scale, clean = right
    return "Right: halve on overflow alone, double after a clean stretch, and leave the rest alone."


def _next_scale(
    scale: float, clean: int, reason: str | None, interval: int
) -> tuple[float, int]:
    if reason == "non_finite_grad":
        return scale / 2, 0
    if reason is not None:
        return scale, clean
    return (scale * 2, 0) if clean + 1 == interval else (scale, clean + 1)


def _about_scale(
    scale: float,
    clean: int,
    reason: str | None,
    given: tuple[float, int],
    right: tuple[float, int],
) -> str:
    case = f"at scale {scale:g} with {clean} clean steps behind it, growth interval 3, a step that was "
    case += f"skipped for {reason}" if reason else "good"
    told = f"{case} gives {right}, and you gave {given}. "
    if reason not in (None, "non_finite_grad") and given[0] < scale:
        return (
            told
            + "The factor is too large only if a scaled gradient overflowed; here it did nothing wrong."
        )
    if reason not in (None, "non_finite_grad"):
        return told + "Such a step says nothing about the factor: keep both numbers."
    if reason == "non_finite_grad" and given[0] != right[0]:
        return told + "An overflow halves the factor."
    if reason == "non_finite_grad":
        return told + "An overflow ends the clean stretch: count from 0 again."
    if right[0] > scale and given[0] == right[0]:
        return told + "After a doubling a new stretch begins: count from 0 again."
    if right[0] > scale:
        return told + "This was the last clean step of the stretch, so the factor doubles."
    return (
        told
        + "A good step adds one to the clean steps, and the factor waits for the interval."
    )


def trial(
    loop: Loop, init_scale: float, inf_at: int | None, steps: int = 10
) -> tuple[Any, nn.Module, float]:
    """Run a learner's loop in float16; its rows (or the error it raised), its model, the scaler's last factor."""
    model = toy.tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    try:
        rows = loop(
            model, optimizer, scaler, list(toy.sensor_batches(steps, inf_at=inf_at))
        )
    except Exception as error:  # noqa: BLE001 - whatever a learner's code raises is worth a sentence
        rows = error
    return rows, model, scaler.get_scale()


@exercise
def check_loop(loop: Loop) -> str:
    """Exercise C: ``loop(model, optimizer, scaler, batches) -> [(norm, scale, skipped), ...]``."""
    rows, model, last = trial(loop, 2.0**20, None)
    if isinstance(rows, Exception):
        text = str(rows).split(".")[0]
        hint = (
            " The skip path left a window open: end it in scaler.update()."
            if "unscale_" in text
            else ""
        )
        return f"Not yet: it raised {type(rows).__name__}: {text}.{hint}"
    if not isinstance(rows, list) or len(rows) != 10:
        return "Not yet: return one row (norm, scale, skipped) for each of the 10 batches, skipped ones too."
    skipped = [bool(row[2]) for row in rows]
    if not all(p.isfinite().all() for p in model.parameters()):
        return "Not yet: there are weights that are not finite. Some step with an Inf gradient was taken."
    if not skipped[0]:
        return "Not yet: the first step overflows at this scale, and its row does not say that it was skipped."
    if last == 2.0**20:
        return (
            f"Not yet: {sum(skipped)} of 10 steps were skipped and the factor is still what it was at the start. "
            "On the skip path nothing calls scaler.update()."
        )
    if all(skipped):
        return (
            f"Not yet: the factor fell to {last:g}, and still every step was skipped. The Inf of the first one "
            "is still in p.grad, and each backward adds to it: clear the gradients before each step."
        )
    calm, calm_model, _ = trial(loop, 2.0**4, None)
    louder, _, _ = trial(loop, 2.0**12, None)
    if not math.isclose(calm[0][0], louder[0][0], rel_tol=0.05):
        return (
            f"Not yet: the first norm is {calm[0][0]:.1f} at scale 16 and {louder[0][0]:.1f} at scale 4096, for "
            "the same gradient. The norm and the clip come before the unscaling."
        )
    _, reference, _ = trial(_reference, 2.0**4, None)
    if not _same(calm_model, reference):
        return (
            "Not yet: nothing overflows at scale 16, and yet the weights after 10 steps are not those of a "
            "correct loop. Unscale once, clip once to 1.0, step once."
        )
    unlucky, model, last = trial(loop, 2.0**4, inf_at=3)
    if isinstance(unlucky, Exception):
        return f"Not yet: with an infinite loss in the third batch it raised {type(unlucky).__name__}: {unlucky}."
    if not bool(unlucky[2][2]):
        return "Not yet: the loss of the third batch is not finite, and its row does not say that it was skipped."
    if last < 2.0**4:
        return (
            "Not yet: an infinite loss halved the factor, though no factor could have saved it. Look at the loss "
            "before the backward, and leave the scaler out of it."
        )
    _, reference, _ = trial(_reference, 2.0**4, inf_at=3)
    if not _same(model, reference):
        return "Not yet: after the infinite loss the weights are not those of a loop that left that batch out."
    return "Right: unscale before the clip, update on every path, clear what was refused, and look at the loss."


def _reference(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    batches: list[Any],
) -> list[tuple[float, float, bool]]:
    state = AmpTrainState(
        model,
        optimizer=optimizer,
        amp_dtype=torch.float16,
        init_scale=float(scaler.get_scale()),
    )
    rows = [state.step(x, y) for x, y in batches]
    return [(row.pre_clip or math.nan, row.scale or math.nan, row.skipped) for row in rows]


def _same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in pairs)

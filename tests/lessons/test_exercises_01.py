"""Lesson 01's checks turn away the stub and plausible wrong answers, each with a helpful sentence."""

from __future__ import annotations

import re
from typing import ClassVar

import torch
from exercises import Exercises, exercises_of
from support.toy import sensor_batches

from safetrain_core import AmpTrainState

A, B, C = exercises_of("01_clipping_amp")


def clip_each_tensor(grads: list[torch.Tensor], max_norm: float) -> tuple[float, float]:
    norm = sum(float(g.square().sum()) for g in grads) ** 0.5
    for g in grads:
        g.mul_(max_norm / max(float(g.norm()), max_norm))
    return norm, min(norm, max_norm)


def clip_each_value(grads: list[torch.Tensor], max_norm: float) -> tuple[float, float]:
    norm = sum(float(g.square().sum()) for g in grads) ** 0.5
    for g in grads:
        g.clamp_(-max_norm, max_norm)
    return norm, min(norm, max_norm)


def clip_always(grads: list[torch.Tensor], max_norm: float) -> tuple[float, float]:
    norm = sum(float(g.square().sum()) for g in grads) ** 0.5
    for g in grads:
        g.mul_(max_norm / norm)
    return norm, max_norm


def clip_copies(grads: list[torch.Tensor], max_norm: float) -> tuple[float, float]:
    norm = sum(float(g.square().sum()) for g in grads) ** 0.5
    grads = [g * max_norm / norm for g in grads]
    return norm, min(norm, max_norm)


def sum_of_norms(grads: list[torch.Tensor], max_norm: float) -> tuple[float, float]:
    norm = sum(float(g.norm()) for g in grads)
    for g in grads:
        g.mul_(min(1.0, max_norm / norm))
    return norm, min(norm, max_norm)


def halve_on_every_skip(scale: float, clean: int, reason: str | None, interval: int) -> tuple[float, int]:
    if reason is not None:
        return scale / 2, 0
    return (scale * 2, 0) if clean + 1 == interval else (scale, clean + 1)


def never_restart_the_count(scale: float, clean: int, reason: str | None, interval: int) -> tuple[float, int]:
    if reason == "non_finite_grad":
        return scale / 2, clean
    if reason is not None:
        return scale, clean
    return (scale * 2, 0) if clean + 1 == interval else (scale, clean + 1)


def restart_on_every_skip(scale: float, clean: int, reason: str | None, interval: int) -> tuple[float, int]:
    if reason is not None:
        return (scale / 2 if reason == "non_finite_grad" else scale), 0
    return (scale * 2, 0) if clean + 1 == interval else (scale, clean + 1)


def never_double(scale: float, clean: int, reason: str | None, interval: int) -> tuple[float, int]:
    if reason == "non_finite_grad":
        return scale / 2, 0
    return scale, clean + (reason is None)


def count_on_after_doubling(scale: float, clean: int, reason: str | None, interval: int) -> tuple[float, int]:
    if reason == "non_finite_grad":
        return scale / 2, 0
    if reason is not None:
        return scale, clean
    return (scale * 2 if clean + 1 == interval else scale), clean + 1


def test_the_rule_that_is_taught_is_the_one_that_the_scaler_follows() -> None:
    (rule,) = B.defined(B.solution)
    state = AmpTrainState(torch.nn.Linear(16, 1), amp_dtype=torch.float16, init_scale=2.0**22, growth_interval=3)
    scale, clean = state.scale, 0
    for x, y in sensor_batches(40, inf_at=15):
        row = state.step(x, y)
        assert row.scale == scale
        scale, clean = rule(scale, clean, row.skip_reason, 3)
    assert {row.skip_reason for row in state.log} == {None, "non_finite_grad", "non_finite_loss"}


UNSCALE = "        scaler.unscale_(optimizer)\n"
CLIP = "        norm, _ = clip_global_l2_norm(model, max_norm=1.0)\n"
SKIP = "        skipped = has_non_finite_grad(model)\n"
LEAVE = "        if skipped:\n            rows.append((0.0, scale, True))\n            continue\n"
LOOK = re.search(r"        if not loss.isfinite.*?continue\n", C.solution, re.DOTALL)[0]


class TestLesson01(Exercises):
    wrong: ClassVar = {
        A: [
            (clip_each_tensor, "one norm over all tensors"),
            (clip_each_value, "cut off at 1"),
            (clip_always, "only ever shrinks"),
            (clip_copies, "in place"),
            (sum_of_norms, "Square every element"),
            (lambda grads, max_norm: None, "returned None"),
            (lambda grads, max_norm: 1 / 0, "ZeroDivisionError"),
            (lambda grads, max_norm: "7", "Return two numbers"),
        ],
        B: [
            (halve_on_every_skip, "did nothing wrong"),
            (never_restart_the_count, "ends the clean stretch"),
            (restart_on_every_skip, "keep both numbers"),
            (never_double, "the factor doubles"),
            (count_on_after_doubling, "a new stretch begins"),
            (lambda scale, clean, reason, interval: scale, "Return a pair"),
        ],
        C: [
            ((UNSCALE + SKIP + CLIP, SKIP + CLIP + UNSCALE), "come before the unscaling"),
            (("        scaler.update()\n", ""), "scaler.update()"),
            (("        optimizer.zero_grad()\n", ""), "clear the gradients"),
            ((LOOK, ""), "no factor could have saved it"),
            ((CLIP, "        norm, _ = clip_global_l2_norm(model, max_norm=1e9)\n"), "not those of a correct loop"),
            (("        rows.append((norm, scale, skipped))\n", ""), "one row"),
            ((SKIP, SKIP + LEAVE), "end it in scaler.update()"),
            ((SKIP, "        skipped = False\n"), "does not say that it was"),
            (("scaler.step(optimizer)", "optimizer.step()"), "weights that are not finite"),
        ],
    }

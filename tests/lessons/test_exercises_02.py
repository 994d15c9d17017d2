"""Lesson 02's checks turn away the stub and plausible wrong answers, each with a helpful sentence."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from exercises import Exercises, exercises_of
from support import checks_02

from safetrain_core.step.accumulate import window_weights

A, B, C = exercises_of("02_accumulation")


def counts(targets: list[torch.Tensor]) -> list[int]:
    return [int((y != -100).sum()) for y in targets]


def test_the_shares_that_are_taught_are_those_of_the_package() -> None:
    (shares,) = A.defined(A.solution)
    targets = [torch.tensor([1, 2, -100]), torch.tensor([3, -100, -100]), torch.full((3,), -100)]
    assert shares(targets) == window_weights(targets, "tokens")[0]


def test_the_counted_updates_are_those_of_torchs_own_sampler_and_loader() -> None:
    assert checks_02.counted_updates(41, 4, 4, 2, 1) == 2
    assert checks_02.counted_updates(40, 4, 4, 1, 3) == 9


CLIP = "        norm, _ = clip_global_l2_norm(model, max_norm=1.0)\n"
STEP = "        optimizer.step()\n"
SCHEDULE = "        schedule.step()\n"
MEAN = "            mean +="


class TestLesson02(Exercises):
    wrong: ClassVar = {
        A: [
            (lambda targets: [1 / len(targets)] * len(targets), "times as much as one of the last"),
            (lambda targets: [1.0] * len(targets), "add up to 4"),
            (counts, "add up to"),
            (lambda targets: [y.numel() / sum(t.numel() for t in targets) for y in targets], "counted padding too"),
            (lambda targets: [n / sum(counts(targets)) for n in reversed(counts(targets))], "off that of the one big"),
            (lambda targets: [max(n, 1) / sum(counts(targets)) for n in counts(targets)], "has nothing to add"),
            (lambda targets: [0.5, 0.5], "you returned 2 shares"),
            (lambda targets: None, "Return a list of numbers"),
        ],
        B: [
            (lambda s, m, k, r, e: e * s // (m * k * r), "last 2 is a step too"),
            (lambda s, m, k, r, e: e * math.ceil(s // m / k), "counts as a batch"),
            (lambda s, m, k, r, e: math.ceil(e * math.ceil(s / m) / k), "no window spans two"),
            (lambda s, m, k, r, e: e * math.ceil(math.ceil(s / m) / k), "all ranks step together"),
            (lambda s, m, k, r, e: 1 // 0, "ZeroDivisionError"),
            (lambda s, m, k, r, e: None, "you said None"),
        ],
        C: [
            ((" / len(window)", ""), "Each micro-batch's loss is used whole"),
            ((" / len(window)", " / accum_steps"), "its losses were divided by 4"),
            ((CLIP, "", MEAN, "    " + CLIP + MEAN), "Clip once"),
            ((SCHEDULE, "", MEAN, "    " + SCHEDULE + MEAN), "Its unit"),
            (("        optimizer.zero_grad()\n", ""), "Clear the gradients"),
            (("windows(batches, accum_steps)", "list(windows(batches, accum_steps))[:2]"), "never used"),
            (("windows(batches, accum_steps)", "windows(batches, 1)"), "you returned 10 rows"),
            (("mean += loss.item()", "mean = loss.item()"), "Log the mean"),
            (("mean += loss.item()", "mean += loss.item() / accum_steps"), "Log the mean"),
            ((CLIP, CLIP.replace("1.0", "1e9")), "Is the gradient clipped"),
            ((STEP, ""), "the optimizer's step taken"),
            (("    return rows\n", ""), "one row (loss, norm)"),
            (("    rows = []\n", ""), "NameError"),
        ],
    }

"""Lesson 07's exercises: a check rejects its stub and wrong answers in words that help, and takes the solution."""

from __future__ import annotations

from typing import ClassVar

import torch
from exercises import Exercises, exercises_of

A, B, C = exercises_of("07_low_rank_gradients")


def held(gradient: torch.Tensor, *, square: bool = True) -> torch.Tensor:
    values = torch.linalg.svdvals(gradient)
    values = values.square() if square else values
    return values.cumsum(0) / values.sum()


GUARD = "    if not all(W.grad.isfinite().all() for W in weights):\n        return False\n"
LATE_GUARD = "        if not W.grad.isfinite().all():\n            return False\n"
AT_A_BASIS = '    if not states[0].get("t") and '
WIDE = "        wide = W.shape[0] <= W.shape[1]\n"


class TestLesson07(Exercises):
    wrong: ClassVar = {
        A: [
            (lambda m, n, r: 2 * r * max(m, n), "the basis has to be kept"),
            (lambda m, n, r: r * (m + n), "two moments"),
            (lambda m, n, r: r * max(m, n) + 2 * r * min(m, n), "stands on the smaller side"),
            (lambda m, n, r: m * r + 2 * r * n, "256 x 64"),
            (lambda m, n, r: min(m, n) * r + 2 * r * max(m, n), "not above this rank"),
            (lambda m, n, r: 2 * m * n, "Which shapes"),
            (lambda m, n, r: None, "you said None"),
            (lambda m, n, r: 1 // 0, "ZeroDivisionError"),
        ],
        B: [
            (lambda g, share: int((held(g) < share).sum()), "count from 1"),
            (lambda g, share: int((held(g, square=False) < share).sum()) + 1, "square the singular values first"),
            (
                lambda g, share: int((torch.linalg.svdvals(g).square().cumsum(0) < share).sum()) + 1,
                "divide by their sum",
            ),
            (lambda g, share: min(g.shape), "add them up"),
            (lambda g, share: None, "TypeError"),
        ],
        C: [
            (("lr * scale * s", "lr * s"), "4 times too long"),
            (("lr * scale * s", "lr * scale**2 * s"), "the first step of a wide weight is not"),
            ((WIDE, "        wide = True\n"), "belongs on the smaller side"),
            (("change if wide else change.T", "change"), "one step of a tall weight"),
            ((" % interval == 0", " == 0"), "is used for ever"),
            ((" % interval == 0", " % 2 == 0"), "after 4 steps the weight is not"),
            ((" % interval == 0", " % (interval + 1) == 0"), "is used for ever"),
            ((" % interval == 0", " in (0, interval + 1)"), "is used for ever"),
            (('s.get("m", 0.0)', "0.0"), "kept from step to step"),
            (('0.9 * s.get("m", 0.0) + 0.1 * R', "R"), "the first step of a wide weight is not"),
            ((GUARD, ""), "where a basis is due"),
            ((GUARD, "", WIDE, LATE_GUARD + WIDE), "left a trace"),
            ((GUARD, AT_A_BASIS + GUARD[7:]), "between two bases, reached the weights"),
            (("return False", "return None"), "yours returned None"),
            (("return True", "return None"), "a step that was taken returns True"),
            (("(v.sqrt() + 1e-8)", "v"), "the first step of a wide weight is not"),
            (("interval == 0", "intervall == 0"), "NameError"),
        ],
    }

"""Lesson 05's checks turn away the stubs and plausible wrong answers, each with a helpful sentence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exercises import HINT, LESSONS, defined, exercise_cells, solution_of
from support import checks_05
from torch import nn
from torch.utils.checkpoint import checkpoint

from safetrain_core import apply_recompute, next_token_loss

SCRIPT = LESSONS / "05_gradient_checkpointing.py"
NAMES = {
    **vars(checks_05),
    "say": print,
    "torch": torch,
    "nn": nn,
    "checkpoint": checkpoint,
    "next_token_loss": next_token_loss,
    "apply_recompute": apply_recompute,
}
EXERCISES = [
    ("best_segment", checks_05.check_segment),
    ("once", checks_05.check_once),
    ("loop", checks_05.check_loop),
]


@pytest.mark.parametrize(("number", "name", "check"), [(i, *e) for i, e in enumerate(EXERCISES)])
def test_check_turns_away_the_stub_and_accepts_the_solution(number: int, name: str, check: Callable[..., str]) -> None:
    stub, markdown = exercise_cells(SCRIPT)[number]
    assert check(defined(stub, name, NAMES)).startswith("Not yet: ")
    verdict = check(defined(solution_of(markdown), name, NAMES))
    assert verdict.startswith("Right: "), verdict
    assert len(HINT.findall(markdown)) == 2


def test_lesson_has_the_three_exercises() -> None:
    assert len(exercise_cells(SCRIPT)) == len(EXERCISES)


# --- A ---------------------------------------------------------------------------------------------------------


def by_memory(
    layers: int, inside: int, boundary: int, segments: Callable[[int, int], int] = lambda layers, k: -(-layers // k)
) -> int:
    return min(range(1, layers + 1), key=lambda k: segments(layers, k) * boundary + k * inside)


@pytest.mark.parametrize(
    ("wrong", "helps"),
    [
        (lambda layers, inside, boundary: 1, "the classical rule holds"),
        (lambda layers, inside, boundary: math.sqrt(layers * boundary / inside), "a whole number of layers"),
        (lambda layers, inside, boundary: round((layers * boundary / inside) ** 0.5), "a shorter segment"),
        (lambda layers, inside, boundary: int((layers * boundary / inside) ** 0.5), "between 1 and 5 layers"),
        (lambda *sizes: by_memory(*sizes, segments=lambda layers, k: layers // k), "k=6, which takes 17; k=8 takes 16"),
        (lambda layers, inside, boundary: by_memory(layers, boundary, inside), "k=16, which takes 257; k=1 takes 32"),
        (lambda *sizes: -(-sizes[0] // by_memory(*sizes)), "k=16, which takes 257; k=1 takes 32"),
        (lambda layers, inside, boundary: layers // 0, "ZeroDivisionError"),
        (lambda layers, inside, boundary: None, "a whole number of layers"),
    ],
)
def test_check_segment_says_what_is_wrong(wrong: Callable[..., Any], helps: str) -> None:
    verdict = checks_05.check_segment(wrong)
    assert verdict.startswith("Not yet: ")
    assert helps in verdict, verdict


def test_of_two_segments_that_are_as_good_either_is_right() -> None:
    def last(layers: int, inside: int, boundary: int) -> int:
        return min(range(layers, 0, -1), key=lambda k: math.ceil(layers / k) * boundary + k * inside)

    assert checks_05.check_segment(last).startswith("Right: ")


# --- B ---------------------------------------------------------------------------------------------------------

ONCE = solution_of(exercise_cells(SCRIPT)[1][1])


def spoiled(sound: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert sound.count(old) == 1, f"the solution has changed: {old!r} is not in it once"
        sound = sound.replace(old, new)
    return sound


MOMENTUM = """
def once(layer, x):
    runs = 0

    def forward(x):
        nonlocal runs
        runs += 1
        norms = [m for m in layer.modules() if isinstance(m, nn.BatchNorm1d)]
        for norm in norms:
            norm.momentum = 0.1 if runs == 1 else 0.0
        return layer(x)

    return checkpoint(forward, x, use_reentrant=False)
"""
EVAL = """
def once(layer, x):
    runs = 0

    def forward(x):
        nonlocal runs
        runs += 1
        layer.train(runs == 1)
        try:
            return layer(x)
        finally:
            layer.train()

    return checkpoint(forward, x, use_reentrant=False)
"""
NO_FINALLY = """
def once(layer, x):
    runs = 0

    def forward(x):
        nonlocal runs
        runs += 1
        before = [buffer.clone() for buffer in layer.buffers()]
        output = layer(x)
        if runs > 1:
            with torch.no_grad():
                for buffer, value in zip(layer.buffers(), before, strict=True):
                    buffer.copy_(value)
        return output

    return checkpoint(forward, x, use_reentrant=False)
"""


@pytest.mark.parametrize(
    ("code", "helps"),
    [
        (NO_FINALLY, "by an exception inside it"),
        (MOMENTUM, "BatchNorm counted 4"),
        (EVAL, "ran in eval mode"),
        ("def once(layer, x):\n    return layer(x)\n", "the layer ran 2 times"),
        (spoiled(ONCE, ("if runs > 1", "if True")), "The first run has to count"),
        (spoiled(ONCE, ("use_reentrant=False", "use_reentrant=False, preserve_rng_state=False")), "dropout mask"),
        (
            spoiled(ONCE, ("buffer.copy_(value)", "buffer.copy_(value) if buffer.dim() == 0 else None")),
            "running mean and variance are not",
        ),
        ("def once(layer, x):\n    return checkpoint(layer, x.detach(), use_reentrant=False)\n", "gradients differ"),
        ("def once(layer, x):\n    return checkpoint(layer, 2 * x, use_reentrant=False)\n", "not the layer's own"),
    ],
)
def test_check_once_says_what_is_wrong(code: str, helps: str) -> None:
    verdict = checks_05.check_once(defined(code, "once", NAMES))
    assert verdict.startswith("Not yet: ")
    assert helps in verdict, verdict


def test_the_package_passes_check_once() -> None:
    def once(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return apply_recompute(nn.Sequential(layer), "full")(x)

    assert checks_05.check_once(once).startswith("Right: ")


# --- C ---------------------------------------------------------------------------------------------------------

LOOP = solution_of(exercise_cells(SCRIPT)[2][1])
ONE_SEGMENT = (
    "        for block in model.blocks:\n            h = checkpoint(block, h, use_reentrant=False)\n",
    "        h = checkpoint(nn.Sequential(*model.blocks), h, use_reentrant=False)\n",
)


@pytest.mark.parametrize(
    ("code", "helps"),
    [
        (spoiled(LOOP, ("use_reentrant=False", "use_reentrant=True")), "gives none to the layers"),
        (spoiled(LOOP, ("use_reentrant=False", "use_reentrant=False, preserve_rng_state=False")), "draw the mask"),
        (spoiled(LOOP, ONE_SEGMENT), "take each layer by itself"),
        (spoiled(LOOP, ("loss.item()", "loss")), "holds its graph"),
        (spoiled(LOOP, ("checkpoint(block, h, use_reentrant=False)", "block(h)")), "the peak is 100%"),
        (spoiled(LOOP, ("        optimizer.step()\n", "")), "have not moved"),
        (spoiled(LOOP, ("        optimizer.zero_grad()\n", "")), "weights are not those"),
        (spoiled(LOOP, ("    return losses", "    return losses[:1]")), "returned 1 losses"),
        (spoiled(LOOP, ("loss.item()", "2 * loss.item()")), "the losses that you return are not"),
        (spoiled(LOOP, ("model.norm(h)", "model.norm()")), "TypeError"),
    ],
)
def test_check_loop_says_what_is_wrong(code: str, helps: str) -> None:
    verdict = checks_05.check_loop(defined(code, "loop", NAMES))
    assert verdict.startswith("Not yet: ")
    assert helps in verdict, verdict


def test_the_package_and_detached_losses_pass_check_loop() -> None:
    def loop(model: Any, optimizer: Any, batches: Any) -> list[torch.Tensor]:
        apply_recompute(model, "full")
        losses = []
        for x, y in batches:
            loss = next_token_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    verdict = checks_05.check_loop(loop)
    assert verdict.startswith("Right: "), verdict

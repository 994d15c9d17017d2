"""Lesson 05's checks turn away the stubs and plausible wrong answers, each with a helpful sentence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from exercises import Exercises, exercises_of
from support import checks_05
from torch import nn

from safetrain_core import apply_recompute, next_token_loss

A, B, C = exercises_of("05_gradient_checkpointing")


# --- A ---------------------------------------------------------------------------------------------------------


def by_memory(
    layers: int, inside: int, boundary: int, segments: Callable[[int, int], int] = lambda layers, k: -(-layers // k)
) -> int:
    return min(range(1, layers + 1), key=lambda k: segments(layers, k) * boundary + k * inside)


def test_of_two_segments_that_are_as_good_either_is_right() -> None:
    def last(layers: int, inside: int, boundary: int) -> int:
        return min(range(layers, 0, -1), key=lambda k: math.ceil(layers / k) * boundary + k * inside)

    assert checks_05.check_segment(last).startswith("Right: ")


# --- B ---------------------------------------------------------------------------------------------------------


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


def test_the_package_passes_check_once() -> None:
    def once(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return apply_recompute(nn.Sequential(layer), "full")(x)

    assert checks_05.check_once(once).startswith("Right: ")


# --- C ---------------------------------------------------------------------------------------------------------

ONE_SEGMENT = (
    "        for block in model.blocks:\n            h = checkpoint(block, h, use_reentrant=False)\n",
    "        h = checkpoint(nn.Sequential(*model.blocks), h, use_reentrant=False)\n",
)


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


class TestLesson05(Exercises):
    wrong: ClassVar = {
        A: [
            (lambda layers, inside, boundary: 1, "the classical rule holds"),
            (lambda layers, inside, boundary: math.sqrt(layers * boundary / inside), "a whole number of layers"),
            (lambda layers, inside, boundary: round((layers * boundary / inside) ** 0.5), "a shorter segment"),
            (lambda layers, inside, boundary: int((layers * boundary / inside) ** 0.5), "between 1 and 5 layers"),
            (
                lambda *sizes: by_memory(*sizes, segments=lambda layers, k: layers // k),
                "k=6, which takes 17; k=8 takes 16",
            ),
            (
                lambda layers, inside, boundary: by_memory(layers, boundary, inside),
                "k=16, which takes 257; k=1 takes 32",
            ),
            (lambda *sizes: -(-sizes[0] // by_memory(*sizes)), "k=16, which takes 257; k=1 takes 32"),
            (lambda layers, inside, boundary: layers // 0, "ZeroDivisionError"),
            (lambda layers, inside, boundary: None, "a whole number of layers"),
        ],
        B: [
            (NO_FINALLY, "by an exception inside it"),
            (MOMENTUM, "BatchNorm counted 4"),
            (EVAL, "ran in eval mode"),
            ("def once(layer, x):\n    return layer(x)\n", "the layer ran 2 times"),
            (("if runs > 1", "if True"), "The first run has to count"),
            (("use_reentrant=False", "use_reentrant=False, preserve_rng_state=False"), "dropout mask"),
            (
                ("buffer.copy_(value)", "buffer.copy_(value) if buffer.dim() == 0 else None"),
                "running mean and variance are not",
            ),
            (
                "def once(layer, x):\n    return checkpoint(layer, x.detach(), use_reentrant=False)\n",
                "gradients differ",
            ),
            ("def once(layer, x):\n    return checkpoint(layer, 2 * x, use_reentrant=False)\n", "not the layer's own"),
        ],
        C: [
            (("use_reentrant=False", "use_reentrant=True"), "gives none to the layers"),
            (("use_reentrant=False", "use_reentrant=False, preserve_rng_state=False"), "draw the mask"),
            (ONE_SEGMENT, "take each layer by itself"),
            (("loss.item()", "loss"), "holds its graph"),
            (("checkpoint(block, h, use_reentrant=False)", "block(h)"), "the peak is 100%"),
            (("        optimizer.step()\n", ""), "have not moved"),
            (("        optimizer.zero_grad()\n", ""), "weights are not those"),
            (("    return losses", "    return losses[:1]"), "returned 1 losses"),
            (("loss.item()", "2 * loss.item()"), "the losses that you return are not"),
            (("model.norm(h)", "model.norm()"), "TypeError"),
        ],
    }

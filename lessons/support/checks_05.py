"""The checks of lesson 05's exercises: each takes an answer and returns a sentence.

It starts with "Right" or "Not yet", and then says what is wrong and where to look next.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from safetrain_core.memory.count import Counter
from torch import Tensor, nn

from . import recompute as lab
from . import toy
from .progress import exercise

Loop = Callable[..., list[Any]]


def _raised(error: Exception) -> str:
    first = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return f"Not yet: it raised {type(error).__name__}: {first.rstrip('.')}."


# --- A: the best segment --------------------------------------------------------------------------------------

CASES = [
    (64, 1, 1, "a boundary is as dear as a layer: here the classical rule holds"),
    (16, 16, 1, "a transformer: the boundary is a sixteenth of the inside"),
    (64, 16, 1, "the same, deeper"),
    (64, 1, 16, "a boundary that is 16 times a layer's inside"),
    (
        10,
        3,
        2,
        "10 layers do not divide by everything: a shorter segment has a boundary too",
    ),
    (
        5,
        1,
        1000,
        "boundaries are so dear that one is best, and a segment has at most 5 layers",
    ),
    (7, 1000, 1, "insides are so dear that one layer is best"),
    (1, 16, 1, "one layer"),
]


@exercise
def check_segment(best_segment: Callable[..., Any]) -> str:
    """Exercise A: ``best_segment(layers, inside, boundary) -> layers per segment``."""
    for layers, inside, boundary, why in CASES:
        told = f"layers={layers}, inside={inside}, boundary={boundary}"
        try:
            answer = best_segment(layers, inside, boundary)
        except Exception as error:  # noqa: BLE001 - whatever a learner's code raises is worth a sentence
            return _raised(error) + f" That was for {told}."
        if isinstance(answer, bool) or not isinstance(answer, int):
            return f"Not yet: for {told} you returned {answer!r}; a segment has a whole number of layers."
        if not 1 <= answer <= layers:
            return f"Not yet: for {told} you returned {answer}; a segment has between 1 and {layers} layers."

        def memory(k: int, sizes: tuple[int, int, int] = (layers, inside, boundary)) -> int:
            return math.ceil(sizes[0] / k) * sizes[2] + k * sizes[1]

        best = min(range(1, layers + 1), key=memory)
        if memory(answer) > memory(best):
            return (
                f"Not yet: for {told} you returned k={answer}, which takes {memory(answer)}; k={best} takes "
                f"{memory(best)} ({why})."
            )
    return "Right: it is the balance of the two that counts, and sqrt(layers) is the case where both cost the same."


# --- B: each batch once ---------------------------------------------------------------------------------------


class _Watched(nn.Module):
    """A layer that says how often it ran."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.runs, self.modes = layer, 0, set[bool]()

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        self.modes.add(self.training)
        return self.layer(x)


IN_EVAL = (
    "Not yet: the layer ran in eval mode. There BatchNorm normalizes by its running mean and dropout does nothing, so "
    "that the second run computes something else than the first."
)


@exercise
def check_once(once: lab.Run) -> str:
    """Exercise B: ``once(layer, x) -> output``, recomputed in backward, with the buffers moved by one run."""
    try:
        return _once_verdict(once)
    except Exception as error:  # noqa: BLE001 - whatever a learner's code raises is worth a sentence
        return _raised(error)


def _once_verdict(once: lab.Run) -> str:
    found = {}
    for name, run in (("plain", lambda layer, x: layer(x)), ("yours", once)):
        torch.manual_seed(7)
        layer = _Watched(
            nn.Sequential(
                nn.Linear(8, 8),
                nn.BatchNorm1d(8),
                nn.Dropout(0.2),
                nn.GELU(),
                nn.Linear(8, 8),
            )
        )
        x = (torch.randn(32, 8) + 2.0).requires_grad_()
        kept, output = 0, x
        for seed in range(2):  # two batches
            torch.manual_seed(seed)
            with Counter(layer, [x]) as counter:
                output = run(layer, x)
                kept = counter.now
                try:
                    output.square().sum().backward()
                except Exception:
                    if False in layer.modes:
                        return IN_EVAL
                    raise
        gradients = [x.grad, *(p.grad for p in layer.parameters())]
        found[name] = (layer, gradients, kept, output.detach())
    layer, gradients, kept, output = found["yours"]
    plain = found["plain"]
    if not torch.equal(output, plain[3]):
        return "Not yet: the output is not the layer's own. The first run has to be the plain one."
    if False in layer.modes:
        return IN_EVAL
    if layer.runs < 4 or kept > 0.7 * plain[2]:
        return (
            f"Not yet: in two batches the layer ran {layer.runs} times, and after the forward pass {kept / plain[2]:.0%} "
            "of the plain run's bytes were there. A checkpoint forgets them, and runs the layer again in the backward."
        )
    if not lab.equal(gradients, plain[1]):
        return (
            "Not yet: the gradients differ from the plain run's. The second run must compute what the first did, with "
            "the same dropout mask."
        )
    (norm,) = (m for m in layer.modules() if isinstance(m, nn.BatchNorm1d))
    (right,) = (m for m in plain[0].modules() if isinstance(m, nn.BatchNorm1d))
    counts = int(norm.num_batches_tracked), int(right.num_batches_tracked)
    if counts[0] != counts[1]:
        early = " If you put them back behind the layer's call: torch ends the second run by an exception inside it."
        return (
            f"Not yet: {counts[1]} batches went through, and BatchNorm counted {counts[0]}."
            + (early if counts[0] > counts[1] else " The first run has to count.")
        )
    if not lab.equal(list(layer.buffers()), list(plain[0].buffers())):
        return (
            "Not yet: the batches are counted once, but the running mean and variance are not those of a plain run. They "
            "are buffers as well: layer.buffers() has all three."
        )
    if not all(m.training and getattr(m, "momentum", 0.1) == 0.1 for m in layer.modules()):
        return "Not yet: the layer is not as it was. Its training flag or momentum has changed."
    return "Right: the second run leaves no trace but the gradients."


# --- C: the loop ----------------------------------------------------------------------------------------------


def _plain_loop(model: Any, optimizer: torch.optim.Optimizer, batches: Any) -> list[float]:
    losses = []
    for x, y in batches:
        loss = lab.next_token_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _run(loop: Loop, seed: int) -> tuple[nn.Module, list[Any], int]:
    """The trained model, what the loop returned, and the peak of activations in a batch of its own."""
    model = lab.frozen_gpt(seed, dropout=0.1)
    weights = [p for p in model.parameters() if p.requires_grad]
    sgd = torch.optim.SGD(weights, lr=0.5)
    torch.manual_seed(seed)
    losses = loop(model, sgd, toy.text_batches(4, seed, 8))
    other = lab.frozen_gpt(seed, dropout=0.1)
    still = torch.optim.SGD([p for p in other.parameters() if p.requires_grad], lr=0.0)
    batch = next(toy.text_batches(1, seed, 8))
    with Counter(other, batch) as counter:
        loop(other, still, [batch])
    return model, losses, counter.peak


@exercise
def check_loop(loop: Loop, seed: int = 3) -> str:
    """Exercise C: ``loop(model, optimizer, batches) -> losses`` of a GPT with frozen embeddings."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # the reentrant engine's own; the verdict says it at length
            model, losses, peak = _run(loop, seed)
    except Exception as error:  # noqa: BLE001 - whatever a learner's code raises is worth a sentence
        return _raised(error)
    plain, right, plain_peak = _run(_plain_loop, seed)
    start = lab.frozen_gpt(seed)
    stuck = [
        name
        for (name, p), q in zip(model.named_parameters(), start.parameters(), strict=True)
        if p.requires_grad and torch.equal(p, q)
    ]
    if stuck:
        return (
            f"Not yet: {len(stuck)} weight tensors have not moved, {stuck[0]} for one. The embeddings are frozen, so "
            "their output needs no gradient, and the reentrant engine then gives none to the layers."
        )
    if len(losses) != len(right):
        return f"Not yet: for {len(right)} batches you returned {len(losses)} losses."
    if not lab.equal(list(model.parameters()), list(plain.parameters())):
        return (
            "Not yet: after 4 batches the weights are not those of a loop without checkpoints. The layers have dropout: "
            "does the second run draw the mask of the first?"
        )
    if any(isinstance(loss, Tensor) and loss.requires_grad for loss in losses):
        return (
            "Not yet: it trains well, but each loss that you return holds its graph, and with it what the graph keeps. "
            "That grows from step to step. Keep the number: loss.item()."
        )
    if [float(loss) for loss in losses] != right:
        return "Not yet: the weights are right, but the losses that you return are not those of the batches."
    if peak > 0.7 * plain_peak:
        return (
            f"Not yet: the gradients are right, but the peak is {peak / plain_peak:.0%} of that without any checkpoint. "
            "When one segment holds all layers, its second run keeps them all: take each layer by itself."
        )
    return f"Right: the weights of the plain loop, bit for bit, at {peak / plain_peak:.0%} of its bytes."

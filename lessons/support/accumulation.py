"""The experiments of lesson 02 as functions of their knobs: each trains something small."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from safetrain_core import clip_global_l2_norm, next_token_loss
from torch import Tensor, nn

from . import toy
from .counting import activation_bytes
from .figures import draw, log_scale, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Batch = tuple[Tensor, Tensor]

IGNORED = -100
#: Micro-batches per window, and rows per micro-batch, of the run whose loss is not divided.
ACCUM, ROWS = 16, 2
#: Learning rate, rows and micro-batches of the runs that try the linear rule.
BASE_LR, RULE_ROWS, RULE_MICROS = 0.05, 8, 320


# --- gradients and windows ------------------------------------------------------------------------------------


def gradient(model: nn.Module) -> Tensor:
    """All gradients of ``model`` as one vector.

    >>> model = nn.Linear(2, 1, bias=False); model(torch.ones(1, 2)).backward(); gradient(model)
    tensor([1., 1.])
    """
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def weights(model: nn.Module) -> Tensor:
    """All weights of ``model`` as one vector, a copy."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def apart(one: Tensor, other: Tensor) -> float:
    """How far ``one`` is from ``other``, as a share of the length of ``other``.

    >>> round(apart(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0])), 3)
    0.2
    """
    return float((one - other).norm() / other.norm())


def split(batch: Batch, parts: int) -> list[Batch]:
    """One batch as ``parts`` micro-batches.

    >>> [x.tolist() for x, _ in split((torch.arange(4), torch.arange(4)), 2)]
    [[0, 1], [2, 3]]
    """
    return list(zip(batch[0].chunk(parts), batch[1].chunk(parts), strict=True))


def gradient_of(
    model: nn.Module,
    micro_batches: Iterable[Batch],
    shares: Iterable[float],
    loss_fn: Callable[[Tensor, Tensor], Tensor] = next_token_loss,
) -> Tensor:
    """The gradient that gathers when each micro-batch's loss is multiplied by its share."""
    model.zero_grad()
    for (x, y), share in zip(micro_batches, shares, strict=True):
        (loss_fn(model(x), y) * share).backward()
    return gradient(model)


# --- the loss that is not divided -----------------------------------------------------------------------------


def optimizer_for(model: nn.Module, name: str) -> torch.optim.Optimizer:
    """SGD with momentum at 0.1, or AdamW at 0.01."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def divided_run(
    divide: bool,
    optimizer: str = "sgd",
    accum: int = ACCUM,
    steps: int = 20,
    seed: int = 0,
    max_norm: float = 0,
) -> tuple[list[float], list[float]]:
    """Train the tiny GPT on windows of ``accum`` micro-batches of two rows.

    Args:
        divide: each micro-batch's loss is divided by ``accum``, or used whole.
        max_norm: clip threshold; 0 = no clipping.

    Returns:
        Mean loss per token and gradient norm before the clip, one per optimizer step.
    """
    model = toy.tiny_gpt(seed)
    chosen = optimizer_for(model, optimizer)
    losses, norms = [], []
    for batch in toy.text_batches(steps, seed, accum * ROWS):
        chosen.zero_grad()
        total = 0.0
        for x, y in split(batch, accum):
            loss = next_token_loss(model(x), y)
            (loss / accum if divide else loss).backward()
            total += loss.item() / accum
        norms.append(clip_global_l2_norm(model, max_norm or 1e30)[0])
        chosen.step()
        losses.append(total)
    return losses, norms


def step_length(
    divide: bool, optimizer: str, accum: int, batch: Batch, seed: int = 0
) -> float:
    """How far the weights move in the first optimizer step on ``batch``, cut into ``accum`` micro-batches."""
    model = toy.tiny_gpt(seed)
    before = weights(model)
    chosen = optimizer_for(model, optimizer)
    gradient_of(model, split(batch, accum), [1 / accum if divide else 1.0] * accum)
    chosen.step()
    return float((weights(model) - before).norm())


def divided_figure(curves: dict[str, list[float]]) -> Figure:
    """Loss over optimizer steps for each curve; one that ends in NaN says so."""
    fig, ax = draw(
        "The undivided loss wrecks SGD, and AdamW hides it",
        "step",
        "loss (nats per token, log scale)",
    )
    for index, (label, losses) in enumerate(curves.items()):
        shown = [loss for loss in losses if loss == loss and loss < 1e6]
        ax.plot(
            range(1, len(shown) + 1),
            shown,
            label=label,
            markevery=(index % 2, 2),
            **style(index),
        )
        if len(shown) < len(losses) and shown:
            where = (len(shown), shown[-1])
            ax.annotate(
                "then NaN", where, xytext=(7, -4), textcoords="offset points", fontsize=9
            )
    log_scale(ax)
    ax.legend(frameon=False, loc="upper right")
    return fig


def divided_picture(accum: int, optimizer: str, seed: int = 0) -> tuple[Figure, str]:
    """The figure of the first control, and its text."""
    curves = {
        label: divided_run(divide, optimizer, accum, seed=seed)[0]
        for label, divide in (
            (f"whole losses, K={accum}", False),
            (f"losses / {accum}", True),
        )
    }
    fig = divided_figure(curves)
    name = "SGD" if optimizer == "sgd" else "AdamW"
    fig.axes[0].set_title(
        f"{name}, {accum} micro-batches per step", fontsize=11, loc="left"
    )
    return (
        fig,
        f"Loss over 20 steps of {name} with {accum} micro-batches, losses whole and divided.",
    )


# --- lines of different lengths -------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def lines() -> list[Tensor]:
    """Lines of the corpus without their indent, as ids; those with two characters or more, cut at the context."""
    corpus = toy.text()
    start = corpus.decode(corpus.train.ids[:100_000])
    stripped = (line.strip() for line in start.split("\n"))
    return [corpus.encode(line)[: toy.CONTEXT + 1] for line in stripped if len(line) > 1]


def padded(chosen: Sequence[Tensor]) -> Batch:
    """Lines as one batch: as wide as the longest, the targets behind the end of a line -100.

    >>> x, y = padded([torch.tensor([7, 8, 9]), torch.tensor([5, 6])])
    >>> x.tolist(), y.tolist()
    ([[7, 8], [5, 0]], [[8, 9], [6, -100]])
    """
    pad = nn.utils.rnn.pad_sequence
    inputs = pad([line[:-1] for line in chosen], batch_first=True)
    return inputs, pad(
        [line[1:] for line in chosen], batch_first=True, padding_value=IGNORED
    )


def line_windows(
    num: int, accum: int = 4, rows: int = 8, seed: int = 0
) -> list[tuple[list[Batch], Batch]]:
    """``num`` windows of lines, each as ``accum`` micro-batches and as the one big batch of the same lines.

    Lines of like length are put together, as loaders do to save padding, so that micro-batches differ in tokens.

    >>> (micro, whole), = line_windows(1, accum=2, rows=3)
    >>> [len(x) for x, _ in micro], len(whole[0])
    ([3, 3], 6)
    """
    picks = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(num):
        index = torch.randint(len(lines()), (accum * rows,), generator=picks).tolist()
        chosen = sorted((lines()[i] for i in index), key=len)
        micro = [padded(chosen[i : i + rows]) for i in range(0, len(chosen), rows)]
        made.append((micro, padded(chosen)))
    return made


def token_counts(micro_batches: Iterable[Batch]) -> list[int]:
    """Valid targets of each micro-batch.

    >>> token_counts([(torch.zeros(1, 3), torch.tensor([[4, -100, -100]]))])
    [1]
    """
    return [int((y != IGNORED).sum()) for _, y in micro_batches]


# --- once per window ------------------------------------------------------------------------------------------


def clipped_each_time(
    model: nn.Module, micro_batches: Sequence[Batch], max_norm: float
) -> tuple[Tensor, list[float]]:
    """The wrong order: clip what has gathered after every micro-batch.

    Returns:
        The gradient at the end, and what is left in it of each micro-batch's own gradient (1 = all of it).
    """
    model.zero_grad()
    left: list[float] = []
    for x, y in micro_batches:
        (next_token_loss(model(x), y) / len(micro_batches)).backward()
        before, after = clip_global_l2_norm(model, max_norm)
        left = [share * after / before for share in [*left, 1.0]]
    return gradient(model), left


def batchnorm_gap(seed: int = 0) -> float:
    """How far the gradient of four micro-batches is from that of the one batch when the model has a BatchNorm."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 1)
    )
    batch = next(toy.sensor_batches(1, seed))
    whole = gradient_of(model, [batch], [1.0], F.mse_loss).clone()
    return apart(gradient_of(model, split(batch, 4), [0.25] * 4, F.mse_loss), whole)


# --- what it costs --------------------------------------------------------------------------------------------


def update_seconds(
    grid: Sequence[int], rows: int = 8, steps: int = 20, seed: int = 0
) -> dict[int, float]:
    """Seconds of one optimizer step on K micro-batches, for each K of ``grid``: the median of ``steps``, at least 5.

    The Ks take turns, so that whatever else the computer does falls on all of them alike.
    """
    model = toy.tiny_gpt(seed)
    adamw = optimizer_for(model, "adamw")
    batches = list(toy.text_batches(max(grid), seed, rows))
    taken: dict[int, list[float]] = {accum: [] for accum in grid}
    for turn in range(max(5, steps) + 1):
        for accum in taken:
            start = time.perf_counter()
            gradient_of(model, batches[:accum], [1 / accum] * accum)
            adamw.step()
            if turn > 0:  # the first turn warms up
                taken[accum].append(time.perf_counter() - start)
    return {accum: median(seconds) for accum, seconds in taken.items()}


def throughput_figure(seconds: dict[int, float], rows: int) -> Figure:
    """Samples per second over K."""
    fig, ax = draw(
        "Samples per second level off: accumulation saves no time",
        "micro-batches per optimizer step, K",
        "samples per second",
    )
    rates = [rows * accum / one for accum, one in seconds.items()]
    ax.plot(list(seconds), rates, **style(0))
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(seconds), [str(accum) for accum in seconds])
    ax.minorticks_off()
    ax.set_ylim(0, 1.25 * max(rates))
    return fig


def kept_bytes(rows: int, seed: int = 0) -> int:
    """Bytes that autograd keeps between forward and backward for a batch of ``rows`` rows of text."""
    model = toy.tiny_gpt(seed)
    x, y = next(toy.text_batches(1, seed, rows))
    return sum(activation_bytes(model, lambda: next_token_loss(model(x), y)).values())


# --- the linear rule ------------------------------------------------------------------------------------------

#: What the learning rate is multiplied by, at K micro-batches per step.
RULES: dict[str, Callable[[int], float]] = {
    "as it was": lambda accum: 1.0,
    "x sqrt(K)": lambda accum: accum**0.5,
    "x K": float,
}


@lru_cache(maxsize=64)
def rule_run(
    accum: int, rule: str, micros: int = RULE_MICROS, seed: int = 0
) -> tuple[float, ...]:
    """Train with plain SGD over the same ``micros`` micro-batches, ``accum`` of them per optimizer step.

    Returns:
        The loss of each micro-batch.
    """
    model = toy.tiny_gpt(seed)
    sgd = torch.optim.SGD(model.parameters(), lr=BASE_LR * RULES[rule](accum))
    losses = []
    for number, (x, y) in enumerate(toy.text_batches(micros, seed, RULE_ROWS), start=1):
        loss = next_token_loss(model(x), y)
        (loss / accum).backward()
        losses.append(loss.item())
        if number % accum == 0:
            sgd.step()
            sgd.zero_grad()
    return tuple(losses)


def rule_end(losses: Sequence[float]) -> float:
    """The mean of the last fifth of the losses, NaN included.

    >>> rule_end([9.0] * 8 + [1.0, 3.0])
    2.0
    """
    last = losses[-(len(losses) // 5) :]
    return sum(last) / len(last)


def rule_figure(curves: dict[str, Sequence[float]], title: str) -> Figure:
    """Loss over samples seen, each point the mean of 20 micro-batches."""
    fig, ax = draw(title, "samples seen", "loss (nats per token)")
    for index, (label, losses) in enumerate(curves.items()):
        points = [sum(losses[i : i + 20]) / 20 for i in range(0, len(losses), 20)]
        seen = [RULE_ROWS * 20 * (i + 1) for i in range(len(points))]
        ax.plot(seen, points, label=label, **style(index))
    ax.set_ylim(2.4, 5.0)
    ax.legend(frameon=False, loc="upper right")
    return fig


def rule_picture(accum: int, rule: str, seed: int = 0) -> tuple[Figure, str]:
    """The figure of the second control, and its text."""
    curves = {
        f"K=1, lr {BASE_LR}": rule_run(1, "as it was", seed=seed),
        f"K={accum}, lr {rule}": rule_run(accum, rule, seed=seed),
    }
    small, large = map(rule_end, curves.values())
    verdict = "diverged" if not large < 6 else f"ends at {large:.2f}, K=1 at {small:.2f}"
    fig = rule_figure(curves, f"K={accum}, learning rate {rule}: {verdict}")
    return (
        fig,
        f"Loss over samples seen for one and for {accum} micro-batches per step, learning rate {rule}.",
    )

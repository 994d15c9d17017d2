"""The experiments of lesson 07 as functions of their knobs: gradients recorded, optimizers counted, tiny runs."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import torch
from safetrain_core import (
    GaLore,
    MiniGPT,
    MiniGPTConfig,
    find_basis,
    next_token_loss,
    optimizer_state_bytes,
    predict_state_bytes,
    projection_error,
)
from torch import Tensor, nn

from . import toy
from .counting import activation_bytes
from .figures import draw, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Width of the model, which is the smaller side of each of its matrices, and rows of a batch.
WIDTH, ROWS = 64, 16
#: Updates between two bases, and the number that no run of this lesson reaches.
INTERVAL, NEVER = 20, 10**6
#: Learning rates: of embeddings, norms and biases in every run; of the matrices by what steps them. AdamW's is the
#: best of 0.001, 0.002 and 0.004, GaLore's of 0.005, 0.01, 0.02 and 0.04 (over ranks 4 and 16).
REST_LR = 0.01
MATRIX_LR = {"AdamW": 0.002, "GaLore": 0.02}
#: Where embeddings are projected too, which scales their steps by 0.25: the best of 0.01, 0.02, 0.04, 0.08, 0.16.
PROJECTED_EMBEDDING_LR = 0.04
#: Of the two runs around Adafactor.
ADAFACTOR_LR = 0.1
#: The matrices of a block, by the ends of their names.
KINDS = {
    "attention.qkv.weight": "attention, in",
    "attention.out.weight": "attention, out",
    "mlp.0.weight": "MLP, up",
    "mlp.2.weight": "MLP, down",
}
EMBEDDING = "embedding"
#: The weight whose change is kept by each run.
WATCHED = "blocks.1.mlp.2.weight"

Factory = Callable[[Any], torch.optim.Optimizer]


# --- the model and its gradients ------------------------------------------------------------------------------


def gpt(seed: int = 0, width: int = WIDTH) -> MiniGPT:
    """Two blocks of ``width`` over the corpus's characters."""
    torch.manual_seed(seed)
    return MiniGPT(
        MiniGPTConfig(
            len(toy.text().vocab), context=toy.CONTEXT, layers=2, heads=4, width=width
        )
    )


def matrices(model: nn.Module) -> dict[str, Tensor]:
    """The matrices inside the blocks, by name: 2-D, and no embedding.

    >>> {tuple(weight.shape) for weight in matrices(gpt()).values()} == {(192, 64), (64, 64), (256, 64), (64, 256)}
    True
    """
    named = model.named_parameters()
    return {name: p for name, p in named if p.dim() == 2 and name.startswith("blocks.")}


def embeddings(model: MiniGPT) -> list[Tensor]:
    """What ``exclude`` of GaLore gets: the two tables of vectors."""
    return [model.tokens.weight, model.positions.weight]


def batches(steps: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """What every run of this lesson trains on."""
    return toy.text_batches(steps, seed, ROWS)


def groups(model: MiniGPT, embedding_lr: float = REST_LR) -> list[dict[str, Any]]:
    """The blocks' matrices; norms and biases; embeddings: these two with learning rates of their own."""
    tables = embeddings(model)
    placed = {id(weight) for weight in (*matrices(model).values(), *tables)}
    rest = [p for p in model.parameters() if id(p) not in placed]
    return [
        {"params": list(matrices(model).values())},
        {"params": rest, "lr": REST_LR},
        {"params": tables, "lr": embedding_lr},
    ]


@lru_cache(maxsize=1)
def recorded(steps: int = 150, seed: int = 0) -> dict[int, dict[str, Tensor]]:
    """Train with AdamW, and keep the gradients of the first update and of the second half, by update and name."""
    model = gpt(seed)
    adamw = torch.optim.AdamW(groups(model), lr=MATRIX_LR["AdamW"], fused=True)
    kept: dict[int, dict[str, Tensor]] = {}
    for update, (x, y) in enumerate(batches(steps, seed)):
        adamw.zero_grad()
        next_token_loss(model(x), y).backward()
        if update == 0 or update >= steps // 2:
            seen = {**matrices(model), "tokens.weight": model.tokens.weight}
            kept[update] = {name: _gradient(weight) for name, weight in seen.items()}
        adamw.step()
    return kept


def _gradient(weight: Tensor) -> Tensor:
    if weight.grad is None:
        raise ValueError("this weight has no gradient yet")
    return weight.grad.clone()


def shares(matrix: Tensor) -> Tensor:
    """Share of a matrix's energy, its sum of squares, in its leading 1, 2, ... singular directions.

    >>> shares(torch.diag(torch.tensor([4.0, 3.0])))
    tensor([0.6400, 1.0000])
    """
    energy = torch.linalg.svdvals(matrix).square()
    return energy.cumsum(0) / energy.sum()


def by_kind(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """``shares`` of each kind of weight, the mean over the blocks."""
    found: dict[str, list[Tensor]] = {}
    for name, gradient in gradients.items():
        kind = next((kind for end, kind in KINDS.items() if name.endswith(end)), EMBEDDING)
        found.setdefault(kind, []).append(shares(gradient))
    return {kind: torch.stack(each).mean(0) for kind, each in found.items()}


def noise_shares(seed: int = 0) -> Tensor:
    """``shares`` of a 64 x 256 matrix of independent normal numbers, which has no structure at all."""
    draws = torch.Generator().manual_seed(seed)
    return shares(torch.randn(WIDTH, 4 * WIDTH, generator=draws))


def spectrum_figure(curves: dict[str, Tensor]) -> Figure:
    """Share of the energy over the number of directions kept."""
    fig, ax = draw(
        "A few directions of 64 hold most of a gradient, fewer early than late",
        "directions kept, of 64 (log scale)",
        "share of the energy (%)",
        height=3.4,
    )
    for index, (label, curve) in enumerate(curves.items()):
        at = sorted({1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, len(curve)})
        ax.plot(at, [100 * float(curve[r - 1]) for r in at], label=label, **style(index))
    ax.set_xscale("log", base=2)
    ax.set_xticks([1, 2, 4, 8, 16, 32, 64], ["1", "2", "4", "8", "16", "32", "64"])
    ax.set_ylim(0, 103)
    ax.legend(frameon=False, loc="lower right")
    return fig


# --- a basis grows old ----------------------------------------------------------------------------------------


def seen_share(gradient: Tensor, basis: Tensor) -> float:
    """Share of a gradient's energy inside a basis.

    >>> round(seen_share(torch.diag(torch.tensor([4.0, 3.0])), torch.eye(2, 1)), 3)
    0.64
    """
    return 1 - projection_error(gradient, basis) ** 2


def ageing(
    steps: int = 150, seed: int = 0, rank: int = 4, starts: int = 4
) -> dict[int, float]:
    """What a basis of ``rank`` holds of the gradients that come after its own, by age in updates.

    The mean over the blocks' matrices, and over bases taken at ``starts`` updates in the second half of the run.
    """
    kept = recorded(steps, seed)
    first = max(1, steps // 2)
    ages = [age for age in (0, 1, 2, 5, 10, 20, 50) if first + starts - 1 + age in kept]
    found: dict[int, list[float]] = {age: [] for age in ages}
    for start in range(first, first + starts):
        for name, gradient in kept[start].items():
            if name.startswith("blocks."):
                basis = find_basis(gradient, rank)
                for age in ages:
                    found[age].append(seen_share(kept[start + age][name], basis))
    return {age: mean(each) for age, each in found.items()}


def ageing_figure(curves: dict[int, dict[int, float]]) -> Figure:
    """``curves``: by rank, what a basis holds by its age."""
    fig, ax = draw(
        "A basis holds its own gradient, and much less of the next",
        "age of the basis (updates, 0 = its own gradient)",
        "share of the energy (%)",
    )
    for index, (rank, curve) in enumerate(curves.items()):
        places = range(len(curve))
        ax.plot(
            places, [100 * v for v in curve.values()], label=f"rank {rank}", **style(index)
        )
        ax.axhline(100 * rank / WIDTH, color=style(index)["color"], linewidth=1, alpha=0.7)
        ax.annotate(
            f"random basis of rank {rank}", (0.02, 100 * rank / WIDTH + 2), fontsize=8
        )
        ax.set_xticks(places, [str(age) for age in curve])
    ax.set_ylim(0, 103)
    ax.legend(frameon=False, loc="upper right")
    return fig


# --- what the first tries get wrong ---------------------------------------------------------------------------


def low_rank_but_whole(grad: Tensor, rank: int) -> tuple[int, int, int]:
    """Hand AdamW the rank-``rank`` part of a gradient, as a matrix of full size.

    Returns:
        Bytes of AdamW's state; rank of that gradient; rank of the step that AdamW makes of it.
    """
    basis = find_basis(grad, rank)
    weight = nn.Parameter(torch.zeros_like(grad))
    weight.grad = (
        basis @ (basis.mT @ grad)
        if grad.shape[0] <= grad.shape[1]
        else grad @ basis @ basis.mT
    )
    adamw = torch.optim.AdamW([weight], lr=0.01, weight_decay=0.0)
    adamw.step()
    return optimizer_state_bytes(adamw), rank_of(weight.grad), rank_of(weight.detach())


def rank_of(matrix: Tensor) -> int:
    """Singular values above a 10,000th of the largest: what float32 rounding leaves behind is far below.

    >>> rank_of(torch.diag(torch.tensor([1.0, 1e-6, 0.5])))
    2
    """
    values = torch.linalg.svdvals(matrix)
    return int((values > 1e-4 * values[0]).sum())


def step_ratio(weight_size: float, rank: int = 8, seed: int = 0) -> float:
    """How many times shorter Adafactor's first step is with a proxy of zeros than with one that holds P^T W.

    Args:
        weight_size: standard deviation of the 64 x 256 weight.
    """
    draws = torch.Generator().manual_seed(seed)
    weight = weight_size * torch.randn(WIDTH, 4 * WIDTH, generator=draws)
    gradient = torch.randn(WIDTH, 4 * WIDTH, generator=draws)
    basis = find_basis(gradient, rank)
    lengths = []
    for value in (basis.mT @ weight, torch.zeros(rank, 4 * WIDTH)):
        proxy = nn.Parameter(value.clone())
        proxy.grad = basis.mT @ gradient
        torch.optim.Adafactor([proxy], lr=ADAFACTOR_LR, weight_decay=0.0).step()
        lengths.append(float((proxy.detach() - value).norm()))
    return lengths[0] / lengths[1]


def adafactor_by_hand(
    *, empty: bool, steps: int = 150, seed: int = 0, rank: int = 8
) -> list[float]:
    """GaLore around Adafactor, written out, on the blocks' matrices; losses.

    Args:
        empty: the proxy starts each update from zeros, and not from the projected weight.
    """
    model = gpt(seed)
    inside = list(matrices(model).values())
    shapes = [
        (rank, w.shape[1]) if w.shape[0] <= w.shape[1] else (w.shape[0], rank)
        for w in inside
    ]
    proxies = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    factor = torch.optim.Adafactor(proxies, lr=ADAFACTOR_LR, weight_decay=0.0)
    rest = torch.optim.AdamW(groups(model)[1:], weight_decay=0.0)
    bases: list[Tensor] = []
    losses = []
    for update, (x, y) in enumerate(batches(steps, seed)):
        model.zero_grad()
        loss = next_token_loss(model(x), y)
        loss.backward()
        losses.append(loss.item())
        if update % INTERVAL == 0:
            bases = [find_basis(_gradient(w), rank) for w in inside]
        for weight, proxy, basis in zip(inside, proxies, bases, strict=True):
            left = weight.shape[0] <= weight.shape[1]
            project = (lambda m, p=basis: p.mT @ m) if left else (lambda m, p=basis: m @ p)
            value = project(weight.detach())
            proxy.data = torch.zeros_like(value) if empty else value.clone()
            proxy.grad = project(_gradient(weight))
        before = [proxy.detach().clone() for proxy in proxies]
        factor.step()
        rest.step()
        with torch.no_grad():
            for weight, proxy, old, basis in zip(
                inside, proxies, before, bases, strict=True
            ):
                change = proxy - old
                left = weight.shape[0] <= weight.shape[1]
                weight += 0.25 * (basis @ change if left else change @ basis.mT)
    return losses


# --- whole runs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """Losses, one per update, and the change of one weight, (64, 256), from the first to the last."""

    losses: tuple[float, ...]
    moved: Tensor

    @property
    def end(self) -> float:
        """Mean loss over the last 20 updates."""
        return mean(self.losses[-20:])


@lru_cache(maxsize=64)
def run(
    rank: int | None = None,
    *,
    interval: int = INTERVAL,
    moments: str = "keep",
    embeddings_too: bool = False,
    steps: int = 150,
    seed: int = 0,
) -> Run:
    """Train with AdamW, or with GaLore of ``rank`` around it on the blocks' matrices. Both have no weight decay.

    Args:
        rank: None = plain AdamW.
        interval, moments: of GaLore.
        embeddings_too: project the embeddings as well.
    """
    model = gpt(seed)
    start = matrices(model)[WATCHED].detach().clone()
    of_matrices = MATRIX_LR["AdamW" if rank is None else "GaLore"]
    adamw = partial(torch.optim.AdamW, lr=of_matrices, weight_decay=0.0, fused=True)
    if rank is None:
        optimizer: torch.optim.Optimizer = adamw(groups(model))
    else:
        of_embeddings = PROJECTED_EMBEDDING_LR if embeddings_too else REST_LR
        optimizer = GaLore(
            groups(model, of_embeddings), adamw, rank=rank, update_interval=interval, moments=moments,
            exclude=() if embeddings_too else embeddings(model),
        )  # fmt: skip
    losses = []
    for x, y in batches(steps, seed):
        optimizer.zero_grad()
        loss = next_token_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Run(tuple(losses), matrices(model)[WATCHED].detach() - start)


def smoothed(losses: Sequence[float], span: int = 10) -> tuple[list[int], list[float]]:
    """Updates and means of ``span`` losses each.

    >>> smoothed([1.0, 3.0, 5.0], span=2)
    ([2], [2.0])
    """
    ends = range(span, len(losses) + 1, span)
    return list(ends), [mean(losses[end - span : end]) for end in ends]


def loss_figure(
    curves: dict[str, Sequence[float]], title: str, *, steps: int = 150
) -> Figure:
    """Losses over updates, each point the mean of 10, or of fewer in a short run."""
    span = 10 if steps >= 40 else 1
    fig, ax = draw(title, "update", "loss (nats per token)", height=3.4)
    for index, (label, losses) in enumerate(curves.items()):
        ax.plot(*smoothed(losses, span), label=label, **style(index))
    ax.set_ylim(top=min(4.0, ax.get_ylim()[1]))
    ax.legend(frameon=False, loc="upper right")
    return fig


def rank_picture(
    rank: int, interval: int, moments: str, steps: int = 150, seed: int = 0
) -> tuple[Figure, str]:
    """The figure of the first control, and its text."""
    plain = run(steps=steps, seed=seed)
    ours = run(rank, interval=interval, moments=moments, steps=steps, seed=seed)
    bases = "one basis for all" if interval >= steps else f"new basis every {interval}"
    curves = {"AdamW": plain.losses, f"GaLore, rank {rank}, {bases}": ours.losses}
    title = (
        f"Rank {rank}, moments: {moments}; ends at {ours.end:.2f}, AdamW at {plain.end:.2f}"
    )
    return (
        loss_figure(curves, title, steps=steps),
        f"Loss over {steps} updates of AdamW and of GaLore with rank {rank}, {bases}, moments: {moments}.",
    )


# --- bytes ----------------------------------------------------------------------------------------------------

ADAMW: Factory = partial(torch.optim.AdamW, lr=1e-3)
ADAFACTOR: Factory = partial(torch.optim.Adafactor, lr=1e-3)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without GaLore's warning that a rank leaves nothing to project; here this is what is counted."""
    logger, nowhere = logging.getLogger("safetrain_core"), logging.NullHandler()
    logger.addHandler(nowhere)
    try:
        yield
    finally:
        logger.removeHandler(nowhere)


def state_bytes(
    factory: Factory, rank: int | None = None, seed: int = 0
) -> tuple[int, int]:
    """Bytes of an optimizer's state on ``gpt``: counted after one update, and predicted before.

    Args:
        rank: of GaLore around it, embeddings left out; None = without GaLore.
    """
    model = gpt(seed)
    weights = list(model.parameters())
    told = predict_state_bytes(weights, factory, rank=rank, exclude=embeddings(model))
    x, y = next(batches(1, seed))
    next_token_loss(model(x), y).backward()
    optimizer = factory(weights)
    if rank is not None:
        with quiet():
            optimizer = GaLore(weights, factory, rank=rank, exclude=embeddings(model))
    optimizer.step()
    return optimizer_state_bytes(optimizer), told


def apollo_bytes(model: MiniGPT, rank: int) -> int:
    """Bytes that APOLLO's own package holds in float32, from the shapes: compared with it where it is installed.

    For a matrix of the blocks two moments of the projected gradient, the projection, and one number; AdamW's two
    moments for all else.
    """
    inside = {id(weight) for weight in matrices(model).values()}
    numbers = 0
    for weight in model.parameters():
        if id(weight) in inside and min(weight.shape) > rank:
            numbers += rank * (2 * max(weight.shape) + min(weight.shape)) + 1
        else:
            numbers += 2 * weight.numel()
    return 4 * numbers


def one_weight_bytes(m: int, n: int, rank: int) -> int:
    """Counted: what GaLore around AdamW holds for one weight of shape (m, n), the 4 bytes of the step left out.

    >>> one_weight_bytes(64, 256, 8) == 4 * (64 * 8 + 2 * 8 * 256)
    True
    """
    weight = nn.Parameter(torch.zeros(m, n))
    weight.grad = torch.ones(m, n)
    optimizer = GaLore([weight], ADAMW, rank=rank)
    optimizer.step()
    return optimizer_state_bytes(optimizer) - 4


def bytes_figure(ranks: Sequence[int], rows: dict[str, Sequence[float]]) -> Figure:
    """``rows``: by optimizer, state in multiples of AdamW's, one for each of ``ranks``."""
    fig, ax = draw(
        "State grows with the rank, and around Adafactor there is none to save",
        "rank, of 64",
        "state / AdamW's state",
    )
    for index, (label, values) in enumerate(rows.items()):
        ax.plot(ranks, values, label=label, **style(index))
    ax.set_ylim(0, 1.3)
    ax.legend(frameon=False, loc="upper left", ncols=2, fontsize=9)
    return fig


def large_model(width: int = 1024, layers: int = 24) -> MiniGPT:
    """A model of 310 million weights without memory: shapes alone, on torch's meta device."""
    with torch.device("meta"):
        return MiniGPT(
            MiniGPTConfig(8192, context=1024, layers=layers, heads=16, width=width)
        )


def memory_parts(rank: int | None, width: int = WIDTH, rows: int = ROWS) -> dict[str, int]:
    """Bytes of one training run: weights, gradients, state of (GaLore around) AdamW, activations kept for backward."""
    model = gpt(0, width)
    weights = list(model.parameters())
    size = sum(p.numel() * p.element_size() for p in weights)
    x, y = next(toy.text_batches(1, 0, rows))
    kept = sum(activation_bytes(model, lambda: next_token_loss(model(x), y)).values())
    state = predict_state_bytes(weights, ADAMW, rank=rank, exclude=embeddings(model))
    return {"weights": size, "gradients": size, "state": state, "activations": kept}


def memory_picture(width: int, rows: int) -> tuple[Figure, str]:
    """The figure of the second control, and its text: AdamW beside GaLore at an eighth of the width."""
    rank = width // 8
    bars = {
        "AdamW": memory_parts(None, width, rows),
        f"GaLore\nrank {rank}": memory_parts(rank, width, rows),
    }
    plain, ours = (sum(parts.values()) for parts in bars.values())
    saved = f"{1 - ours / plain:.0%}"
    fig, ax = draw(
        f"Width {width}, {rows} rows: GaLore saves {saved} of the whole",
        "MB",
        "",
        height=2.4,
    )
    fills = (("#222222", ""), ("#999999", ""), ("#0072B2", "//"), ("#E8E8E8", ""))
    left = [0.0, 0.0]
    for (colour, hatch), part in zip(fills, bars["AdamW"], strict=True):
        sizes = [parts[part] / 1e6 for parts in bars.values()]
        ax.barh(
            list(bars),
            sizes,
            left=left,
            color=colour,
            hatch=hatch,
            edgecolor="white",
            label=part,
        )
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    ax.invert_yaxis()
    ax.set_xlim(0, 1.02 * max(left))
    fig.legend(frameon=False, ncols=4, loc="outside lower center")
    return (
        fig,
        f"Two bars of memory by part, AdamW and GaLore, at width {width} and {rows} rows.",
    )


# --- time -----------------------------------------------------------------------------------------------------

NEW_SVD, NEW_RANDOM = "GaLore, new basis by SVD", "GaLore, new basis randomized"
BETWEEN, PLAIN = "GaLore, between two bases", "fused AdamW"


def update_ms(
    shape: tuple[int, int] = (512, 1024), rank: int = 64, rounds: int = 5
) -> dict[str, float]:
    """Milliseconds of one update of one weight in four ways, taking turns; medians."""
    draws = torch.Generator().manual_seed(0)
    gradient = torch.randn(shape, generator=draws)
    adamw = partial(torch.optim.AdamW, lr=1e-3, fused=True)

    def galore(interval: int, method: str) -> Factory:
        return lambda params: GaLore(
            params, adamw, rank=rank, update_interval=interval, method=method
        )

    ways: dict[str, Factory] = {
        PLAIN: adamw,
        BETWEEN: galore(NEVER, "svd"),
        NEW_SVD: galore(1, "svd"),
        NEW_RANDOM: galore(1, "randomized"),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    steps = {}
    for name, make in ways.items():
        weight = nn.Parameter(torch.zeros(shape))
        weight.grad = gradient
        steps[name] = make([weight]).step
        steps[name]()  # the first update warms up
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            taken[name].append(1e3 * (time.perf_counter() - start))
    return {name: median(each) for name, each in taken.items()}


def spread(between: float, with_new: float, interval: int) -> float:
    """Time of a mean update when one in ``interval`` takes a new basis.

    >>> spread(1.0, 101.0, 1), spread(1.0, 101.0, 200)
    (101.0, 1.5)
    """
    return between + (with_new - between) / interval


def spread_figure(ms: dict[str, float]) -> Figure:
    """Time of a mean update over the interval, in multiples of fused AdamW's."""
    fig, ax = draw(
        "From some interval on a new basis costs next to nothing",
        "updates between two bases (log scale)",
        "time / AdamW's (log scale)",
    )
    intervals = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
    for index, (label, name) in enumerate((("SVD", NEW_SVD), ("randomized", NEW_RANDOM))):
        times = [spread(ms[BETWEEN], ms[name], t) / ms[PLAIN] for t in intervals]
        ax.plot(intervals, times, label=label, **style(index))
    ax.axhline(ms[BETWEEN] / ms[PLAIN], color="#000000", linewidth=1, linestyle=":")
    ax.annotate("no new basis at all", (1.0, 0.72 * ms[BETWEEN] / ms[PLAIN]), fontsize=9)
    ax.set_xscale("log")
    ax.set_yscale("log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    ax.set_ylim(bottom=0.5 * ms[BETWEEN] / ms[PLAIN])
    ax.minorticks_off()
    ax.legend(frameon=False, loc="upper right")
    return fig


def randomized_excess(gradients: dict[str, Tensor], rank: int, seed: int = 0) -> float:
    """Largest ratio of what the randomized basis loses of a gradient to what the exact one loses."""
    ratios = []
    for name, gradient in gradients.items():
        if name.startswith("blocks."):
            exact, random = (
                projection_error(gradient, find_basis(gradient, rank, method=m, seed=seed))
                for m in ("svd", "randomized")
            )
            ratios.append(random / exact)
    return max(ratios)


# --- rotations ------------------------------------------------------------------------------------------------


def rotation_gap(factory: Factory, steps: int = 5, seed: int = 0) -> float:
    """How far the weights end from the plain optimizer's under a basis of full rank, as a share of the way."""
    ends = []
    for rotated in (False, True):
        model = gpt(seed)
        start = [w.detach().clone() for w in matrices(model).values()]
        inside = list(matrices(model).values())
        optimizer = factory(inside)
        if rotated:
            optimizer = GaLore(
                inside, factory, rank=WIDTH, update_interval=NEVER, scale=1.0,
                force_full_rank=True,
            )  # fmt: skip
        for x, y in batches(steps, seed):
            model.zero_grad()
            next_token_loss(model(x), y).backward()
            optimizer.step()
        ends.append(
            torch.cat(
                [(w.detach() - s).flatten() for w, s in zip(inside, start, strict=True)]
            )
        )
    return float((ends[1] - ends[0]).norm() / ends[0].norm())


def first_step(grad: Tensor, rank: int | None, scale: float = 0.25) -> float:
    """Length of the first update of a weight of zeros with AdamW at 0.01, or with GaLore around it."""
    weight = nn.Parameter(torch.zeros_like(grad))
    weight.grad = grad.clone()
    factory = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.0)
    optimizer: torch.optim.Optimizer = factory([weight])
    if rank is not None:
        optimizer = GaLore([weight], factory, rank=rank, scale=scale)
    optimizer.step()
    return float(weight.detach().norm())


# --- what a skipped step leaves alone -------------------------------------------------------------------------


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of the weights, and of every tensor of the optimizer's state: bases and moments."""

    def tensors(value: Any) -> Iterator[Tensor]:
        if isinstance(value, Tensor):
            yield value.detach().clone()
        elif isinstance(value, dict):
            for each in value.values():
                yield from tensors(each)

    return [*tensors(dict(model.named_parameters())), *tensors(dict(optimizer.state))]


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether two snapshots are bit for bit the same."""
    return len(one) == len(other) and all(
        a.equal(b) for a, b in zip(one, other, strict=True)
    )

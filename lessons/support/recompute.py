"""The experiments behind lesson 05: activations counted, checkpoints done wrong, the planner's pictures."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetrain_core import (
    MiniGPT,
    MiniGPTConfig,
    activation_memory_bytes,
    apply_recompute,
    measure_recompute,
    memory_after_checkpoint_bytes,
    next_token_loss,
    optimal_segment,
    plan_recompute,
)
from safetrain_core.memory.measure import RecomputeCost
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import toy
from .figures import draw, log_scale, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Batch = tuple[Tensor, Tensor]
Run = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]

#: The models that are counted: width, heads, rows of a batch, tokens that the head knows.
WIDTH, HEADS, ROWS, VOCAB = 64, 8, 2, 96

POLICIES = (
    "none",
    "full",
    "every_k",
    "sqrt",
    "selective",
    "selective_ops",
    "offload",
)


# --- models and batches ---------------------------------------------------------------------------------------


def gpt(
    layers: int,
    seq: int = 128,
    *,
    width: int = WIDTH,
    heads: int = HEADS,
    dropout: float = 0.0,
    seed: int = 0,
    tied: bool = True,
) -> MiniGPT:
    """A small GPT, in training mode.

    >>> len(gpt(3).blocks)
    3
    """
    torch.manual_seed(seed)
    return MiniGPT(
        MiniGPTConfig(
            VOCAB,
            context=seq,
            layers=layers,
            heads=heads,
            width=width,
            dropout=dropout,
            tied=tied,
        )
    )


def tokens(rows: int, seq: int, seed: int = 0) -> Batch:
    """Random token ids and targets, (rows, seq) int64 each."""
    draws = torch.Generator().manual_seed(seed)
    x, y = torch.randint(VOCAB, (2, rows, seq), generator=draws)
    return x, y


def kernel(attention: str) -> contextlib.AbstractContextManager[Any]:
    """Use this attention kernel inside: "flash", which never keeps the scores, or "math", which keeps them all."""
    flash = attention == "flash"
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION if flash else SDPBackend.MATH)


def frozen_gpt(seed: int = 0, dropout: float = 0.0) -> MiniGPT:
    """Three layers of width 32 whose embeddings are frozen, as they often are in fine-tuning."""
    torch.manual_seed(seed)
    model = MiniGPT(
        MiniGPTConfig(
            len(toy.text().vocab),
            context=toy.CONTEXT,
            layers=3,
            heads=4,
            width=32,
            dropout=dropout,
            tied=False,
        )
    )
    model.tokens.requires_grad_(False)
    model.positions.requires_grad_(False)
    return model


def with_layers_run_by(model: MiniGPT, run: Run) -> MiniGPT:
    """The model, with each layer called as ``run(layer, x)``."""
    for block in model.blocks:
        block.forward = functools.partial(run, block.forward)  # type: ignore[method-assign]
    return model


def loss_and_gradients(
    model: nn.Module, batch: Batch, seed: int = 0
) -> tuple[float, list[Tensor | None]]:
    """The loss of a step, and each weight's gradient (None where there is none); dropout draws from ``seed``."""
    torch.manual_seed(seed)
    model.zero_grad()
    loss = next_token_loss(model(batch[0]), batch[1])
    loss.backward()
    return loss.item(), [p.grad for p in model.parameters() if p.requires_grad]


def equal(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> bool:
    """Whether all of these are equal bit for bit.

    >>> equal([torch.ones(2), None], [torch.ones(2), None]), equal([None], [torch.ones(2)])
    (True, False)
    """
    return all(
        a is b is None or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(one, other, strict=True)
    )


def apart(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> float:
    """The distance of two gradients over the length of the second one."""
    pairs = [
        (a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None
    ]
    gap, size = (sum(float(part.square().sum()) for part in parts) for parts in (
        [a - b for a, b in pairs], [b for _, b in pairs]
    ))  # fmt: skip
    return math.sqrt(gap / size)


# --- counts ---------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def counted(
    layers: int,
    seq: int = 128,
    policy: str = "none",
    k: int = 4,
    attention: str = "math",
    width: int = WIDTH,
) -> RecomputeCost:
    """One counted step of a GPT."""
    with kernel(attention):
        return measure_recompute(
            gpt(layers, seq, width=width), tokens(ROWS, seq), policy, k, timed_runs=0
        )


def peak(layers: int, **how: Any) -> int:
    """Bytes of activations at their peak; arguments as for ``counted``."""
    return counted(layers, **how).activation_bytes


def values_per_layer(seq: int, policy: str = "none", attention: str = "math") -> float:
    """What one more layer keeps for the backward pass, in values per token and unit of width.

    >>> round(values_per_layer(32, "full"))  # its input
    1
    """
    more = counted(2, seq, policy, attention=attention).kept_bytes
    less = counted(1, seq, policy, attention=attention).kept_bytes
    return (more - less) / (4 * ROWS * seq * WIDTH)


def layer_overhead(seq: int, policy: str, attention: str = "math") -> float:
    """FLOPs that one more layer recomputes, over those of its forward and backward.

    >>> 0.2 < layer_overhead(32, "full") < 0.25
    True
    """
    more, less = (counted(n, seq, policy, attention=attention) for n in (2, 1))
    plain = (
        more.forward_flops + more.backward_flops - less.forward_flops - less.backward_flops
    )
    return (more.recompute_flops - less.recompute_flops) / plain


def kept_by_part(seq: int, attention: str) -> dict[str, float]:
    """What each part of a layer keeps, in values per token and unit of width; what two parts keep counts once."""
    block, x = gpt(1, seq).blocks[0], torch.randn(ROWS, seq, WIDTH, requires_grad=True)
    weights = {p.untyped_storage().data_ptr() for p in block.parameters()}
    kept = dict.fromkeys(("norm1", "attention", "norm2", "mlp"), 0.0)
    seen: list[Tensor] = []  # alive, so that no address is used twice
    now = "norm1"

    def keep(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in weights | {t.untyped_storage().data_ptr() for t in seen}:
            seen.append(tensor)
            kept[now] += tensor.untyped_storage().nbytes() / (4 * x.numel())
        return tensor

    def enter(name: str, *_: Any) -> None:
        nonlocal now
        now = name

    for name in kept:
        getattr(block, name).register_forward_pre_hook(functools.partial(enter, name))
    with kernel(attention), saved_tensors_hooks(keep, lambda tensor: tensor):
        block(x)
    return kept


def ks(layers: int) -> list[int]:
    """Segment sizes to try: powers of 2, what the classical rule likes best, and all.

    >>> ks(16), ks(8)
    ([1, 2, 4, 8, 16], [1, 2, 3, 4, 8])
    """
    powers = {2**power for power in range(layers.bit_length()) if 2**power < layers}
    return sorted(powers | {optimal_segment(layers), layers})


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New tensors have this dtype inside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@lru_cache(maxsize=8)
def real_size(
    layers: int, policy: str = "none", hidden: int = 8192, seq: int = 8192
) -> RecomputeCost:
    """A step of a GPT of real size in bfloat16, counted on tensors that have sizes and no numbers."""
    with default_dtype(torch.bfloat16), FakeTensorMode():
        model = MiniGPT(
            MiniGPTConfig(2, context=seq, layers=layers, heads=hidden // 128, width=hidden)
        )
        ids = torch.zeros(1, seq, dtype=torch.int64)
        return measure_recompute(model, (ids, ids), policy, timed_runs=0)


def real_layer_gb() -> float:
    """Counted GB that one more layer of width and sequence 8,192 keeps in bfloat16, batch 1."""
    return (real_size(2).kept_bytes - real_size(1).kept_bytes) / 1e9


def chain(layers: int, width: int = WIDTH) -> nn.Sequential:
    """A plain stack of Linear and ReLU: each layer keeps one thing, the input of the next."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers))
    )


@lru_cache(maxsize=4)
def two_stacks(layers: int = 64) -> dict[str, dict[int, float]]:
    """Peak over that of none, by segment size, for a chain of plain layers and for a transformer, both counted."""
    batch = torch.ones(256, WIDTH), torch.ones(256, WIDTH)
    plain = functools.partial(measure_recompute, chain(layers), batch, timed_runs=0)
    small = functools.partial(
        measure_recompute,
        gpt(layers, 32, width=32, heads=4),
        tokens(ROWS, 32),
        timed_runs=0,
    )
    found: dict[str, dict[int, float]] = {}
    for name, measure in (("Linear + ReLU", plain), ("transformer", small)):
        none = measure(policy="none").activation_bytes
        found[name] = {
            k: measure(policy="every_k", k=k).activation_bytes / none for k in ks(layers)
        }
    return found


def more_flops(cost: RecomputeCost, plain: RecomputeCost) -> float:
    """FLOPs of a step over those of the plain one, less 1, whatever phase they are counted in."""
    done, needed = (
        c.forward_flops + c.backward_flops + c.recompute_flops for c in (cost, plain)
    )
    return done / needed - 1


def seconds_ratio(layers: int, policy: str, turns: int = 5) -> float:
    """Wall time of a step over that of the plain step: medians, the two taking turns."""
    batch = tokens(ROWS, 128)
    models = [apply_recompute(gpt(layers), name) for name in ("none", policy)]
    taken: list[list[float]] = [[], []]
    for turn in range(turns + 1):
        for model, times in zip(models, taken, strict=True):
            start = time.perf_counter()
            loss_and_gradients(model, batch)
            if turn > 0:  # the first warms up
                times.append(time.perf_counter() - start)
    plain, other = map(median, taken)
    return other / plain


# --- out of memory, for real ----------------------------------------------------------------------------------


#: Environment of the limited process: what is freed goes back to the system at once, else gaps would count as taken.
ONE_HEAP = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": "32768",
    "MALLOC_ARENA_MAX": "1",
}


def out_of_memory(
    layers: int, seed: int = 0, timeout_s: float = 60
) -> dict[str, Any] | None:
    """One step in a process that may take half-way between what ``none`` and what ``full`` need; None off Linux.

    Returns:
        ``limit_bytes``, ``needs`` (counted bytes by policy), and for "none" and "full" a dict each with the layers that
        the forward got through, ``reached``, and the ``error`` that ended the step with its ``trace``, or None.

    Raises:
        RuntimeError: the process failed in another way, or took too long.
    """
    if not sys.platform.startswith("linux"):
        return None
    rows, seq = max(2, 128 // layers), 128
    model, batch = gpt(layers, seq), tokens(rows, seq)
    needs = {
        policy: measure_recompute(model, batch, policy, timed_runs=0).activation_bytes
        for policy in ("none", "full")
    }
    limit = sum(needs.values()) // 2
    spec = {"layers": layers, "seq": seq, "batch": rows, "seed": seed, "limit_bytes": limit}
    here = str(Path(__file__).resolve().parent.parent)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")])),
        **ONE_HEAP,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "support.memory_worker", json.dumps(spec)],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the process did not end within {timeout_s:g} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(f"the process ended with status {done.returncode}: {last}")
    none, full = json.loads(done.stdout)
    return {"limit_bytes": limit, "needs": needs, "none": none, "full": full}


# --- checkpoints done wrong -----------------------------------------------------------------------------------


def train_losses(model: nn.Module, steps: int = 60, seed: int = 0) -> list[float]:
    """Train with AdamW on text; the loss of each step."""
    weights = [p for p in model.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(weights, lr=3e-3)
    losses = []
    for x, y in toy.text_batches(steps, seed, 8):
        adamw.zero_grad()
        loss = next_token_loss(model(x), y)
        loss.backward()
        adamw.step()
        losses.append(loss.item())
    return losses


def end_of(losses: Sequence[float]) -> float:
    """The mean of the last ten losses.

    >>> end_of([9.0] * 30 + [1.0] * 5 + [3.0] * 5)
    2.0
    """
    return sum(losses[-10:]) / 10


def norm_net(seed: int = 0) -> nn.Sequential:
    """A small net with BatchNorm: two layers of Linear, BatchNorm, GELU, and a Linear."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(
            nn.Sequential(
                nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 16)
            )
            for _ in range(2)
        ),
        nn.Linear(16, 1),
    )


def train_norm_net(
    net: nn.Sequential, run: Run, steps: int = 10, seed: int = 0
) -> nn.Sequential:
    """Train ``net`` on sensor readings, each but its last layer called as ``run(layer, x)``."""
    sgd = torch.optim.SGD(net.parameters(), lr=0.05)
    for x, y in toy.sensor_batches(steps, seed):
        x = x + 2.0  # away from 0, where running means begin
        for layer in list(net)[:-1]:
            x = run(layer, x)
        sgd.zero_grad()
        F.mse_loss(net[-1](x), y).backward()
        sgd.step()
    return net


# --- pictures -------------------------------------------------------------------------------------------------


def _log2_axis(ax: Axes, values: Sequence[int]) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(values), [str(value) for value in values])
    ax.minorticks_off()


def depth_figure(layers: Sequence[int]) -> Figure:
    """Bytes of weights, and of activations with nothing and with every layer recomputed, over the depth."""
    fig, ax = draw("Activations, not weights, fill the memory", "layers", "MB")
    curves = {
        "activations, all kept": [peak(n, attention="flash") for n in layers],
        "activations, each layer recomputed": [
            peak(n, policy="full", attention="flash") for n in layers
        ],
        "weights": [counted(n, attention="flash").parameter_bytes for n in layers],
    }
    for index, (label, values) in enumerate(curves.items()):
        ax.plot(list(layers), [v / 1e6 for v in values], label=label, **style(index))
    ax.set_xticks(list(layers))
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False, loc="upper left")
    return fig


def frozen_figure(curves: dict[str, Sequence[float]]) -> Figure:
    """Loss over steps."""
    fig, ax = draw(
        "The loss falls, although only the head is training",
        "step",
        "loss (nats per token)",
    )
    for index, (label, losses) in enumerate(curves.items()):
        ax.plot(range(1, len(losses) + 1), losses, label=label, **style(index), markevery=5)
    ax.legend(frameon=False, loc="upper right")
    return fig


def segments_figure(layers: int) -> Figure:
    """Peak bytes over the segment size: counted, and by the classical rule."""
    fig, ax = draw(
        "The rule has its knee at sqrt(L); the count has none there",
        "layers per segment, k",
        "peak bytes / those of none",
    )
    sizes = ks(layers)
    none = peak(layers)
    rule = [memory_after_checkpoint_bytes(layers, k) for k in sizes]
    counts = [peak(layers, policy="every_k", k=k) / none for k in sizes]
    ax.plot(sizes, counts, label=f"counted, {layers} transformer layers", **style(0))
    ax.plot(sizes, [r / rule[-1] for r in rule], label="rule: L/k + k layers", **style(1))
    _log2_axis(ax, sizes)
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False, loc="upper center")
    return fig


def flops_figure(layers: int) -> Figure:
    """Recomputed FLOPs over the segment size."""
    fig, ax = draw(
        "Longer segments cost more, up to the textbook's third",
        "layers per segment, k",
        "more FLOPs (%)",
    )
    sizes = ks(layers)
    more = [100 * counted(layers, policy="every_k", k=k).overhead for k in sizes]
    ax.plot(sizes, more, label="counted", **style(0))
    ax.axhline(
        100 / 3, color="#000000", linestyle=":", linewidth=1.2, label="4 units instead of 3"
    )
    _log2_axis(ax, sizes)
    ax.set_ylim(0, 40)
    ax.legend(frameon=False, loc="lower right")
    return fig


def stacks_figure(found: dict[str, dict[int, float]]) -> Figure:
    """Peak over the segment size for two kinds of layers, each one's least marked."""
    fig, ax = draw(
        "The knee is where boundaries and one segment's inside weigh the same",
        "layers per segment, k (of 64)",
        "peak bytes / those of none",
    )
    for index, (label, curve) in enumerate(found.items()):
        best = min(curve, key=lambda k: curve[k])
        ax.plot(list(curve), list(curve.values()), label=label, **style(index))
        ax.plot(best, curve[best], marker="*", markersize=14, color=style(index)["color"])
        ax.annotate(
            f"least at k = {best}",
            (best, curve[best]),
            textcoords="offset points",
            xytext=(0, 12),
            ha="center",
            fontsize=9,
        )
    _log2_axis(ax, list(next(iter(found.values()))))
    log_scale(ax)
    ax.set_ylim(0.02, 1.4)
    ax.legend(frameon=False, loc="upper center")
    return fig


#: The curves over the sequence length: label, policy, attention kernel.
LENGTH_CURVES = (
    ("none, math kernel", "none", "math"),
    ("selective, math kernel", "selective", "math"),
    ("none, flash kernel", "none", "flash"),
    ("full, either kernel", "full", "math"),
)


def lengths_figure(lengths: Sequence[int]) -> Figure:
    """What a layer keeps per token and unit of width, over the sequence length."""
    fig, ax = draw(
        "Only the scores grow with the sequence, and selective drops them",
        "tokens per sequence, L",
        "values per token and width",
    )
    for index, (label, policy, attention) in enumerate(LENGTH_CURVES):
        kept = [values_per_layer(seq, policy, attention) for seq in lengths]
        line = (
            style(index)
            if index != 2
            else {**style(2), "markersize": 9, "fillstyle": "none"}
        )
        ax.plot(list(lengths), kept, label=label, **line)
    _log2_axis(ax, lengths)
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False, loc="upper left")
    return fig


def plan_picture(
    layers: int, hidden: int, seq: int, budget_gb: float, attention: str
) -> tuple[Figure, str]:
    """What each policy needs beside a budget, and its text; what is filled fits."""
    plan = plan_recompute(
        layers, hidden, seq, 1, hidden // 128, "bfloat16", int(budget_gb * 1e9), attention
    )
    verdict = plan.advice.splitlines()[0]
    chosen = plan.choice
    title = (
        f"Plan: {chosen.name}, {chosen.activation_bytes / 1e9:.3g} GB, {chosen.overhead:.0%} more FLOPs"
        if chosen
        else f"Nothing fits {budget_gb:g} GB"
    )
    fig, ax = draw(title, "GB of activations at the peak", "", height=3.6)
    names = [option.name for option in plan.options]
    for row, option in enumerate(plan.options):
        size = option.activation_bytes / 1e9
        fits = option.activation_bytes <= plan.usable_bytes
        color = style(0)["color"] if fits else "#777777"
        ax.plot(size, row, marker="o", color=color, fillstyle="full" if fits else "none")
        host = (
            f" and {option.host_bytes / 1e9:,.0f} GB on the host"
            if option.host_bytes
            else ""
        )
        mark = "  <- the plan" if option == chosen else ""
        ax.annotate(
            f"+{option.overhead:.1%}{host}{mark}",
            (size, row),
            textcoords="offset points",
            xytext=(8, -3),
            fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
            zorder=3,
        )
    ax.axvline(
        plan.usable_bytes / 1e9,
        color="#000000",
        linestyle="--",
        linewidth=1.2,
        label="budget less 10 %",
    )
    ax.set_xscale("log")
    sizes = [o.activation_bytes / 1e9 for o in plan.options] + [plan.usable_bytes / 1e9]
    ax.set_xlim(min(sizes) / 1.5, max(sizes) * 8)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.legend(frameon=False, loc="lower right", fontsize=9)
    return fig, f"GB of activations of each recompute policy beside the budget. {verdict}"


def segment_picture(layers: int, boundary_values: int) -> tuple[Figure, str]:
    """The rule's memory over the segment size, for a boundary that takes this many of a layer's 12 values."""
    sizes = list(range(1, layers + 1))
    size = [
        memory_after_checkpoint_bytes(layers, k, boundary_values=boundary_values)
        for k in sizes
    ]
    share = [value / activation_memory_bytes(layers) for value in size]
    best = min(sizes, key=lambda k: share[k - 1])
    fig, ax = draw(
        f"Least at k = {best}, {share[best - 1]:.0%} of none",
        "layers per segment, k",
        "bytes / those of none",
    )
    ax.plot(sizes, share, label="boundaries and one inside", **{**style(0), "marker": ""})
    ax.plot(
        sizes,
        [math.ceil(layers / k) * boundary_values / 12 / layers for k in sizes],
        label="boundaries",
        **{**style(1), "marker": ""},
    )
    ax.plot(
        sizes,
        [k / layers for k in sizes],
        label="one segment's inside",
        **{**style(2), "marker": ""},
    )
    ax.plot(best, share[best - 1], marker="*", markersize=14, color="#000000")
    ax.set_ylim(0, 1.2)
    ax.legend(frameon=False, loc="upper center")
    return (
        fig,
        f"Memory over the segment size for {layers} layers, a boundary at {boundary_values}/12 of a layer: least at {best}.",
    )

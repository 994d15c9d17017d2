"""The experiments of lesson 01 as functions of their knobs: each trains something small."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from safetrain_core import AmpTrainState, StepLog, clip_global_l2_norm, next_token_loss

from . import toy
from .counting import host_reads
from .doctor import as_log
from .figures import draw, log_scale, mark_skips, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The batch, counted from 1, that reports the sum of its token losses where all others report the mean.
BAD_STEP = 30
#: Tokens in a batch: how much too large its gradient is.
TOKENS = 16 * toy.CONTEXT


def optimizer_for(model: torch.nn.Module, name: str) -> torch.optim.Optimizer:
    """SGD with momentum at 0.1, or AdamW at 0.01."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def spike_run(
    max_norm: float = 1.0,
    weight: float = TOKENS,
    optimizer: str = "sgd",
    steps: int = 60,
    seed: int = 0,
) -> tuple[list[float], list[float]]:
    """Train the tiny GPT through one bad batch, whose loss is ``weight`` times too large.

    Args:
        max_norm: clip threshold; 0 = no clipping.
        weight: 1 = the batch is good after all.

    Returns:
        Mean loss per token and gradient norm before the clip, one per step.
    """
    model = toy.tiny_gpt(seed)
    chosen = optimizer_for(model, optimizer)
    losses, norms = [], []
    for step, (x, y) in enumerate(toy.text_batches(steps, seed), start=1):
        loss = next_token_loss(model(x), y)
        chosen.zero_grad()
        (loss * weight if step == BAD_STEP else loss).backward()
        # An unreachable threshold only measures.
        norms.append(clip_global_l2_norm(model, max_norm or 1e30)[0])
        chosen.step()
        losses.append(loss.item())
    return losses, norms


def spike_summary(losses: list[float]) -> tuple[float, float, float]:
    """The loss before the bad batch, the worst that is a number after it, and the mean of the last ten.

    >>> spike_summary([3.0] * 30 + [9.0] + [4.0] * 10)
    (3.0, 9.0, 4.0)
    """
    worst = max(loss for loss in losses[BAD_STEP:] if loss == loss)
    return losses[BAD_STEP - 2], worst, sum(losses[-10:]) / 10


def spike_figure(curves: dict[str, list[float]]) -> Figure:
    """Loss over steps for each curve, with the bad batch marked."""
    fig, ax = draw(
        "One bad batch: the loss with and without a clip",
        "step",
        "loss (nats per token, log scale)",
    )
    for index, (label, losses) in enumerate(curves.items()):
        ax.plot(
            range(1, len(losses) + 1),
            losses,
            label=label,
            markevery=(2 * index, 4),
            **style(index),
        )
        end = next((i for i, loss in enumerate(losses) if loss != loss), 0)
        if end:
            where = (end, losses[end - 1])
            ax.annotate(
                "then NaN", where, xytext=(8, -3), textcoords="offset points", fontsize=9
            )
    ax.axvline(BAD_STEP, color="#666666", linewidth=1, linestyle=":")
    log_scale(ax)
    low, high = ax.get_ylim()
    ax.set_ylim(low, high * (high / low) ** 0.3)  # room for the legend
    ax.annotate(
        "bad batch", (BAD_STEP, 0.93), xycoords=ax.get_xaxis_transform(), xytext=(-6, 0), fontsize=9,
        textcoords="offset points", ha="right",
    )  # fmt: skip
    ax.legend(frameon=False, loc="upper left")
    return fig


def order_run(
    unscale_first: bool, optimizer: str, steps: int = 40, seed: int = 0
) -> list[dict[str, float]]:
    """Train the tiny MLP in float16, the clip after or before the unscaling; the factor begins at 4096.

    Returns:
        The rows of its log: loss, norm before the clip, factor.
    """
    model = toy.tiny_mlp(seed)
    chosen = optimizer_for(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0, growth_interval=10)
    log = []
    for x, y in toy.sensor_batches(steps, seed):
        chosen.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        if unscale_first:
            scaler.unscale_(chosen)
        norm, _ = clip_global_l2_norm(model, max_norm=1.0)
        log.append((loss.item(), norm, scaler.get_scale()))
        scaler.step(chosen)
        scaler.update()
    losses, norms, factors = zip(*log, strict=True)
    return as_log(loss=losses, grad_norm=norms, scale=factors)


def end(rows: list[dict[str, float]]) -> float:
    """The mean loss of the last five rows.

    >>> end([{"loss": 9.0}] + 5 * [{"loss": 1.0}])
    1.0
    """
    return sum(row["loss"] for row in rows[-5:]) / 5


def scaler_run(
    init_exponent: int = 19,
    growth_interval: int = 4,
    steps: int = 20,
    inf_at: int | None = 12,
    seed: int = 0,
) -> list[StepLog]:
    """Train the tiny MLP in float16 with an enabled scaler that starts at 2**init_exponent."""
    state = AmpTrainState(
        toy.tiny_mlp(seed),
        lr=1e-2,
        amp_dtype=torch.float16,
        init_scale=2.0**init_exponent,
        growth_interval=growth_interval,
    )
    for x, y in toy.sensor_batches(steps, seed, inf_at):
        state.step(x, y)
    return state.log


def scale_figure(rows: list[StepLog]) -> Figure:
    """The scaling factor over steps, with both kinds of SKIP marked."""
    fig, ax = draw(
        "The scaler halves on overflow, and only then", "step", "scaling factor (log scale)"
    )
    ax.step(
        [r.step for r in rows],
        [r.scale for r in rows],
        where="mid",
        color="#0072B2",
        linewidth=1.8,
    )
    kinds = (("non_finite_grad", "x", "#D55E00"), ("non_finite_loss", "D", "#000000"))
    for reason, marker, color in kinds:
        hit = [r for r in rows if r.skip_reason == reason]
        if hit:
            ax.plot(
                [r.step for r in hit], [r.scale for r in hit], linestyle="none", marker=marker, color=color,
                markersize=8, markeredgewidth=2, fillstyle="none", label=f"SKIP, {reason}",
            )  # fmt: skip
            ax.legend(frameon=False, loc="best")
    ax.set_yscale("log", base=2)
    ax.margins(y=0.25)
    return fig


@dataclass(frozen=True)
class Judged:
    """What the guard said of one far too large, finite gradient."""

    row: StepLog
    largest: float


def guard_run(max_norm: float, threshold: float, seed: int = 0) -> Judged:
    """Five good text batches, then the bad one, through AmpTrainState; the verdict on the bad one.

    ``largest`` is max|g| after the clip, measured by a run whose guard is off.
    """
    rows, largest = [], 0.0
    for limit in (threshold, 0.0):
        model = toy.tiny_gpt(seed)
        state = AmpTrainState(
            model,
            optimizer=optimizer_for(model, "sgd"),
            max_norm=max_norm,
            amp_dtype=torch.float32,
            inf_post_clip_threshold=limit,
            loss_fn=lambda logits, target: next_token_loss(logits, target[0]) * target[1],
        )
        for step, (x, y) in enumerate(toy.text_batches(6, seed), start=1):
            state.step(x, (y, TOKENS if step == 6 else 1))
        rows.append(state.log[-1])
        if limit == 0.0:
            largest = max(
                float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None
            )
    return Judged(rows[0], largest)


def visitor_run(
    amp_dtype: torch.dtype,
    unit: str = "raw",
    steps: int = 60,
    window: int = 20,
    seed: int = 0,
) -> tuple[list[StepLog], list[str]]:
    """Train on visitor counts; the rows, and the texts of the skip-rate alerts that were raised."""
    state = AmpTrainState(
        toy.tiny_mlp(seed), lr=1e-2, amp_dtype=amp_dtype, skip_rate_window=window
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in toy.visitor_batches(steps, seed, unit=unit):
            state.step(x, y)
    return state.log, [str(w.message) for w in caught if "skip rate" in str(w.message)]


def skip_rate_figure(
    rates: dict[str, list[float]], skipped: list[int], limit: float
) -> Figure:
    """Rolling skip rates beside the alert's limit."""
    fig, ax = draw(
        "Raw counts are past float16's range, not past bfloat16's",
        "step",
        "skipped, share of 20 steps",
    )
    for index, (label, rate) in enumerate(rates.items()):
        ax.plot(range(1, len(rate) + 1), rate, label=label, markevery=4, **style(index))
    ax.axhline(limit, color="#666666", linewidth=1.2, linestyle=":")
    where = {"xytext": (0, 3), "textcoords": "offset points", "fontsize": 9}
    ax.annotate(f"alert above {limit:.0%}", (0, limit), **where)
    mark_skips(ax, skipped, label="SKIP in float16")
    ax.set_ylim(-0.2, 1.08)
    ax.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.legend(frameon=False, loc="upper right")
    return fig


def gradient_error(amp_dtype: torch.dtype, seed: int = 0, batches: int = 8) -> float:
    """Relative error of the tiny MLP's gradient under autocast, against float32; mean over batches."""
    model = toy.tiny_mlp(seed)
    weights = list(model.parameters())

    def gradient(x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
            loss = F.mse_loss(model(x), y)
        # A fixed factor of 1024 keeps small float16 gradients away from zero, and changes nothing else.
        return (
            torch.cat([g.flatten() for g in torch.autograd.grad(loss * 1024, weights)])
            / 1024
        )

    errors = []
    for x, y in toy.sensor_batches(batches, seed):
        exact = gradient(x, y, torch.float32)
        errors.append(float((gradient(x, y, amp_dtype) - exact).norm() / exact.norm()))
    return sum(errors) / len(errors)


def final_loss(amp_dtype: torch.dtype, steps: int = 100, seed: int = 0) -> float:
    """Mean of the last ten losses of the tiny MLP trained in ``amp_dtype``."""
    state = AmpTrainState(
        toy.tiny_mlp(seed), lr=1e-2, amp_dtype=amp_dtype, init_scale=2.0**12
    )
    rows = [state.step(x, y) for x, y in toy.sensor_batches(steps, seed)]
    return sum(row.loss or 0.0 for row in rows[-10:]) / 10


def window_reads(look_first: bool, micro_batches: int, seed: int = 0) -> int:
    """Host reads of one float16 step of AmpTrainState over a window, on the good path."""
    state = AmpTrainState(
        toy.tiny_mlp(seed),
        amp_dtype=torch.float16,
        init_scale=2.0**10,
        check_loss_before_backward=look_first,
    )
    window = list(toy.sensor_batches(micro_batches, seed))
    state.step_window(window)  # the first step also reads the scaling factor
    return host_reads(lambda: state.step_window(window))


def close(ratios: Iterable[float]) -> bool:
    """All within 2% of 1.

    >>> close([1.0, 1.01]), close([1.0, 1.1])
    (True, False)
    """
    return all(abs(ratio - 1) < 0.02 for ratio in ratios)


def largest_gap(one: torch.nn.Module, other: torch.nn.Module) -> float:
    """The largest difference between two models' weights.

    >>> largest_gap(toy.tiny_mlp(), toy.tiny_mlp())
    0.0
    """
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def reasons(rows: list[StepLog]) -> Counter[str]:
    """How often each reason to skip was given.

    >>> reasons([StepLog(1, 0.1, None, None, None, None, True, "loss_jump")])
    Counter({'loss_jump': 1})
    """
    return Counter(row.skip_reason for row in rows if row.skip_reason)


def skip_line(rows: list[StepLog]) -> str:
    """One character per row: ``.`` for STEP, ``g`` and ``L`` for a gradient or a loss that was not finite.

    >>> skip_line([StepLog(1, 0.1, None, None, None, None), StepLog(2, 0.1, None, None, None, None, True, "loss_jump")])
    '.x'
    """
    signs = {None: ".", "non_finite_grad": "g", "non_finite_loss": "L"}
    return "".join(signs.get(row.skip_reason, "x") for row in rows)


def spike_picture(max_norm: float, weight: float, seed: int = 0) -> tuple[Figure, str]:
    """The figure of the first control, and its text."""
    losses, _ = spike_run(max_norm, weight, seed=seed)
    label = f"clip at {max_norm:g}" if max_norm else "no clip"
    before, worst, _ = spike_summary(losses)
    fig = spike_figure(
        {label: losses, "clip at 1, and no bad batch": spike_run(1.0, 1, seed=seed)[0]}
    )
    title = f"{label[0].upper()}{label[1:]}, bad batch {weight:g} times too large"
    fig.axes[0].set_title(title, fontsize=11, loc="left")
    course = (
        "it leaves the other run's course"
        if worst > 2 * before
        else "it keeps the other run's course"
    )
    return fig, f"Loss over {len(losses)} steps. {title}: {course}."


def scale_picture(
    init_exponent: int, growth_interval: int, seed: int = 0
) -> tuple[Figure, str]:
    """The figure of the second control, and its text."""
    rows = scaler_run(init_exponent, growth_interval, steps=40, seed=seed)
    skipped = sum(row.skipped for row in rows)
    fig = scale_figure(rows)
    fig.axes[0].set_title(
        f"{skipped} of {len(rows)} steps skipped", fontsize=11, loc="left"
    )
    return (
        fig,
        f"Scaling factor over {len(rows)} steps from 2 to the {init_exponent}; {skipped} were skipped.",
    )

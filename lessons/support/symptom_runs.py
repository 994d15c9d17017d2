"""Symptoms 1 to 5 of lesson 00: small training loops that really have the fault, and what the doctor reads in their logs.

Each function trains something tiny with one fault in it. With ``mended=True`` the same loop runs without the fault.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from safetrain_core import AmpTrainState, StepLog, clip_global_l2_norm, diagnose
from torch import Tensor, nn

from . import toy
from .symptom_page import Picture, Shown, losses_of, rows_around

#: The step with the bad batch, where there is one.
BAD_STEP = 30


def spike(seed: int, mended: bool) -> Shown:
    """1. One batch comes in millimetres where all others come in metres, and nothing clips."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    draws = torch.Generator().manual_seed(seed + 9)
    teacher = torch.randn(16, 4, generator=draws)
    rows = []
    for step in range(1, 61):
        x = torch.randn(32, 16, generator=draws)
        y = (x @ teacher).argmax(dim=1)
        if step == BAD_STEP:
            x = 1000 * x
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        limit = 1.0 if mended else math.inf  # to infinity: measured, never cut
        pre, post = clip_global_l2_norm(model, limit)
        optimizer.step()
        rows.append(StepLog(step, 0.3, float(pre), float(post), loss.item(), None))
    return Shown(rows_around(rows, BAD_STEP), diagnose(rows), losses_of(rows))


def overflow(seed: int, mended: bool) -> Shown:
    """2. float16 with a loss scaled by hand: one sensor reads 1000 times too high, its gradient is Inf, and Inf / Inf is NaN."""
    model = toy.tiny_mlp(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=mended)
    rows = []
    for step, (x, y) in enumerate(toy.sensor_batches(24, seed), start=1):
        if step == 12:
            y = 1000 * y
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        factor = scaler.get_scale()
        if mended:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
        else:
            factor = 65536.0
            (loss * factor).backward()
            for weight in model.parameters():
                weight.grad /= factor
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        scaler.step(optimizer)  # a scaler that is off just steps
        scaler.update()
        refused = mended and scaler.get_scale() < factor
        reason = "non_finite_grad" if refused else None
        after = min(norm, 1.0) if math.isfinite(norm) else None
        rows.append(StepLog(step, 0.01, norm, after, loss.item(), factor, refused, reason))
    bad = sum(int(weight.isnan().sum()) for weight in model.parameters())
    total = sum(weight.numel() for weight in model.parameters())
    return Shown(
        [*rows_around(rows, 12), f"{bad} of {total} weights are NaN"],
        diagnose(rows),
        losses_of(rows),
    )


def stuck_factor(seed: int, mended: bool) -> Shown:
    """3. A loop that leaves a bad step by a short way out, past scaler.update(): the factor that overflows stays."""
    model = toy.tiny_mlp(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19)
    rows = []
    for step, (x, y) in enumerate(toy.sensor_batches(30, seed), start=1):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(x), y, reduction="sum")
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        factor = scaler.get_scale()
        norm = _norm(model) / factor
        bad = not math.isfinite(norm)
        reason = "non_finite_grad" if bad else None
        rows.append(StepLog(step, 0.001, norm, None, loss.item(), factor, bad, reason))
        if bad and not mended:
            continue  # "nothing to do here"
        scaler.step(optimizer)  # leaves the step out by itself where a gradient is Inf
        scaler.update()
    factors = {"scaling factor": [row.scale for row in rows]}
    skips = [row.step for row in rows if row.skipped]
    picture = Picture("scaling factor", factors, log=True, skips=skips)
    return Shown(rows_around(rows, 2), diagnose(rows), picture)


def scaled_clip(seed: int, mended: bool) -> Shown:
    """4. The clip comes before unscale_, and so does the norm that is logged: both see the gradients times the factor."""
    model = toy.tiny_mlp(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11, growth_interval=8)
    rows = []
    for step, (x, y) in enumerate(toy.sensor_batches(36, seed), start=1):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if mended:
            scaler.unscale_(optimizer)
        pre, post = clip_global_l2_norm(model, 1.0)
        factor = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        rows.append(StepLog(step, 0.01, float(pre), float(post), loss.item(), factor))
    picture = Picture(
        "value",
        {"gradient norm": [r.pre_clip for r in rows], "scaling factor": [r.scale for r in rows]},
        log=True,
    )  # fmt: skip
    return Shown(rows_around(rows, 8), diagnose(rows), picture)


def past_float16(seed: int, mended: bool) -> Shown:
    """5. In one batch of seven a raw counter reads 100,000, which float16 does not hold: refused rightly, each time."""
    state = AmpTrainState(
        toy.tiny_mlp(seed), lr=0.01, amp_dtype=torch.float16, skip_rate_alert=1.0
    )
    draws = torch.Generator().manual_seed(seed + 5)
    for x, y in toy.sensor_batches(200, seed):
        if torch.rand((), generator=draws) < 1 / 7:
            x[0, 0] = 100_000.0
        if mended:
            x = x.sign() * x.abs().log1p()  # units that fit
        state.step(x, y)
    told = f"{state.skip_count} of {len(state.log)} steps were skipped"
    lines = [str(row) for row in state.log if row.skipped][:3]
    if lines:
        lines = [
            *rows_around(state.log, state.skip_log[0].step, after=1),
            "...",
            *lines[1:],
        ]
    return Shown([*lines, told], diagnose(state.log), losses_of(state.log))


def _norm(model: nn.Module) -> float:
    grads: list[Tensor] = [w.grad.flatten() for w in model.parameters()]
    return float(torch.cat(grads).norm())

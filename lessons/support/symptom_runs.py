"""Symptoms 1 to 7 of lesson 00: small training loops that really have the fault, and what the doctor makes of them.

Each function trains something tiny with one fault in it. With ``mended=True`` the same loop runs without the fault.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from safetrain_core import (
    AmpTrainState,
    StepLog,
    capture_rng_state,
    clip_global_l2_norm,
    diagnose,
    probe_accumulation,
    probe_resume,
    restore_rng_state,
)
from torch import Tensor, nn

from . import toy
from .symptom_page import Picture, Shown, rows_around

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
    picture = Picture("loss", {"loss": [row.loss for row in rows]}, log=True)
    return Shown(rows_around(rows, BAD_STEP), diagnose(rows), picture)


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
    picture = Picture("loss", {"loss": [row.loss for row in rows]}, log=True)
    return Shown(
        [*rows_around(rows, 12), f"{bad} of {total} weights are NaN"],
        diagnose(rows),
        picture,
    )


def stuck_factor(seed: int, mended: bool) -> Shown:
    """3. A loop that leaves a bad step by a short way out, past scaler.update(): the factor that overflows stays."""
    model = toy.tiny_mlp(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19)
    rows = []
    for step, (x, y) in enumerate(toy.sensor_batches(30, seed), start=1):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        factor = scaler.get_scale()
        norm = _norm(model) / factor
        bad = not math.isfinite(norm)
        reason = "non_finite_grad" if bad else None
        rows.append(StepLog(step, 0.01, norm, None, loss.item(), factor, bad, reason))
        if bad and not mended:
            continue  # "nothing to do here"
        scaler.step(optimizer)  # leaves the step out by itself where a gradient is Inf
        scaler.update()
    picture = Picture("scaling factor", {"scaling factor": [r.scale for r in rows]}, log=True)
    picture.skips = [row.step for row in rows if row.skipped]
    return Shown(rows_around(rows, 2, after=8), diagnose(rows), picture)


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
        "norm, and scaling factor",
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
        lines = [*rows_around(state.log, state.skip_log[0].step, after=1), "...", *lines[1:]]
    picture = Picture("loss", {"loss": [row.loss for row in state.log]}, log=True)
    picture.skips = [row.step for row in state.skip_log]
    return Shown([*lines, told], diagnose(state.log), picture)


def undivided(seed: int, mended: bool) -> Shown:
    """6. Sixteen micro-batches, each with its loss whole: the step is sixteen times that of one batch."""
    count = 16
    pieces = list(toy.sensor_batches(2, seed))
    batch = torch.cat([x for x, _ in pieces]), torch.cat([y for _, y in pieces])

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = toy.tiny_mlp(seed)
        return model, torch.optim.SGD(model.parameters(), lr=0.01)

    def step(run: tuple[nn.Module, torch.optim.Optimizer], micro_batches: list) -> None:
        model, optimizer = run
        optimizer.zero_grad()
        for x, y in micro_batches:
            loss = F.mse_loss(model(x), y)
            (loss / len(micro_batches) if mended else loss).backward()
        optimizer.step()

    def moved_by(micro_batches: list) -> float:
        run = make()
        before = nn.utils.parameters_to_vector(run[0].parameters()).detach()
        step(run, micro_batches)
        after = nn.utils.parameters_to_vector(run[0].parameters()).detach()
        return float((after - before).norm())

    one = moved_by([batch])
    many = moved_by(list(zip(*(part.chunk(count) for part in batch), strict=True)))
    lines = [
        f"step on one batch of 64 rows: the weights move by {one:.4f}",
        f"on {count} micro-batches of 4 rows: by {many:.4f}, {many / one:.1f} times as far",
    ]
    found = probe_accumulation(step, make, batch, accum_steps=count, unequal=False)
    return Shown(lines, found)


@dataclass
class _Run:
    """Symptom 7's run: dropout, and a position in its batches."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    at: int = 0


def forgotten_rng(seed: int, mended: bool) -> Shown:
    """7. A checkpoint with weights, optimizer and data position, but without the random numbers that dropout draws."""
    batches = list(toy.sensor_batches(24, seed))

    def make() -> _Run:
        model = nn.Sequential(
            nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 1)
        )
        return _Run(model, torch.optim.AdamW(model.parameters(), lr=0.02))

    def step(run: _Run) -> float:
        x, y = batches[run.at]
        loss = F.mse_loss(run.model(x), y)
        run.optimizer.zero_grad()
        loss.backward()
        run.optimizer.step()
        run.at += 1
        return loss.item()

    def save(run: _Run, path: Path) -> None:
        saved = {
            "model": run.model.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "at": run.at,
        }
        if mended:
            saved["rng"] = capture_rng_state()
        torch.save(saved, path)

    def load(run: _Run, path: Path) -> None:
        saved = torch.load(path, weights_only=True)
        run.model.load_state_dict(saved["model"])
        run.optimizer.load_state_dict(saved["optimizer"])
        run.at = saved["at"]
        if mended:
            restore_rng_state(saved["rng"])  # last

    found = probe_resume(save, load, step, make)
    whole, resumed = _interrupted(seed, make, step, save, load)
    bent = diagnose(resumed, baseline=whole)
    named = [finding for finding in bent if finding.rule == "leaves_baseline"]
    both = {"never interrupted": whole, "resumed after step 10": resumed}
    picture = Picture("loss", {k: [row["loss"] for row in v] for k, v in both.items()})
    picture.marks = [e.step for finding in named for e in finding.evidence]
    lines = [
        f"step {b['step']:2d}: loss {b['loss']:.6f} before, {a['loss']:.6f} with the resume"
        for a, b in islice(zip(resumed, whole, strict=True), 8, 13)
    ]
    return Shown(lines, [*found, *bent], picture)


def _interrupted(seed, make, step, save, load) -> tuple[list[dict], list[dict]]:
    """The rows of a run that nothing happens to, and of one that is saved after step 10, built anew and loaded."""
    rows = []
    for stop in (None, 10):
        torch.manual_seed(seed)
        run, losses = make(), []
        with tempfile.TemporaryDirectory() as folder:
            for number in range(24):
                if number == stop:
                    save(run, Path(folder, "run.pt"))
                    torch.manual_seed(seed)  # a new process begins so
                    run = make()
                    load(run, Path(folder, "run.pt"))
                losses.append({"step": number + 1, "loss": step(run)})
        rows.append(losses)
    return rows[0], rows[1]


def _norm(model: nn.Module) -> float:
    grads: list[Tensor] = [w.grad.flatten() for w in model.parameters()]
    return float(torch.cat(grads).norm())

"""Symptoms 6 to 8 of lesson 00: steps and resumes with a fault that no log shows, given to the doctor's probes.

Each function has one fault in it. With ``mended=True`` the same code runs without the fault.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from safetrain_core import (
    apply_recompute,
    capture_rng_state,
    diagnose,
    measure_recompute,
    probe_accumulation,
    probe_memory,
    probe_resume,
    restore_rng_state,
)
from torch import nn

from . import toy
from .symptom_page import Picture, Shown


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
    picture = Picture(
        "loss",
        {label: [row["loss"] for row in rows] for label, rows in both.items()},
        marks=[e.step for finding in named for e in finding.evidence],
    )
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


#: Memory of symptom 8's device.
DEVICE_BYTES = 6_000_000


def activations_pile_up(seed: int, mended: bool) -> Shown:
    """8. The device holds the weights many times over, and not what sixteen layers keep for their backward."""
    layers, width = 16, 64
    draws = torch.Generator().manual_seed(seed + 8)
    batch = tuple(torch.randn(1024, width, generator=draws) for _ in range(2))

    def make(layers: int = layers) -> tuple[nn.Module, torch.optim.Optimizer]:
        blocks = (nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers))
        model = nn.Sequential(*blocks)
        if mended:
            apply_recompute(model, "sqrt")
        return model, torch.optim.AdamW(model.parameters())

    def step(run: tuple[nn.Module, torch.optim.Optimizer], micro_batches: list) -> None:
        model, optimizer = run
        optimizer.zero_grad()
        for x, y in micro_batches:
            (F.mse_loss(model(x), y) / len(micro_batches)).backward()
        optimizer.step()

    found = probe_memory(step, make, [batch], limit_bytes=DEVICE_BYTES)
    costs = [
        measure_recompute(make(n)[0], batch, timed_runs=0) for n in range(1, layers + 1)
    ]
    weights = costs[-1].parameter_bytes / 1e6
    kept = [cost.activation_bytes / 1e6 for cost in costs]
    lines = [
        f"weights {weights:.1f} MB, activations {kept[-1]:.1f} MB, the device {DEVICE_BYTES / 1e6:.0f} MB"
    ]
    curves = {"activations": kept, "the device": [DEVICE_BYTES / 1e6] * layers}
    picture = Picture("MB", curves, xlabel="layers")
    return Shown(lines, found, picture)

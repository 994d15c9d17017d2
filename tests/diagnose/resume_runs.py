"""Runs with a data position, and ways to save and load them, right and wrong, for ``probe_resume`` to judge."""

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from probed_loops import batch, loss_of, model, optimizer
from torch import nn

from safetrain_core import capture_rng_state, restore_rng_state

SAMPLES, SIZE = 24, 4


@dataclass
class Script:
    """A plain script: shuffled epochs, AMP, schedule, and a position in the data."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    scaler: torch.amp.GradScaler
    data: Any
    noise: str | None
    order: list[int] = field(default_factory=list)
    at: int = 0
    average: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Kind:
    """``noise``: what is drawn at random in a step besides the order of an epoch (by torch): python, numpy, or None."""

    model: str = "mlp"
    optimizer: str = "adamw"
    seed: int = 0
    scaled: bool = False
    noise: str | None = None

    def make(self):
        torch.manual_seed(self.seed)  # as a script begins
        random.seed(self.seed)
        np.random.seed(self.seed)
        net = model(self.model)
        chosen = optimizer(self.optimizer, net)
        schedule = torch.optim.lr_scheduler.LambdaLR(chosen, lambda n: 1 / (1 + n))
        scaler = torch.amp.GradScaler("cpu", enabled=self.scaled, init_scale=256.0, growth_interval=2)
        return Script(net, chosen, schedule, scaler, batch(self.model, self.seed, SAMPLES), self.noise)


def step(run):
    if run.at % SAMPLES == 0:
        run.order = torch.randperm(SAMPLES).tolist()
        run.at = 0
    rows = run.order[run.at : run.at + SIZE]
    run.at += SIZE
    x, y = (tensor[rows] for tensor in run.data)
    factor = {None: lambda: 1.0, "python": random.random, "numpy": np.random.rand}[run.noise]()
    run.optimizer.zero_grad()
    loss = loss_of(run.model(x), y) * factor
    run.scaler.scale(loss).backward()
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.scheduler.step()
    return loss


PARTS = ("model", "optimizer", "scheduler", "scaler")


def save(run, path, without=()):
    parts = {name: getattr(run, name).state_dict() for name in PARTS if name not in without}
    position = {} if "position" in without else {"order": run.order, "at": run.at}
    torch.save({**parts, **position, "rng": capture_rng_state()}, path)


def load(run, path, without=()):
    told = torch.load(path, weights_only=True)
    for name in PARTS:
        if name in told and name not in without:
            getattr(run, name).load_state_dict(told[name])
    run.order, run.at = told.get("order", run.order), told.get("at", run.at)
    if "rng" not in without:
        restore_rng_state(told["rng"])

"""Runs on a card whose temperature the test sets: what the tests of the thermal guard share."""

import csv
import threading
import time
from pathlib import Path

import torch
from measure import Watch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from safetrain_core import SafeTrainer, TrainConfig

POLL = 0.01


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))


def loader():
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(24, 3, generator=generator), torch.randn(24, 1, generator=generator))
    return DataLoader(data, 2, shuffle=True)


#: A test that would wait for ever for a card to cool ends as critical instead.
PATIENCE_S = 90.0


class Card:
    """A source whose temperature a test sets; ``be()`` returns once the guard has seen it."""

    def __init__(self, celsius=60.0):
        self.celsius, self.trainer, self.then = celsius, None, lambda: None
        self.threads = []
        self.until = time.monotonic() + PATIENCE_S

    def __call__(self):
        self.threads.append(threading.get_ident())
        self.then()
        return self.celsius if time.monotonic() < self.until else 119.0

    def be(self, celsius, polls=1):
        """Be as hot as that, and return when it was seen, ``polls`` times."""
        self.celsius = celsius
        for _ in range(1 + polls):  # the first may have begun before
            assert self.trainer._thermal.poller.wait(30)

    def cools_when(self, happened, *steps):
        """From the poller's thread: once ``happened()``, take these temperatures in turn."""
        left = list(steps)

        def then():
            if left and happened():
                self.celsius = left.pop(0)

        self.then = then


def make(
    folder, card=None, *, net=None, on_row=None, loss_fn=None, val_loader=None, source=None, devices=None, **config
):
    options = {
        "max_steps": 10,
        "gpu_temp_guard": card is not None,
        "gpu_temp_poll_interval_seconds": POLL,
        "telemetry_log_interval": 3,
        "scheduler_type": "constant",
        **config,
    }
    net = net or model()
    trainer = SafeTrainer(
        net,
        TrainConfig(**options),
        loader(),
        val_loader,
        loss_fn,
        on_row=on_row,
        checkpoint_dir=folder,
        thermal_source=source if source is not None else card,
        thermal_devices=devices,
    )
    if card is not None:
        card.trainer = trainer
    return net, trainer


def at(step, action):
    return lambda row: action() if row.step == step else None


def same(a, b):
    return all(torch.equal(x, b.state_dict()[name]) for name, x in a.state_dict().items())


def pausing(folder, card, step):
    """``on_row`` for a run that gets hot after ``step`` and cools once its checkpoint is there."""
    saved = folder / f"step_{step:08d}.pt"
    card.cools_when(saved.exists, 84.0, 80.0, 74.0)
    return at(step, lambda: card.be(86.0))


def counted(guard):
    """Host reads and operations of 20 steps with or without the guard, and the card, which knows who asked it."""
    torch.manual_seed(0)
    card = Card() if guard else None
    _, trainer = make(None, card, max_steps=20, telemetry_log_interval=1)
    with Watch(trainer.amp.optimizer) as watch:
        trainer.fit()
    return sum(watch.reads.values()), watch.ops.total(), card


def rows_of(path):
    return list(csv.DictReader(Path(path).open(newline="")))

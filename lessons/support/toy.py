"""Small data and small models to break: real text for a tiny GPT, sensor readings for a tiny MLP."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import torch
from safetrain_core import Corpus, MiniGPT, MiniGPTConfig
from torch import Tensor, nn

CONTEXT = 32


@lru_cache(maxsize=1)
def text() -> Corpus:
    """The default corpus: sources of Python's own standard library, as characters."""
    return Corpus.from_files(None, context=CONTEXT)


def text_batches(
    num: int, seed: int = 0, batch: int = 16
) -> Iterator[tuple[Tensor, Tensor]]:
    """``num`` batches of (inputs, targets), (batch, 32) int64 each.

    >>> x, y = next(text_batches(1))
    >>> x.shape, torch.equal(x[:, 1:], y[:, :-1])
    (torch.Size([16, 32]), True)
    """
    windows = text().train
    picks = torch.Generator().manual_seed(seed)
    for _ in range(num):
        chosen = [
            windows[i]
            for i in torch.randint(len(windows), (batch,), generator=picks).tolist()
        ]
        yield torch.stack([x for x, _ in chosen]), torch.stack([y for _, y in chosen])


def tiny_gpt(seed: int = 0) -> MiniGPT:
    """Two layers of width 32 over the corpus's characters."""
    torch.manual_seed(seed)
    return MiniGPT(
        MiniGPTConfig(len(text().vocab), context=CONTEXT, layers=2, heads=4, width=32)
    )


def tiny_mlp(seed: int = 0) -> nn.Sequential:
    """16 inputs, 32 hidden units, one output: 577 weights.

    >>> sum(p.numel() for p in tiny_mlp().parameters())
    577
    """
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))


def sensor_batches(
    num: int, seed: int = 0, inf_at: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """``num`` batches of 32 readings of 16 sensors and a target in -1..1.

    In batch ``inf_at`` (from 1) one reading is infinite, as when a sensor's driver divides by zero.

    >>> [bool(x.isfinite().all()) for x, _ in sensor_batches(3, inf_at=2)]
    [True, False, True]
    """
    draws = torch.Generator().manual_seed(seed + 1)
    weights = torch.randn(16, 1, generator=draws)
    for index in range(1, num + 1):
        x = torch.randn(32, 16, generator=draws)
        y = torch.tanh(x @ weights)
        if index == inf_at:
            x = x.clone()
            x[0, 0] = math.inf
        yield x, y


def visitor_batches(
    num: int, seed: int = 0, *, unit: str = "raw"
) -> Iterator[tuple[Tensor, Tensor]]:
    """The sensor batches with the first column replaced by visitor counts: often 20, at times 100,000.

    ``unit="log"`` gives the same counts as log(1 + count).

    >>> x, _ = next(visitor_batches(1)); z, _ = next(visitor_batches(1, unit="log"))
    >>> bool(x[:, 0].max() > 1000), bool(z.max() < 20), torch.equal(x[:, 1:], z[:, 1:])
    (True, True, True)
    """
    for sensors, y in sensor_batches(num, seed):
        x = sensors.clone()
        counts = torch.exp(3.0 * x[:, 0] + 3.0)
        x[:, 0] = torch.log1p(counts) if unit == "log" else counts
        yield x, y


def call_batches(num: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Logarithms of hourly call counts, 8 per row. An hour without a call has log(0) = -inf.

    >>> x, y = next(call_batches(1))
    >>> x.shape, y.shape
    (torch.Size([16, 8]), torch.Size([16, 1]))
    """
    draws = torch.Generator().manual_seed(seed + 4)
    for _ in range(num):
        counts = torch.poisson(torch.full((16, 8), 7.0), generator=draws)
        yield counts.log(), counts.mean(dim=1, keepdim=True) / 7.0

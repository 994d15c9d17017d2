"""Small weights, random gradients and plain optimizers that the tests of GaLore share."""

import needs
import pytest
import torch
from torch import nn


def weights(*shapes, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def train(params, optimizer, updates, seed=1, scale=1.0):
    """Random gradients, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(updates):
        for weight in params:
            weight.grad = (scale * torch.randn(weight.shape, generator=generator)).to(weight.dtype)
        optimizer.step()
    return [weight.detach() for weight in params]


def apart(ours, theirs):
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


def sgd(groups, **options):
    return torch.optim.SGD(groups, lr=0.1, **options)


def adamw(groups, **options):
    return torch.optim.AdamW(groups, lr=0.01, **options)


def skip_if_missing(optimizer_class):
    if optimizer_class == "apollo":
        pytest.importorskip("apollo_torch", reason="apollo-torch is not installed (extra apollo)")
    if optimizer_class == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip(needs.muon.kwargs["reason"])


def same(a, b):
    """Equal bit for bit, however nested."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b

"""Models and steps on which recomputation must change nothing, and the comparison that says so, bit for bit."""

import copy

import torch
from torch import nn

from safetrain_core import MiniGPT, MiniGPTConfig, apply_recompute, next_token_loss

#: Policy and k, for a model with layers and attention cores.
POLICIES = [
    ("full", 4),
    ("every_k", 1),
    ("every_k", 2),
    ("every_k", 3),
    ("every_k", 99),
    ("sqrt", 4),
    ("selective", 4),
    ("selective_ops", 4),
    ("offload", 4),
]
LAYER_POLICIES = [case for case in POLICIES if case[0] != "selective"]


def gpt(dropout=0.2, layers=5, **changes):
    torch.manual_seed(0)
    return MiniGPT(MiniGPTConfig(11, context=12, layers=layers, heads=2, width=16, dropout=dropout, **changes))


def ids(seed=0, rows=3):
    return torch.randint(0, 11, (rows, 12), generator=torch.Generator().manual_seed(seed))


def gpt_loss(model, seed=0):
    return next_token_loss(model(ids(seed)), ids(seed + 1))


class WithKwargs(nn.Module):
    """Layers that take a mask and a scale by keyword, and a flag."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.line, self.drop = nn.Linear(6, 6), nn.Dropout(0.3)

        def forward(self, x, *, mask, scale=None, loud=False):
            y = torch.tanh(self.line(x)) * mask
            return x + self.drop(y) * (scale if loud else 1)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(5))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        mask = (x > 0).float()
        for i, layer in enumerate(self.layers):
            x = layer(x, mask=mask, scale=self.scale, loud=i % 2 == 0)
        return x


class TwoStreams(nn.Module):
    """Layers with two inputs and two outputs."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.drop = nn.Linear(6, 6), nn.Linear(6, 6), nn.Dropout(0.3)

        def forward(self, x, y):
            return torch.tanh(self.a(y)) + x, self.drop(self.b(x)) * y

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(5))

    def forward(self, x):
        y = x.detach() * 2
        for layer in self.layers:
            x, y = layer(x, y)
        return x + y


class OddLoop(nn.Module):
    """Between its layers this loop changes, takes of a tuple, keeps, skips and repeats; and it leaves early."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.line, self.drop = nn.Linear(6, 6), nn.Dropout(0.3)

        def forward(self, x, skip=None):
            y = torch.tanh(self.line(x if skip is None else x + skip))
            return self.drop(y), y.mean()

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(6))

    def forward(self, x):
        first, mean = self.layers[0](x)
        x, _ = self.layers[1](first)
        aside = torch.exp(x).sum() * 0.01  # saves a tensor between two layers of a segment
        x, more = self.layers[2](x, skip=first)
        x.mul_(1.5)  # the tensor that the layer before returned, but no longer what it returned
        x, _ = self.layers[3](x)
        x = x * 1.5  # another tensor
        x, _ = self.layers[3](x)  # the same layer again
        x, _ = self.layers[4](x, skip=first * 2)
        return x + aside + mean + more  # layers[5] never runs


def plain_stack(inner):
    torch.manual_seed(0)
    return nn.Sequential(*(inner(i) for i in range(5)))


def normed(i):
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Dropout(0.2))


def spectral(i):
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), nn.Tanh())


def dense(i):
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.2))


def made(kind):
    torch.manual_seed(0)
    return kind()


def vectors(needs_gradient=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 6, generator=generator).requires_grad_(needs_gradient)


def outcome(model, losses, inputs=()):
    """Everything that a step leaves: losses, gradients, buffers, random state. ``losses(model)`` runs backward too."""
    torch.manual_seed(7)
    told = [loss.detach().clone() for loss in losses(model)]
    return {
        **{f"loss {i}": loss for i, loss in enumerate(told)},
        **{f"grad {name}": p.grad for name, p in model.named_parameters()},
        **{f"buffer {name}": b for name, b in model.named_buffers()},
        **{f"input {i}": x.grad for i, x in enumerate(inputs)},
        "random": torch.get_rng_state(),
    }


def same(one, other):
    """The names of what differs in any bit; NaN equals itself."""
    assert one.keys() == other.keys()
    return [name for name in one if not _same(one[name], other[name])]


def _same(a, b):
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(nan=77.0), b.nan_to_num(nan=77.0))


def differences(model, losses, policy, k=4, inputs=lambda: ()):
    """What differs between a step of ``model`` and one of its copy under ``policy``: must be nothing."""
    model, twin = copy.deepcopy(model), copy.deepcopy(model)
    first = inputs()
    plain = outcome(model, lambda m: losses(m, *first), first)
    second = inputs()
    return same(plain, outcome(apply_recompute(twin, policy, k), lambda m: losses(m, *second), second))

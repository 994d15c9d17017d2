"""One training step of the same model on the same batch, as bare PyTorch, Lightning Fabric and Accelerate write it.

``LOOPS[name](dtype, k=1)`` makes a function that takes one step of ``k`` micro-batches and returns its loss; it has
``model`` and ``optimizer``. All clip to a global norm of 1, by the means of their own, and read the loss once a step.
A peer that is not installed is a skip with its reason.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from safetrain_core import MiniGPT, MiniGPTConfig, next_token_loss

loss_of = next_token_loss


def gpt():
    torch.manual_seed(0)
    return MiniGPT(MiniGPTConfig(vocab_size=96, context=64, layers=4, heads=4, width=128))


@functools.cache
def tokens(number=0):
    """Inputs and targets of a micro-batch of 4 x 64."""
    ids = torch.randint(0, 96, (4, 65), generator=torch.Generator().manual_seed(number))
    return ids[:, :-1], ids[:, 1:]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)


class Loop:
    """A step that can be called; ``model`` and ``optimizer`` as PyTorch has them."""

    def __init__(self, step, model, optimizer):
        self.step, self.model, self.optimizer = step, model, optimizer

    def __call__(self):
        return self.step()


def bare(dtype=torch.float32, k=1):
    model = gpt()
    optimizer = adamw(model)

    def step():
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for number in range(k):
            x, y = tokens(number)
            with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
                loss = loss_of(model(x), y) / k
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total.item()

    return Loop(step, model, optimizer)


def fabric(dtype=torch.float32, k=1):
    lightning = pytest.importorskip("lightning.fabric", reason="lightning is not installed; make bench installs it")
    precision = {torch.float32: "32-true", torch.bfloat16: "bf16-mixed"}[dtype]
    engine = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
    plain = gpt()
    model, optimizer = engine.setup(plain, adamw(plain))

    def step():
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for number in range(k):
            x, y = tokens(number)
            with engine.no_backward_sync(model, enabled=number < k - 1):
                loss = loss_of(model(x), y) / k
                engine.backward(loss)
            total = total + loss.detach()
        engine.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        return total.item()

    return Loop(step, plain, optimizer.optimizer)


def accelerate(dtype=torch.float32, k=1):
    package = pytest.importorskip("accelerate", reason="accelerate is not installed; make bench installs it")
    precision = {torch.float32: "no", torch.bfloat16: "bf16"}[dtype]
    package.state.AcceleratorState._reset_state(reset_partial_state=True)  # one precision for each process otherwise
    engine = package.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=k)
    plain = gpt()
    model, optimizer = engine.prepare(plain, adamw(plain))

    def step():
        total = 0.0
        for number in range(k):
            x, y = tokens(number)
            with engine.accumulate(model):
                loss = loss_of(model(x), y)
                engine.backward(loss)  # it divides by k itself
                if engine.sync_gradients:
                    engine.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            total = total + loss.detach() / k
        return total.item()

    return Loop(step, plain, optimizer.optimizer)


LOOPS = {"bare loop": bare, "Lightning Fabric": fabric, "Accelerate": accelerate}

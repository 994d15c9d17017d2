"""Gradient accumulation: one optimizer step from K micro-batches, its loss divided once, its gradients synced once.

``train_one_optimizer_step`` is the plain, unguarded form, to read and to compare with; ``AmpTrainState.step_window``
is the guarded one. With BatchNorm in the model, K micro-batches are not one big batch: its statistics are per forward.

Source: Ott et al. 2018, "Scaling Neural Machine Translation", arXiv:1806.00187, section 3.2 (delayed updates).
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..distributed import sum_over_ranks, world_size
from ..errors import type_of
from .clip import clip_global_l2_norm

__all__ = [
    "PlainStep",
    "effective_batch_size",
    "loss_scaled_for_accum",
    "no_sync_context",
    "scale_lr_with_batch",
    "train_one_optimizer_step",
    "valid_tokens",
    "window_weights",
    "windows",
    "zero_grads",
]

#: Targets with this value are left out of a cross-entropy, as in torch.
IGNORE_INDEX = -100


def loss_scaled_for_accum(logits: Any, target: Any, accum_steps: int, loss_fn: Callable[[Any, Any], Tensor]) -> Tensor:
    """``loss_fn(logits, target) / accum_steps``: the share of one micro-batch in a window of ``accum_steps``.

    Right where micro-batches weigh the same. Where they differ in valid tokens, weigh by ``valid_tokens`` instead.

    Raises:
        ValueError: ``accum_steps`` below 1.

    >>> loss_scaled_for_accum(torch.ones(2), torch.zeros(2), 4, nn.functional.mse_loss)
    tensor(0.2500)
    """
    if accum_steps < 1:
        raise ValueError(f"accum_steps={accum_steps} must be at least 1")
    return loss_fn(logits, target) / accum_steps


def zero_grads(model: nn.Module) -> None:
    """Set every gradient of ``model`` to None, which also frees its memory.

    >>> model = nn.Linear(1, 1)
    >>> model(torch.ones(1, 1)).sum().backward()
    >>> zero_grads(model)
    >>> model.weight.grad is None
    True
    """
    model.zero_grad(set_to_none=True)


@contextlib.contextmanager
def no_sync_context(model: nn.Module) -> Iterator[None]:
    """Backward passes inside leave gradients local; the first one after it syncs what has gathered.

    DistributedDataParallel and FSDP bring ``no_sync()``; FSDP2 (``fully_shard``) a switch for all its modules; on a
    plain module there is nothing to sync, and nothing happens. Forward and backward both belong inside.

    >>> with no_sync_context(nn.Linear(1, 1)):
    ...     pass
    """
    if hasattr(model, "no_sync"):
        with model.no_sync():  # type: ignore[operator]
            yield
    elif hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(False)  # type: ignore[operator]
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)  # type: ignore[operator]
    else:
        yield


class PlainStep(NamedTuple):
    """What ``train_one_optimizer_step`` did: mean loss, global L2 norm of the gradients, synced backward passes."""

    loss: float
    grad_norm: float
    syncs: int


def train_one_optimizer_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[tuple[Any, Any]],
    loss_fn: Callable[[Any, Any], Tensor],
    *,
    no_sync_until_last: bool = True,
) -> PlainStep:
    """One optimizer step from K = ``len(micro_batches)`` micro-batches, unguarded, without AMP or clipping.

    Args:
        micro_batches: ``(inputs, targets)`` pairs on the model's device.
        loss_fn: ``loss_fn(model(inputs), targets) -> scalar``, a mean over the micro-batch.
        no_sync_until_last: gradients of all but the last micro-batch stay local, so that a data-parallel model
            reduces once per step, not K times. ``syncs`` counts the backward passes outside ``no_sync_context``: 1,
            or K without it. A plain module has no other rank to sync with, whatever the count.

    Raises:
        ValueError: no micro-batch.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.ones_(model.weight)
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> batches = [(torch.full((2, 1), x), torch.zeros(2, 1)) for x in (1.0, 2.0)]
    >>> train_one_optimizer_step(model, sgd, batches, nn.functional.mse_loss)
    PlainStep(loss=2.5, grad_norm=5.0, syncs=1)
    """
    if not micro_batches:
        raise ValueError("there are 0 micro-batches; a step needs at least 1")
    zero_grads(model)
    losses, syncs = [], 0
    for i, (inputs, targets) in enumerate(micro_batches):
        local = no_sync_until_last and i < len(micro_batches) - 1
        with no_sync_context(model) if local else contextlib.nullcontext():
            loss = loss_scaled_for_accum(model(inputs), targets, len(micro_batches), loss_fn)
            loss.backward()
        losses.append(loss.detach())
        syncs += not local
    norm, _ = clip_global_l2_norm(model, math.inf)
    optimizer.step()
    return PlainStep(float(torch.stack(losses).sum().item()), norm, syncs)


def windows(batches: Iterable[Any], accum_steps: int) -> Iterator[list[Any]]:
    """Lists of ``accum_steps`` batches in order; the last is shorter where they do not divide.

    Raises:
        ValueError: ``accum_steps`` below 1.

    >>> list(windows(range(10), 4))
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """
    if accum_steps < 1:
        raise ValueError(f"accum_steps={accum_steps} must be at least 1")
    remaining = iter(batches)
    while window := list(itertools.islice(remaining, accum_steps)):
        yield window


def valid_tokens(targets: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """How many targets count in the loss, as a 0-dim int64 tensor on their device: all but ``ignore_index``.

    >>> valid_tokens(torch.tensor([[5, 2, -100], [7, -100, -100]]))
    tensor(3)
    >>> valid_tokens({"labels": torch.tensor([5])})
    Traceback (most recent call last):
    ...
    ValueError: targets are a dict; tokens are counted in a tensor of targets: give one, or weigh by equal
    """
    if not isinstance(targets, Tensor):
        raise ValueError(
            f"targets are {type_of(targets)}; tokens are counted in a tensor of targets: give one, or weigh by equal"
        )
    if targets.is_floating_point():
        return torch.tensor(targets.numel(), device=targets.device)
    return (targets != ignore_index).sum()


def window_weights(targets: Sequence[Any], weighting: str) -> tuple[list[float], float]:
    """The weight of each micro-batch in the window's mean loss, and what its gradient's weight is multiplied by.

    ``equal``: 1/K each. ``tokens``: its valid targets over the window's. Data-parallel ranks average their gradients,
    so where they hold different counts, the factor makes that average the mean over all tokens of all ranks.

    >>> window_weights([torch.zeros(5, dtype=torch.int64), torch.tensor([1, -100, -100, -100, 4])], "tokens")
    ([0.7142857142857143, 0.2857142857142857], 1.0)
    """
    if weighting == "equal":
        return [1 / len(targets)] * len(targets), 1.0
    counts = torch.stack([valid_tokens(t) for t in targets]).tolist()
    here = sum(counts)
    ranks = world_size()
    everywhere = sum_over_ranks(here, targets[0].device) if ranks > 1 else here
    if everywhere == 0:  # no valid target at all: the mean over none is NaN, and the window is refused for it
        return [1 / len(counts)] * len(counts), 1.0
    if here == 0:
        return [0.0] * len(counts), 0.0
    return [count / here for count in counts], here * ranks / everywhere


def effective_batch_size(micro_batch: int, accum_steps: int, world_size: int = 1) -> int:
    """Samples behind one optimizer step: micro_batch x accum_steps x world_size.

    Raises:
        ValueError: one of them is below 1.

    >>> effective_batch_size(8, 4, world_size=2)
    64
    """
    for name, value in (("micro_batch", micro_batch), ("accum_steps", accum_steps), ("world_size", world_size)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    return micro_batch * accum_steps * world_size


def scale_lr_with_batch(lr: float, accum_steps: int, world_size: int = 1) -> float:
    """The linear rule: the learning rate grows with the effective batch, lr x accum_steps x world_size.

    A rule of thumb for SGD with warm-up; it breaks down for large batches, and Adam often wants the square root.

    Raises:
        ValueError: ``accum_steps`` or ``world_size`` below 1.

    Source: Goyal et al. 2017, "Accurate, Large Minibatch SGD", arXiv:1706.02677.

    >>> scale_lr_with_batch(0.1, accum_steps=4, world_size=2)
    0.8
    """
    return lr * effective_batch_size(1, accum_steps, world_size)

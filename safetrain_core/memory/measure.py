"""What a recompute policy saves and costs for a model in hand: counted, not guessed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from ..errors import type_of
from .count import Counter
from .layer import Offload
from .moment import host_random, put_host_random
from .recompute import Policy, recomputed, wrappers_of

__all__ = ["RecomputeCost", "measure_recompute"]

LossFn = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, slots=True)
class RecomputeCost:
    """What one training step (forward, loss, backward) takes under a policy.

    Attributes:
        activation_bytes: on the model's device at their peak: what is kept for backward, and temporaries. Not weights,
            buffers, inputs and finished gradients.
        kept_bytes: of these, what is alive between forward and backward.
        host_bytes: what ``offload`` keeps in host memory.
        parameter_bytes, gradient_bytes: of the whole model. step_bytes: activations and gradients at their joint peak.
        forward_flops, backward_flops, recompute_flops: floating-point operations of the products, a multiply-add as 2.
        seconds: of one step, the shortest of those timed; None for fake tensors, or where none was asked for.
        cuda_bytes: what ``torch.cuda.max_memory_allocated`` saw above the model and its inputs; None off a GPU.

    >>> model = nn.Linear(3, 2)  # 2 x 3 weights and 2 biases, float32; products with 4 samples, 2 FLOPs each
    >>> cost = measure_recompute(model, (torch.ones(4, 3), torch.ones(4, 2)), timed_runs=0)
    >>> cost.parameter_bytes, cost.forward_flops, cost.overhead
    (32, 48, 0.0)
    """

    activation_bytes: int
    kept_bytes: int
    host_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    step_bytes: int
    forward_flops: int
    backward_flops: int
    recompute_flops: int
    seconds: float | None
    cuda_bytes: int | None

    @property
    def overhead(self) -> float:
        """Recomputed FLOPs as a fraction of those of the plain step."""
        plain = self.forward_flops + self.backward_flops
        return self.recompute_flops / plain if plain else 0.0


def measure_recompute(
    model: nn.Module,
    batch: tuple[Any, Any],
    policy: Policy | None = None,
    k: int = 4,
    *,
    loss_fn: LossFn | None = None,
    timed_runs: int = 1,
) -> RecomputeCost:
    """Run a step of ``model`` under ``policy``, in training mode, and count it. The model is left as it was.

    Args:
        batch: ``(inputs, targets)``, on the model's device; the loss is ``loss_fn(model(inputs), targets)``. Without a
            ``loss_fn``: ``mse_loss`` for floating-point targets, else ``cross_entropy`` over the last dimension.
        policy, k: as for ``apply_recompute``; None = as the model is now.
        timed_runs: steps run once more without counting, for ``seconds`` and ``cuda_bytes``; 0 = none.

    A model made inside ``torch._subclasses.fake_tensor.FakeTensorMode`` is counted without memory or arithmetic, at any
    size. Enter autocast around the call to count what it does. A second call counts the same.

    Raises:
        ValueError: as ``apply_recompute``; ``timed_runs`` below 0; a batch that is no pair.

    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)) for _ in "abcd"))
    >>> batch = torch.ones(16, 8), torch.ones(16, 8)
    >>> plain, full = (measure_recompute(model, batch, policy, timed_runs=0) for policy in ("none", "full"))
    >>> full.kept_bytes < plain.kept_bytes, plain.overhead, full.overhead > 0.15
    (True, 0.0, True)
    """
    if timed_runs < 0:
        raise ValueError(f"timed_runs={timed_runs} must be at least 0")
    with step_of(model, batch, loss_fn) as step, recomputed(model, policy, k):
        counter = Counter(model, tree_leaves(batch))
        offloads = {id(w.run): w.run for w in wrappers_of(model) if isinstance(w.run, Offload)}.values()
        for offload in offloads:
            offload.bytes = 0
        with counter:
            kept = step(counter)
        host = sum(offload.bytes for offload in offloads)
        fake = any(isinstance(p, FakeTensor) for p in model.parameters())
        seconds, cuda = (None, None) if fake or not timed_runs else _timed(model, step, timed_runs)
    return RecomputeCost(
        activation_bytes=counter.peak,
        kept_bytes=kept,
        host_bytes=host,
        parameter_bytes=_bytes(model.parameters()),
        gradient_bytes=_bytes(p for p in model.parameters() if p.requires_grad),
        step_bytes=counter.total_peak,
        forward_flops=counter.flops.get("forward", 0),
        backward_flops=counter.flops.get("backward", 0),
        recompute_flops=counter.flops.get("recompute", 0),
        seconds=seconds,
        cuda_bytes=cuda,
    )


def _bytes(tensors: Any) -> int:
    return sum({id(t): t.numel() * t.element_size() for t in tensors}.values())


@contextlib.contextmanager
def step_of(
    model: nn.Module, batch: tuple[Any, Any], loss_fn: LossFn | None
) -> Iterator[Callable[[Counter | None], int]]:
    """A function that runs one step of the model and returns the bytes kept; on leaving, no trace of it is left.

    Gradients, buffers, training flags and random states are as before.
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ValueError(f"batch must be a tuple (inputs, targets), not {type_of(batch)}")
    inputs, targets = batch
    loss_of = loss_fn or _default_loss
    gradients = {p: p.grad for p in model.parameters()}
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    places = [(module, dict(module._buffers)) for module in model.modules()]
    drawn = host_random()
    flags = [(module, module.training) for module in model.modules()]
    fake_mode = next((p.fake_mode for p in model.parameters() if isinstance(p, FakeTensor)), None)
    gpus = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda" and fake_mode is None})

    def step(counter: Counter | None) -> int:
        for p in gradients:
            p.grad = None
        if counter is not None:
            counter.phase = "forward"
        loss = loss_of(model(inputs), targets)
        kept = counter.now if counter is not None else 0
        if counter is not None:
            counter.phase = "backward"
        loss.backward()
        return kept

    with torch.random.fork_rng(gpus), fake_mode or contextlib.nullcontext():
        model.train()
        try:
            yield step
        finally:
            for module, was in flags:
                module.training = was
            for p, gradient in gradients.items():
                p.grad = gradient
            put_host_random(drawn)
            for module, before in places:  # a buffer may have been made, or replaced by another
                for name in module._buffers.keys() - before.keys():
                    delattr(module, name)
                module._buffers.update(before)
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


def _default_loss(output: Tensor, targets: Tensor) -> Tensor:
    for what, value in (("the model's output is", output), ("the batch's targets are", targets)):
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{what} {type_of(value)}, and the default loss takes a tensor; pass loss_fn, for example "
                "loss_fn=lambda output, targets: cross_entropy(output[0], targets), or output.logits where it has them"
            )
    if targets.is_floating_point():
        return F.mse_loss(output, targets)
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


def _timed(model: nn.Module, step: Callable[[Counter | None], int], runs: int) -> tuple[float | None, int | None]:
    """The shortest of ``runs`` steps, and the most that CUDA's allocator held above what was there before them."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    on_gpu = device.type == "cuda"
    best, most = float("inf"), 0
    for _ in range(runs):
        for p in model.parameters():
            p.grad = None
        if on_gpu:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        start = time.perf_counter()
        step(None)
        if on_gpu:
            torch.cuda.synchronize(device)
            most = max(most, torch.cuda.max_memory_allocated(device) - before)
        best = min(best, time.perf_counter() - start)
    return best, most if on_gpu else None

"""What a probe sees of a run that is not ours while it goes: optimizer steps, gradients; and the faults planted in it.

Nothing is asked of the run's own code. Optimizer steps are seen by torch's hooks over all optimizers, gradients are
altered by hooks on the weights of a model that was made for the probe, and both are gone when the probe ends.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .parts import Parts, parts_of

__all__ = [
    "Update",
    "altered_gradients",
    "build",
    "built",
    "check_callables",
    "flat",
    "kept_rng",
    "put_rng_state",
    "rng_state",
    "seed_all",
    "watched",
]


def build(make: Callable[[], Any], seed: int) -> tuple[Any, Parts]:
    """A fresh run with its parts, made under ``seed``, dropout off: what it does must not hang on chance.

    Raises:
        ValueError: it has no module with weights.
    """
    run, parts = built(make, seed)
    for module in (sub for outer in parts.modules for sub in outer.modules()):
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0  # type: ignore[assignment]
    return run, parts


def built(make: Callable[[], Any], seed: int) -> tuple[Any, Parts]:
    """A fresh run with its parts, made under ``seed``, as it is; ``ValueError`` without a module with weights."""
    seed_all(seed)
    run = make()
    parts = parts_of(run)
    if not parts.weights():
        raise ValueError(
            "make_model returned no module with trainable weights; return the model, or a tuple or an object that has "
            "model, optimizer, scheduler and scaler"
        )
    return run, parts


def check_callables(**functions: Any) -> None:
    """``ValueError`` where one of a probe's functions cannot be called.

    >>> check_callables(step_fn=print, make_model=None)
    Traceback (most recent call last):
    ...
    ValueError: make_model=None cannot be called; give a function
    """
    for name, function in functions.items():
        if not callable(function):
            raise ValueError(f"{name}={function!r} cannot be called; give a function")


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state() -> tuple[Any, ...]:
    """A copy of the random states, for ``put_rng_state``."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def put_rng_state(state: tuple[Any, ...]) -> None:
    """Put back what ``rng_state`` gave."""
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    if state[3]:
        torch.cuda.set_rng_state_all(state[3])


@contextlib.contextmanager
def kept_rng() -> Iterator[None]:
    """Leave the caller's random states as they were."""
    before = rng_state()
    try:
        yield
    finally:
        put_rng_state(before)


@dataclass
class Update:
    """One optimizer step: the numbers of its weights, their gradients (unscaled, flat, float64), its learning rate."""

    optimizer: torch.optim.Optimizer
    held: list[int]
    gradient: Tensor
    lr: float

    @property
    def finite(self) -> bool:
        """Whether every gradient was; a fused optimizer under a GradScaler is called with others, and refuses them."""
        return bool(self.gradient.isfinite().all())


@contextlib.contextmanager
def watched(weights: list[Tensor]) -> Iterator[list[Update]]:
    """The optimizer steps taken inside the block. An optimizer inside another's step is not counted again."""
    updates: list[Update] = []
    running: list[torch.optim.Optimizer] = []

    def note(optimizer: torch.optim.Optimizer) -> None:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        numbers = [at for at, p in enumerate(weights) if id(p) in held] or list(range(len(weights)))
        scale = getattr(
            optimizer, "grad_scale", None
        )  # fused optimizers get scaled gradients, and the factor with them
        factor = 1.0 if scale is None else 1.0 / float(scale)
        updates.append(Update(optimizer, numbers, flat_gradient(weights, set(numbers)) * factor, _rate(optimizer)))

    def closure_of(args: Any, kwargs: Any) -> Any:
        return kwargs.get("closure") or next((a for a in args[1:] if callable(a)), None)

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        running.append(optimizer)
        if len(running) == 1 and closure_of(args, kwargs) is None:
            note(optimizer)

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if len(running) == 1 and closure_of(args, kwargs) is not None:  # its gradients were made inside the step
            note(optimizer)
        del running[-1:]

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        yield updates
    finally:
        for handle in handles:
            handle.remove()


def _rate(optimizer: torch.optim.Optimizer) -> float:
    return float(optimizer.param_groups[0]["lr"]) if optimizer.param_groups else 0.0


def flat_gradient(weights: Iterable[Tensor], numbers: set[int] | None = None) -> Tensor:
    """The gradients one behind another, in float64 on the CPU; 0 where there is none or the number is not asked for."""
    pieces = []
    for at, p in enumerate(weights):
        wanted = p.grad is not None and (numbers is None or at in numbers)
        local = p.grad if wanted else torch.zeros_like(p)
        pieces.append(flat(local))  # type: ignore[arg-type]
    return torch.cat(pieces)


def flat(gradient: Tensor) -> Tensor:
    """A gradient as one row of float64 on the CPU; an embedding's may be sparse."""
    dense = gradient.detach() if gradient.layout is torch.strided else gradient.detach().to_dense()
    return dense.to("cpu", torch.float64).reshape(-1)


@contextlib.contextmanager
def altered_gradients(weights: list[Tensor], factor: float) -> Iterator[None]:
    """Inside the block every gradient is multiplied on its way to its weight; infinity plants an overflow."""
    handles = [p.register_hook(lambda g: g * factor) for p in weights]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

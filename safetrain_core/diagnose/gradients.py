"""The gradient that a step function hands to its optimizer for a window of micro-batches; and batches cut into them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .watched import Update, altered_gradients, build, check_callables, flat, seed_all, watched

__all__ = ["Bench", "StepFn", "cut", "samples_in"]

#: ``step_fn(run, micro_batches)``: one optimizer step of what ``make_model`` made.
StepFn = Callable[[Any, list[Any]], Any]

#: A GradScaler at 65536 may overflow and halve as often as this before the first step is taken.
OVERFLOWS = 24


class Bench:
    """Runs a user's step on fresh models that are all alike.

    Args:
        step_fn: ``step_fn(run, micro_batches)``. make_model: what makes ``run``. seed: seeded before each.

    Raises:
        ValueError: a function that is none; two models made under one seed differ.
    """

    def __init__(self, step_fn: StepFn, make_model: Callable[[], Any], seed: int) -> None:
        check_callables(step_fn=step_fn, make_model=make_model)
        self.step_fn, self.make_model, self.seed = step_fn, make_model, seed
        first, second = (build(make_model, seed)[1].weights() for _ in range(2))
        if [p.shape for p in first] != [p.shape for p in second] or not all(map(torch.equal, first, second)):
            raise ValueError(
                "make_model made two different models under one seed; build the model anew inside it, with the same "
                "weights each time"
            )
        if any(a is b for a, b in zip(first, second, strict=True)):
            raise ValueError("make_model returned the same weights twice; build or copy the model inside it")

    def updates(self, window: list[Any], factor: float, seed: int | None = None) -> tuple[list[Update], float | None]:
        """The optimizer steps of one window on a fresh model, each gradient times ``factor``, and the scale used.

        A window that a GradScaler refuses for an overflow is given again, as the next one would be.
        """
        run, parts = build(self.make_model, self.seed)
        weights = parts.weights()
        with altered_gradients(weights, factor), watched(weights) as seen:
            for _ in range(OVERFLOWS):
                seed_all(self.seed if seed is None else seed)
                scale = parts.scale()
                self.step_fn(run, list(window))
                taken = [update for update in seen if update.finite]
                overflowed = scale is not None and (parts.scale() or 0.0) < scale
                if taken or not overflowed:
                    return taken, scale
                seen.clear()
        return [], scale

    def gradient(self, window: list[Any], factor: float, seed: int | None = None) -> tuple[Tensor, float | None]:
        """The gradient of the one optimizer step that a window takes, flat, in float64, divided by nothing.

        Raises:
            ValueError: no optimizer step was taken, or a weight was stepped twice.
        """
        taken, scale = self.updates(window, factor, seed)
        if not taken:
            raise ValueError(
                f"step_fn took no optimizer step on a window of {len(window)}; it must take one (a "
                "torch.optim.Optimizer's) per call, for any number of micro-batches. Where it counts micro-batches "
                "itself, give whole_loss"
            )
        if steps_per_weight(taken) > 1:
            raise ValueError(
                f"step_fn took {len(taken)} optimizer steps on a window of {len(window)}; it must take one"
            )
        return torch.stack([update.gradient for update in taken]).sum(0), scale

    def gradient_of(self, loss: Callable[[Any, Any], Tensor], batch: Any) -> Tensor:
        """The gradient of ``loss(run, batch)`` on a fresh model, by autograd itself."""
        run, parts = build(self.make_model, self.seed)
        weights = parts.weights()
        seed_all(self.seed)
        made = torch.autograd.grad(loss(run, batch), weights, allow_unused=True)
        pieces = [torch.zeros_like(p) if g is None else g for p, g in zip(weights, made, strict=True)]
        return torch.cat([flat(g) for g in pieces])


def steps_per_weight(taken: list[Update]) -> int:
    """The most optimizer steps that any one weight took."""
    counts: dict[int, int] = {}
    for update in taken:
        for number in update.held:
            counts[number] = counts.get(number, 0) + 1
    return max(counts.values(), default=0)


def samples_in(batch: Any) -> int:
    """The length of the first dimension of a batch's tensors.

    Raises:
        ValueError: there is no tensor in it, or they differ.

    >>> samples_in({"x": torch.ones(8, 3), "y": torch.ones(8)})
    8
    """
    sizes = {value.shape[0] for value in tensors_of(batch) if value.dim()}
    if len(sizes) != 1:
        raise ValueError(f"the tensors of batch have first dimensions {sorted(sizes)}; give one batch, samples first")
    return sizes.pop()


def cut(batch: Any, sizes: list[int]) -> list[Any]:
    """``batch`` cut along its first dimension into pieces of ``sizes`` samples; what is no tensor goes into each.

    >>> cut((torch.arange(3), "a"), [2, 1])
    [(tensor([0, 1]), 'a'), (tensor([2]), 'a')]
    """
    begins = [sum(sizes[:at]) for at in range(len(sizes))]
    return [_rows(batch, slice(at, at + n)) for at, n in zip(begins, sizes, strict=True)]


def _rows(batch: Any, rows: slice) -> Any:
    return mapped(batch, lambda tensor: tensor[rows] if tensor.dim() else tensor)


def mapped(value: Any, work: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with ``work`` done to each tensor in it; its tuples, lists and mappings rebuilt."""
    if isinstance(value, Tensor):
        return work(value)
    if isinstance(value, Mapping):
        made = {key: mapped(entry, work) for key, entry in value.items()}
        return made if type(value) is dict else type(value)(made)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(mapped(entry, work) for entry in value)
    if isinstance(value, list | tuple):
        return type(value)(mapped(entry, work) for entry in value)
    return value


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in a nested value, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    mapped(value, note)
    return found

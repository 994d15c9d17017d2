"""The checks of lesson 02's exercises: each takes an answer and returns a sentence.

It starts with "Right" or "Not yet", and then says what is wrong and where to look next.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from safetrain_core import AmpTrainState
from safetrain_core.optim.schedule import make_schedule
from safetrain_core.step.accumulate import windows
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from . import accumulation as lab
from . import toy
from .progress import exercise
from .report import about

Loop = Callable[..., list[tuple[float, float]]]


def _raised(error: Exception) -> str:
    return f"Not yet: it raised {type(error).__name__}: {error}."


@exercise
def check_shares(shares: Callable[[list[Tensor]], Any]) -> str:
    """Exercise A: ``shares(targets) -> [share of each micro-batch]``, so that their sum is the one big batch."""
    ((micro, whole),) = lab.line_windows(1, seed=5)
    targets = [y for _, y in micro]
    try:
        answer = [float(share) for share in shares(targets)]
    except Exception as error:  # noqa: BLE001 - whatever a learner's code raises is worth a sentence
        return _raised(error) + " Return a list of numbers, one for each micro-batch."
    if len(answer) != len(targets):
        return f"Not yet: there are {len(targets)} micro-batches, and you returned {len(answer)} shares."
    if not math.isclose(sum(answer), 1.0, rel_tol=1e-4):
        return (
            f"Not yet: your shares add up to {sum(answer):.4g}. A mean needs shares that add up to 1, or the step "
            f"is that many times too long."
        )
    counts = lab.token_counts(micro)
    if all(math.isclose(share, 1 / len(targets)) for share in answer):
        return (
            f"Not yet: every micro-batch has the same share, but the first holds {about(counts[0], 3)} tokens and the "
            f"last {about(counts[-1], 3)}. A token of the first now weighs {about(counts[-1] / counts[0])} times as "
            "much as one of the last."
        )
    sizes = [y.numel() for y in targets]
    if all(
        math.isclose(a, n / sum(sizes), rel_tol=1e-4)
        for a, n in zip(answer, sizes, strict=True)
    ):
        return "Not yet: you counted padding too. A target of -100 is not in the loss, so it must not be in the share."
    model = toy.tiny_gpt(5)
    right = lab.gradient_of(model, [whole], [1.0]).clone()
    gap = lab.apart(lab.gradient_of(model, micro, answer), right)
    if gap > 1e-4:
        return (
            f"Not yet: the gradient is {gap:.1%} off that of the one big batch. Each share is the micro-batch's valid "
            f"tokens over those of the window."
        )
    try:
        answer = [
            float(share)
            for share in shares([torch.full_like(targets[0], lab.IGNORED), *targets[1:]])
        ]
    except Exception as error:  # noqa: BLE001 - as above
        return (
            _raised(error)
            + " One of the micro-batches had no valid token, and its share is 0."
        )
    if answer[0] != 0:
        return f"Not yet: a micro-batch without a valid token got the share {answer[0]:.4g}; it has nothing to add."
    return "Right: each token weighs the same, whatever micro-batch it is in."


def counted_updates(
    samples: int, micro_batch: int, accum: int, ranks: int, epochs: int
) -> int:
    """Optimizer steps of one rank, counted on torch's own sampler and loader.

    >>> counted_updates(samples=10, micro_batch=1, accum=4, ranks=1, epochs=1)
    3
    """
    data = range(samples)
    sampler: DistributedSampler[int] = DistributedSampler(data, num_replicas=ranks, rank=0)  # type: ignore[arg-type]
    loader = DataLoader(data, batch_size=micro_batch, sampler=sampler)  # type: ignore[arg-type]
    return epochs * len(list(windows(loader, accum)))


@exercise
def check_updates(updates: Callable[..., Any]) -> str:
    """Exercise B: ``updates(samples, micro_batch, accum, ranks, epochs) -> optimizer steps``."""
    cases = [
        (64, 4, 4, 1, 1, "everything divides"),
        (40, 4, 4, 1, 1, "10 batches: the window of the last 2 is a step too"),
        (37, 4, 3, 1, 1, "the last batch holds 1 sample, and it counts as a batch"),
        (
            40,
            4,
            4,
            1,
            3,
            "the short window comes at the end of each epoch, since no window spans two",
        ),
        (41, 4, 4, 2, 1, "each rank gets 21 samples, and all ranks step together"),
        (1000, 8, 16, 4, 7, "all of it together"),
    ]
    for *case, why in cases:
        names = ("samples", "micro_batch", "accum", "ranks", "epochs")
        told = ", ".join(f"{name}={value}" for name, value in zip(names, case, strict=True))
        try:
            answer = updates(*case)
        except Exception as error:  # noqa: BLE001 - whatever a learner's code raises is worth a sentence
            return _raised(error)
        right = counted_updates(*case)
        if answer != right:
            return f"Not yet: for {told} the loader gives {right} updates, and you said {answer} ({why})."
    return "Right: this is the number that a schedule's total_steps wants."


def trial(loop: Loop, accum: int = 4, steps: int = 10) -> tuple[Any, nn.Module, Any]:
    """Run a learner's loop over ``steps`` batches; its rows (or the error it raised), its model, its schedule."""
    model = toy.tiny_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = make_schedule(optimizer, "cosine", total_steps=4)
    # Large targets, so that the clip has something to do.
    batches = [(x, 10 * y) for x, y in toy.sensor_batches(steps)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # torch has its own remark on a schedule that moves too early
            rows = loop(model, optimizer, schedule, batches, accum)
    except Exception as error:  # noqa: BLE001 - whatever a learner's code raises is worth a sentence
        rows = error
    return rows, model, schedule


@exercise
def check_loop(loop: Loop) -> str:
    """Exercise C: ``loop(model, optimizer, schedule, batches, accum_steps) -> [(loss, norm), ...]``."""
    rows, model, schedule = trial(loop)
    if isinstance(rows, Exception):
        return _raised(rows)
    right, right_model, _ = trial(_reference)
    if not isinstance(rows, list) or not all(
        isinstance(row, tuple) and len(row) == 2 for row in rows
    ):
        return "Not yet: return a list with one row (loss, norm) for each optimizer step."
    if len(rows) == 2:
        return (
            "Not yet: 10 batches with 4 per window make three steps, and you took two. The last two batches were "
            "computed and never used, and their gradient waits for whoever trains next."
        )
    if len(rows) != 3:
        return f"Not yet: 10 batches with 4 per window make three steps, and you returned {len(rows)} rows."
    moved = schedule.last_epoch
    if moved != 3:
        return (
            f"Not yet: the schedule moved {moved} times in three optimizer steps. Its unit is the optimizer step: "
            "call schedule.step() next to optimizer.step()."
        )
    (loss, norm), (right_loss, right_norm) = rows[0], right[0]
    if _near(norm, 4 * right_norm):
        return (
            "Not yet: the first norm is 4 times that of the one big batch. Each micro-batch's loss is used whole: "
            "divide it before its backward."
        )
    if not _near(norm, right_norm):
        return (
            f"Not yet: the first norm is {norm:.2f}, and that of the window's mean gradient is {right_norm:.2f}. Clip "
            "once, after the last backward of the window, and keep the norm from before that clip."
        )
    (_, one_step, _), (_, right_step, _) = trial(loop, steps=4), trial(_reference, steps=4)
    if not _same(one_step, right_step):
        return (
            "Not yet: the first norm is right, and the weights after that step are not. Is the gradient clipped to 1.0, "
            "and then the optimizer's step taken?"
        )
    if not _near(rows[1][1], right[1][1]):
        return (
            "Not yet: the first step is right, and the norm of the second is not that of its own window. Clear the "
            "gradients after each optimizer step."
        )
    if _near(rows[2][1], right[2][1] / 2):
        return (
            "Not yet: the norm of the last step is half of what it should be. The last window holds two batches, "
            "and its losses were divided by 4."
        )
    if not _near(loss, right_loss):
        return (
            f"Not yet: the first row's loss is {loss:.3f}, and the mean over its window is {right_loss:.3f}. Log the "
            "mean of all the micro-batches, not divided twice, and not the last one's."
        )
    if not all(
        _near(a, b)
        for row, true in zip(rows, right, strict=True)
        for a, b in zip(row, true, strict=True)
    ):
        return "Not yet: the last row is not that of a window of two batches. Begin its sums afresh, too."
    if not _same(model, right_model):
        return "Not yet: the rows are right, and the weights after the last step are not."
    return "Right: losses divided by what the window holds; clip, step and schedule once per window; no batch lost."


def _near(value: float, right: float) -> bool:
    return math.isclose(float(value), right, rel_tol=1e-3)


def _same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in pairs)


def _reference(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Any,
    batches: list[Any],
    accum_steps: int,
) -> list[tuple[float, float]]:
    state = AmpTrainState(
        model, optimizer=optimizer, scheduler=schedule, loss_fn=F.mse_loss, amp_dtype=torch.float32,
        inf_post_clip_threshold=0,
    )  # fmt: skip
    rows = [state.step_window(window) for window in windows(batches, accum_steps)]
    return [(row.loss or math.nan, row.pre_clip or math.nan) for row in rows]

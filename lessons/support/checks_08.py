"""The checks of lesson 08's exercises: each takes an answer and returns a sentence.

It starts with "Right" or "Not yet", and then says what is wrong and where to look next.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import toy
from .distributed_run import BYTES
from .progress import exercise

Loop = Callable[..., Any]


def _raised(error: BaseException) -> str:
    return f"Not yet: it raised {type(error).__name__}: {error}."


# --- A: bytes on a rank -----------------------------------------------------------------------------------------

CASES = [
    ([(96, 32)], 4, 0, "96 rows divide by 4"),
    ([(10, 8)], 4, 0, "10 rows on 4 ranks are 3, 3, 3 and 1: each takes ceil(10 / 4) until there are no more"),
    ([(10, 8)], 4, 3, "the last of them gets the one row that is left"),
    ([(97, 32), (32,)], 4, 3, "each weight is cut by itself: 25, 25, 25, 22 rows, and 8 numbers of the other"),
    ([(3, 5)], 4, 3, "3 rows are gone before the fourth rank comes: it holds nothing"),
    ([(7,), (2, 3, 5)], 1, 0, "one rank holds everything"),
    ([(4,)], 6, 5, "4 numbers, 6 ranks: the last two hold nothing"),
]  # fmt: skip


def right_bytes(shapes: list[tuple[int, ...]], ranks: int, rank: int) -> int:
    """12 bytes for each number that rank holds, as torch's own ``chunk`` cuts the rows.

    >>> right_bytes([(10, 8)], 4, 0), right_bytes([(10, 8)], 4, 3)
    (288, 96)
    """
    total = 0
    for shape in shapes:
        pieces = torch.empty(shape, device="meta").chunk(ranks)
        total += pieces[rank].numel() if rank < len(pieces) else 0
    return BYTES * total


@exercise
def check_bytes(bytes_on: Callable[..., Any]) -> str:
    """Exercise A: ``bytes_on(shapes, ranks, rank)``, of FP32 weights and AdamW's moments under FSDP2."""
    for shapes, ranks, rank, why in CASES:
        try:
            answer = float(bytes_on(list(shapes), ranks, rank))
        except Exception as error:  # noqa: BLE001 - whatever a learner's code raises is worth a sentence
            return _raised(error) + f" That was for {shapes} on {ranks} ranks, rank {rank}."
        right = right_bytes(shapes, ranks, rank)
        if answer != right:
            hint = (
                " You left out the 12 bytes of each number."
                if answer * BYTES == right > 0
                else ""
            )
            return f"Not yet: of {shapes}, rank {rank} of {ranks} holds {right} bytes; you said {answer:g} ({why}).{hint}"
    return "Right: where rows divide it is 12 P / N on every rank; where they do not, only the sum is 12 P."


# --- B: a loop on several ranks ---------------------------------------------------------------------------------

RANKS, STEPS, FAULTY, BAD = 4, 6, 1, 2


class HangError(Exception):
    """A rank waits for one that has gone."""


class Meeting:
    """``all_reduce`` for ranks that are threads of this process: a sum in place, which waits until all have come.

    Where a rank has ended, those that wait for it are told at once; in a real run they would wait for minutes.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.calls = [0] * ranks
        self._changed = threading.Condition()
        self._here: dict[int, Tensor] = {}
        self._ended: set[int] = set()
        self._round = 0

    def all_reduce(self, rank: int, tensor: Tensor) -> None:
        """Add up ``tensor`` over all ranks, in place on each."""
        if not isinstance(tensor, Tensor):
            raise TypeError(f"all_reduce takes a tensor, and got {type(tensor).__name__}")
        with self._changed:
            self.calls[rank] += 1
            self._here[rank] = tensor
            came_in = self._round
            if len(self._here) == self.ranks:
                self._add_up()
            else:
                self._changed.notify_all()
            while self._round == came_in:
                if self._ended:
                    raise HangError(f"in its all_reduce number {self.calls[rank]}")
                self._changed.wait(timeout=30)

    def _add_up(self) -> None:
        tensors = [self._here[rank] for rank in range(self.ranks)]
        shapes = {tuple(t.shape) for t in tensors}
        with torch.no_grad():
            # Ranks that are out of step send what does not fit; gloo and nccl then hang, crash, or mix it up.
            total = sum(tensors) if len(shapes) == 1 else torch.tensor(math.nan)
            for tensor in tensors:
                tensor.copy_(total)
        self._here = {}
        self._round += 1
        self._changed.notify_all()

    def leave(self, rank: int) -> None:
        """``rank`` has ended."""
        with self._changed:
            self._ended.add(rank)
            self._changed.notify_all()


#: Factors on the targets: with the large one the clip acts, with the small one it does not.
LARGE, SMALL = 10.0, 0.05


def rank_batches(rank: int, seed: int, scale: float) -> list[tuple[Tensor, Tensor]]:
    """A rank's own batches. One of one rank has a target that is NaN: a sensor that was away."""
    made = list(toy.sensor_batches(STEPS, seed=100 * seed + rank))
    if rank == FAULTY:
        x, y = made[BAD]
        y = y.clone()
        y[0] = math.nan
        made[BAD] = (x, y)
    return [(x, scale * y) for x, y in made]


class Trial:
    """A learner's loop on ``RANKS`` threads: what each returned or raised, its weights, and where it was stuck."""

    def __init__(
        self, loop: Loop, seed: int = 0, steps: int = STEPS, scale: float = LARGE
    ) -> None:
        self.returned: list[Any] = [None] * RANKS
        self.errors: dict[int, Exception] = {}
        self.stuck: dict[int, str] = {}
        self.models = [toy.tiny_mlp(seed) for _ in range(RANKS)]
        meeting = Meeting(RANKS)

        def work(rank: int) -> None:
            model = self.models[rank]
            sgd = torch.optim.SGD(model.parameters(), lr=0.05)
            data = rank_batches(rank, seed, scale)[:steps]
            try:
                self.returned[rank] = loop(
                    model, sgd, data, lambda tensor: meeting.all_reduce(rank, tensor), RANKS
                )
            except HangError as where:
                self.stuck[rank] = str(where)
            except Exception as error:  # noqa: BLE001 - whatever a learner's code raises is worth a sentence
                self.errors[rank] = error
            finally:
                meeting.leave(rank)

        threads = [
            threading.Thread(target=work, args=(rank,), daemon=True)
            for rank in range(RANKS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)

    def weights(self, rank: int = 0) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.models[rank].parameters()])


def right_weights(
    seed: int = 0, steps: int = STEPS, scale: float = LARGE, *, clip_first: bool = False
) -> Tensor:
    """Where the same training ends on one process: the mean of all ranks' gradients, clipped, no step where one is bad.

    ``clip_first`` clips each rank's own gradient instead, a mistake that the check knows.
    """
    model = toy.tiny_mlp(seed)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    data = [rank_batches(rank, seed, scale) for rank in range(RANKS)]
    for step in range(steps):
        copies = [copy.deepcopy(model) for _ in range(RANKS)]
        losses = []
        for twin, own in zip(copies, data, strict=True):
            losses.append(F.mse_loss(twin(own[step][0]), own[step][1]))
            losses[-1].backward()
            if clip_first:
                nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        if not torch.isfinite(torch.stack(losses)).all():
            continue
        for weight, *parts in zip(
            model.parameters(), *(t.parameters() for t in copies), strict=True
        ):
            weight.grad = torch.stack([p.grad for p in parts if p.grad is not None]).mean(0)
        if not clip_first:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        sgd.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _near(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-3, atol=1e-5)


@exercise
def check_loop(loop: Loop, seed: int = 0) -> str:
    """Exercise B: ``loop(model, optimizer, batches, all_reduce, ranks) -> ["STEP" or "SKIP", ...]`` on four ranks."""
    for scale in (SMALL, LARGE):
        one = Trial(loop, seed, 1, scale)
        problem = _stopped(one, "in the first step already, where every loss is finite, ")
        if problem:
            return problem
        found = one.weights()
        if not all(torch.equal(found, one.weights(rank)) for rank in range(RANKS)):
            return "Not yet: after one step the ranks' weights differ. Each has to step by the same gradient, that of all."
        if not _near(found, right_weights(seed, 1, scale)):
            return "Not yet: " + _one_step_is_wrong(
                found, right_weights(seed, 1, scale), seed, scale
            )
    trial = Trial(loop, seed)
    problem = _stopped(trial, "")
    if problem:
        return problem
    if any(not torch.isfinite(trial.weights(rank)).all() for rank in range(RANKS)):
        return f"Not yet: the NaN of rank {FAULTY} is in the weights. All ranks have to leave that step out."
    if any(
        not torch.equal(trial.weights(rank), trial.weights()) for rank in range(1, RANKS)
    ):
        return (
            f"Not yet: at the end rank {FAULTY}'s weights are not those of rank 0. In step {BAD + 1} it went its own way: "
            "what one rank knows, all have to know before any of them steps."
        )
    expected = ["SKIP" if step == BAD else "STEP" for step in range(STEPS)]
    for rank, rows in enumerate(trial.returned):
        if rows != expected:
            return (
                f"Not yet: rank {rank} returned {rows}; of {STEPS} steps, number {BAD + 1} is a SKIP on every rank and "
                "the others are a STEP."
            )
    if not _near(trial.weights(), right_weights(seed)):
        return (
            "Not yet: the ranks agree, and the weights are not those of one process that leaves out the bad step. Does a "
            "gradient of the skipped step get into the next one?"
        )
    return "Right: all ranks skip together, and otherwise step by the clipped mean of all gradients."


def _one_step_is_wrong(found: Tensor, right: Tensor, seed: int, scale: float) -> str:
    start = torch.cat([p.detach().flatten() for p in toy.tiny_mlp(seed).parameters()])
    if scale == LARGE and _near(found, right_weights(seed, 1, scale, clip_first=True)):
        return (
            "each rank clips its own gradient, and the average of these is another direction: a rank with a large "
            "gradient counts no more than one with a small one. Average first, and clip what the ranks have in common."
        )
    length = float((found - start).norm() / (right - start).norm())
    return (
        f"after one step the weights are not where one process with the batches of all ranks gets: the step is {length:.2g} "
        "times as long. all_reduce adds up: the mean is that divided by the number of ranks, and the clip at 1.0 acts "
        "on the mean."
    )


def _stopped(trial: Trial, when: str) -> str | None:
    if trial.errors:
        rank, error = min(trial.errors.items())
        return _raised(error) + f" That was on rank {rank}."
    if trial.stuck:
        waiting = ", ".join(map(str, sorted(trial.stuck)))
        gone = ", ".join(str(r) for r in range(RANKS) if r not in trial.stuck)
        return (
            f"Not yet: {when}the run hangs. Rank {waiting} waits {trial.stuck[min(trial.stuck)]}; rank {gone} has ended "
            "with fewer calls. All ranks have to call all_reduce equally often, whatever they find."
        )
    return None

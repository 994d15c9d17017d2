"""The checks of lesson 03's exercises: each takes an answer and returns a sentence.

It starts with "Right" or "Not yet", and then says what is wrong and where to look next.
"""

from __future__ import annotations

import io
import math
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from . import checkpoint_resume as lab
from .progress import exercise


def _raised(error: BaseException) -> str:
    return f"Not yet: it raised {type(error).__name__}: {lab.said(error)}."


# --- A: which files go ----------------------------------------------------------------------------------------

CASES: list[tuple[dict[str, float | None], int, int, set[str], str]] = [
    (
        {"step_8.pt": 0.9, "step_9.pt": 0.8, "step_10.pt": 0.7, "step_11.pt": 0.6},
        2,
        0,
        {"step_8.pt", "step_9.pt"},
        "in the order of names, step_10 comes before step_9; order by the number",
    ),
    (
        {"step_1.pt": 0.2, "step_2.pt": 0.5, "step_3.pt": 0.4, "step_4.pt": 0.6},
        1,
        1,
        {"step_2.pt", "step_3.pt"},
        "step_1 has the lowest loss of all, and stays however old it is",
    ),
    (
        {"step_1.pt": math.nan, "step_2.pt": 0.5, "step_3.pt": 0.4, "step_4.pt": 0.6},
        1,
        1,
        {"step_1.pt", "step_2.pt"},
        "a NaN is never the best, wherever a sort puts it",
    ),
    (
        {"step_1.pt": None, "step_2.pt": 0.5, "step_3.pt": None, "step_4.pt": None},
        1,
        2,
        {"step_1.pt", "step_3.pt"},
        "None means that nothing was measured there, and step_2 is the only one of the two best",
    ),
    (
        {"step_5.pt": 0.3, "step_6.pt": 0.4},
        5,
        1,
        set(),
        "there are fewer files than may stay",
    ),
]


@exercise
def check_to_delete(to_delete: Callable[..., Any]) -> str:
    """Exercise A: ``to_delete(losses, keep_last, keep_best) -> names``; ``losses`` has file name -> loss or None."""
    for losses, keep_last, keep_best, right, why in CASES:
        try:
            answer = to_delete(dict(losses), keep_last, keep_best)
            answer = {str(name) for name in answer}
        except Exception as error:  # noqa: BLE001 - whatever a learner's code raises is worth a sentence
            return (
                _raised(error)
                + f" That was for {losses}, keep_last={keep_last}, keep_best={keep_best}."
            )
        if answer != right:
            return (
                f"Not yet: of {losses}, with keep_last={keep_last} and keep_best={keep_best}, these go: "
                f"{sorted(right) or 'none'}; you said {sorted(answer) or 'none'} ({why})."
            )
    return "Right: the newest stay by number, the best by loss, and NaN is never the best."


# --- B: the random states -------------------------------------------------------------------------------------

DRAWS: dict[str, Callable[[], Any]] = {
    "Python's random": lambda: (random.gauss(0, 1), random.random()),
    "NumPy's": lambda: (np.random.normal(), np.random.random()),
    "torch's": lambda: torch.rand(1).item(),
}


def _drawn() -> dict[str, Any]:
    return {name: draw() for name, draw in DRAWS.items()}


@exercise
def check_random_states(capture: Callable[[], Any], restore: Callable[[Any], Any]) -> str:
    """Exercise B: ``capture() -> state`` and ``restore(state)``, for Python's, NumPy's and torch's generators."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        return _random_verdict(capture, restore)
    except Exception as error:  # noqa: BLE001 - whatever a learner's code raises is worth a sentence
        return _raised(error)
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def _random_verdict(capture: Callable[[], Any], restore: Callable[[Any], Any]) -> str:
    for seed in range(2):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        expected_without = _drawn(), _drawn()
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        _drawn()  # one of each: half of a pair of Gaussians waits inside the generator
        state = capture()
        right = _drawn()
        if right != expected_without[1]:
            return "Not yet: capture() moved a generator. It should look at the states and draw nothing."
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        try:
            loaded = torch.load(file, weights_only=True)
        except Exception as error:  # noqa: BLE001 - torch has several ways to refuse
            return (
                f"Not yet: in a file, your state is refused by weights_only=True ({type(error).__name__}). Is there a "
                "NumPy array in it? Save plain numbers, lists and tensors."
            )
        for _ in range(2):
            restore(loaded)
            found = _drawn()
            if seed == 0 and found["torch's"] != right["torch's"]:
                return "Not yet: torch's generator does not draw the same number after restore()."
            wrong = [name for name, value in found.items() if value != right[name]]
            if wrong:
                return (
                    f"Not yet: after restore(), {' and '.join(wrong)} generator goes on with other numbers than after "
                    "capture(). Shuffling, dropout and augmentation may each use a different one."
                )
    return "Right: all three generators go on where they were, and the state fits into a safe file."


# --- C: the loop ----------------------------------------------------------------------------------------------

Loop = Callable[[lab.Run, Path, int], Any]


class Killed(BaseException):
    """The process dies here."""


def _half_saved(payload: Any, target: Any, *args: Any, **kwargs: Any) -> None:
    half = b"PK\x03\x04" * 1000
    if isinstance(target, str | os.PathLike):
        Path(target).write_bytes(half)
    else:
        target.write(half)
    raise Killed


@exercise
def check_loop(loop: Loop, seed: int = 1) -> str:
    """Exercise C: ``loop(run, path, total_steps)`` trains, saves every 5 steps, and resumes where ``path`` exists."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return _loop_verdict(loop, Path(folder) / "last.pt", seed)
        except Exception as error:  # noqa: BLE001 - whatever a learner's code raises is worth a sentence
            return _raised(error)


def _loop_verdict(loop: Loop, path: Path, seed: int) -> str:
    whole = lab.uninterrupted(seed)
    first = lab.Run(seed)
    synced: list[str] = []
    fsync, replace = os.fsync, os.replace
    with (
        mock.patch("os.fsync", lambda fd: (synced.append("fsync"), fsync(fd))[1]),
        mock.patch("os.replace", lambda a, b: (synced.append("rename"), replace(a, b))[1]),
    ):
        loop(first, path, 12)
    if first.losses != whole.losses[:12]:
        return (
            f"Not yet: up to step 12, without any interruption, the run took {len(first.losses)} steps, and its losses are "
            "not those of 12 plain steps. Keep run.train(1) as it was."
        )
    if not path.exists():
        return "Not yet: after 12 steps there is no checkpoint at path. One is due at 5, and one at 10."
    torch.load(path, weights_only=True)

    second = lab.Run(seed)
    loop(second, path, 24)
    if len(second.losses) != 14:
        return (
            f"Not yet: the checkpoint is from step 10, so 14 steps are left to 24; yours took {len(second.losses)}. The "
            "step belongs in the checkpoint."
        )
    counts = lab.sample_counts([*whole.seen[8:10], *second.seen[:6]])
    if set(counts) != {1}:
        return (
            f"Not yet: across the interruption, {sum(n > 1 for n in counts)} samples of the epoch were seen twice and "
            f"{counts.count(0)} never. The data position is run.counters, all three of them, and run.epoch_start."
        )
    if second.scheduler.last_epoch != 24:
        return (
            f"Not yet: after step 24 the schedule stands at {second.scheduler.last_epoch}. It has a state_dict, as the "
            "optimizer has."
        )
    differs = lab.first_difference(second.losses, whole.losses[10:])
    if differs is not None:
        bucket = (
            "The weights were the same, and their update was not: look at the optimizer"
            if differs == 2
            else "Are the random states restored last, and the weights loaded"
        )
        return f"Not yet: the resumed run differs from step {10 + differs} on. {bucket}."

    third, old = lab.Run(seed), path.read_bytes()
    try:
        with mock.patch("torch.save", _half_saved):
            loop(third, path, 29)
    except Killed:
        pass
    if not path.exists() or path.read_bytes() != old:
        return (
            "Not yet: the run is the same, but a kill in mid-save left a torn file in place of the last good one. Write "
            "beside it, and rename when it is whole: atomic_save does."
        )
    if "rename" not in synced or "fsync" not in synced[: synced.index("rename")]:
        return (
            "Not yet: a kill is survived, a power failure may not be. Before the rename there has to be an fsync of what "
            "was written: atomic_save does both."
        )
    return "Right: the same run bit for bit, each sample once, and a good file at every moment."

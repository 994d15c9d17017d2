"""The checks of lesson 04's exercises: each takes an answer and returns a sentence.

It starts with "Right" or "Not yet", and then says what is wrong and where to look next.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetrain_core import CheckpointError, save_sharded
from safetrain_core.checkpoint.folders import all_checkpoints
from safetrain_core.checkpoint.manifest import MANIFEST
from torch import Tensor

from . import sharded_resume as lab
from .progress import exercise


def _raised(error: BaseException) -> str:
    return f"Not yet: it raised {type(error).__name__}: {lab.said(error)}."


# --- A: cut ---------------------------------------------------------------------------------------------------


@exercise
def check_cut(cut: Callable[..., Any]) -> str:
    """Exercise A: ``cut(flat, ranks) -> pieces``, one for each rank, in order."""
    for numel, ranks in ((8, 2), (10, 4), (5, 4), (3, 3), (40_000, 4)):
        flat = torch.arange(float(numel))
        where = f"{numel} numbers for {ranks} ranks"
        try:
            pieces = cut(flat.clone(), ranks)
            pieces = list(pieces)
        except Exception as error:  # noqa: BLE001 - whatever a learner's code raises is worth a sentence
            return _raised(error) + f" That was for {where}."
        problem = _pieces_problem(pieces, flat, ranks)
        if problem:
            return f"Not yet: of {where}, {problem}"
    return "Right: each rank has its own piece, in order, and its file will hold that and no more."


def _pieces_problem(pieces: list[Any], flat: Tensor, ranks: int) -> str:
    if not all(isinstance(piece, Tensor) and piece.dim() == 1 for piece in pieces):
        return f"there is one that is no 1-D tensor: {[type(piece).__name__ for piece in pieces]}."
    sizes = [piece.numel() for piece in pieces]
    if len(pieces) != ranks:
        return f"you made {len(pieces)} pieces ({sizes}). Each rank needs one, and chunk() does not promise that."
    if max(sizes) - min(sizes) > 1 or sum(sizes) != len(flat):
        return (
            f"the pieces have {sizes}. All numbers have to be in them, and no rank may have more than one number above "
            "another: the slowest decides."
        )
    if not torch.equal(torch.cat(pieces), flat):
        return "the pieces, joined in order of rank, are not the flat tensor: reshard joins them like that."
    for piece in pieces:
        behind = piece.untyped_storage().nbytes()
        if behind > piece.numel() * piece.element_size():
            return (
                f"a piece of {4 * piece.numel()} bytes is a view of a storage of {behind}, and torch.save writes the "
                "whole storage: each of the files would be as large as the model. Give each piece memory of its own."
            )
    return ""


# --- B: what is wrong with a folder ---------------------------------------------------------------------------

RANKS = 3


@dataclass(frozen=True)
class Case:
    """A folder broken in one way: what was done, the sentence that is due (None: it is whole), and why."""

    done: str
    spoil: Callable[[Path], Any]
    due: str | None
    why: str
    world_size: int = RANKS


def _states(step: int, ranks: int = RANKS) -> list[dict[str, Any]]:
    return [
        {"param_shard": torch.full((500,), float(step + rank))} for rank in range(ranks)
    ]


def _elsewhere(folder: Path) -> None:
    told = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    outside = folder.parent / "outside.bin"
    shutil.copy(folder / "rank1.bin", outside)
    told["shards"][1]["path"] = "../outside.bin"
    (folder / MANIFEST).write_text(json.dumps(told), encoding="utf-8")


def _both(folder: Path) -> None:
    lab.truncate(folder / "rank0.bin", 10)
    (folder / "rank2.bin").unlink()


CASES = [
    Case("nothing was done to it", lambda folder: None, None, "it is whole"),
    Case(
        "4 ranks are to load it",
        lambda folder: None,
        "world_size mismatch",
        "the manifest has the number of ranks that saved it",
        world_size=4,
    ),
    Case(
        "rank1.bin was deleted",
        lambda folder: (folder / "rank1.bin").unlink(),
        "shard file missing",
        "each file that the manifest names has to be there",
    ),
    Case(
        "rank1.bin lacks its last byte",
        lambda folder: lab.truncate(folder / "rank1.bin", 1),
        "sha256 mismatch on rank 1",
        "compare size or sum, and name the rank",
    ),
    Case(
        "one bit of rank2.bin was turned over",
        lambda folder: lab.flip(folder / "rank2.bin", 900),
        "sha256 mismatch on rank 2",
        "the size is right; only the sum of the file's bytes tells",
    ),
    Case(
        "the manifest's schema is weights-2",
        lambda folder: lab.edited(folder, schema="weights-2"),
        "unknown schema",
        "a schema of ours starts with ckpt",
    ),
    Case(
        "a rank3.bin of an older save lies beside the others",
        lambda folder: shutil.copy(folder / "rank0.bin", folder / "rank3.bin"),
        None,
        "the manifest alone says what is part of it: go through its shards, not through the folder",
    ),
    Case(
        "it was saved a second time, so that its files have other names",
        lambda folder: save_sharded(_states(5), folder, 5),
        None,
        "the name of each file is in the manifest, under path",
    ),
    Case(
        "rank0.bin is truncated and rank2.bin deleted",
        _both,
        "shard file missing",
        "look for all of them before you read any: a missing one is found at once, sums take minutes",
    ),
    Case(
        "the path of rank 1 is ../outside.bin, with the right sum",
        _elsewhere,
        "",
        "a manifest may be a stranger's: a path that is more than a file name is a fault, whatever it leads to",
    ),
]  # fmt: skip


class UnpickledError(Exception):
    """Something was unpickled before its sum was compared."""


def _unpickle(*args: Any, **kwargs: Any) -> Any:
    raise UnpickledError


@exercise
def check_problem(problem: Callable[..., Any]) -> str:
    """Exercise B: ``problem(folder, world_size)``: None for a whole checkpoint, else what is wrong."""
    for case in CASES:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch, "step_4")
            save_sharded(_states(4), folder, 4)
            case.spoil(folder)
            try:
                with mock.patch("torch.load", _unpickle):
                    answer = problem(folder, case.world_size)
            except UnpickledError:
                return "Not yet: it calls torch.load. Nothing has to be unpickled to compare a sum; read the bytes."
            except Exception as error:  # noqa: BLE001 - whatever a learner's code raises is worth a sentence
                return _raised(error) + f" That was where {case.done}."
        verdict = _answer_problem(answer, case)
        if verdict:
            return verdict
    return "Right: it finds each fault before anything is unpickled, and trusts only the manifest."


def _answer_problem(answer: Any, case: Case) -> str:
    if answer is not None and not isinstance(answer, str):
        return (
            f"Not yet: return None or a sentence; you returned a {type(answer).__name__}."
        )
    if case.due is None and answer is not None:
        return f"Not yet: where {case.done}, it loads; you said {answer!r} ({case.why})."
    if case.due is not None and answer is None:
        due = f"{case.due!r} is due" if case.due else "something is wrong"
        return f"Not yet: where {case.done}, {due}; you found no fault ({case.why})."
    if case.due and case.due not in answer:
        return f"Not yet: where {case.done}, {case.due!r} is due; you said {answer!r} ({case.why})."
    return ""


# --- C: the loop ----------------------------------------------------------------------------------------------

Loop = Callable[[lab.ShardedRun, Path, int], Any]
LOOP_RANKS, KEPT = 2, 2


@exercise
def check_loop(loop: Loop, seed: int = 1) -> str:
    """Exercise C: ``loop(run, parent, total_steps)`` saves every 5 steps below ``parent``, keeps 2, and resumes."""
    with tempfile.TemporaryDirectory() as scratch:
        parent = Path(scratch, "run")
        parent.mkdir()
        try:
            return _loop_verdict(loop, parent, seed)
        except Exception as error:  # noqa: BLE001 - whatever a learner's code raises is worth a sentence
            return _raised(error)


def _steps(parent: Path) -> list[int]:
    return [int(folder.name[5:]) for folder in all_checkpoints(parent)]


def _again(
    loop: Loop, parent: Path, until: int, seed: int
) -> tuple[lab.ShardedRun, int, str]:
    """The loop on a new run: the run, the step it began after, and what is wrong with its losses."""
    run = lab.ShardedRun(seed, LOOP_RANKS)
    loop(run, parent, until)
    began = run.rows[0].step - 1 if run.rows else run.step
    right = lab.uninterrupted(seed, LOOP_RANKS, 27).losses[began:until]
    if run.losses == right:
        return run, began, ""
    return run, began, (
        f"Not yet: from step {began} to {until}, the losses are not those of the uninterrupted run. Keep run.train(1), and "
        "give run.load() the states of all ranks, in order."
    )  # fmt: skip


def _loop_verdict(loop: Loop, parent: Path, seed: int) -> str:
    _, _, wrong = _again(loop, parent, 12, seed)
    if wrong:
        return wrong
    if _steps(parent) != [5, 10]:
        return f"Not yet: after 12 steps, checkpoints of steps 5 and 10 are due below parent; there are {_steps(parent)}."

    _, began, wrong = _again(loop, parent, 17, seed)
    if began != 10:
        return (
            f"Not yet: the newest checkpoint was of step 10, and the run went on from step {began}. In the order of names, "
            "step_5 comes after step_10."
        )
    if wrong:
        return wrong
    if _steps(parent) != [10, 15]:
        return (
            f"Not yet: after step 17, the two newest, 10 and 15, are to stay; there are {_steps(parent)}. What may go is "
            "said by the number, not by the name."
        )

    unfinished = parent / all_checkpoints(parent)[-1].name.replace("15", "20")
    shutil.copytree(all_checkpoints(parent)[-1], unfinished)
    (unfinished / MANIFEST).unlink()
    try:
        _, began, wrong = _again(loop, parent, 22, seed)
    except CheckpointError as error:
        return (
            f"Not yet: a job was killed while it saved step 20, and now the run does not start: {lab.said(error)}. A "
            "folder without a manifest is no checkpoint."
        )
    if began != 15:
        return f"Not yet: step 20 was never finished, so step 15 is the newest; the run went on from {began}."
    if wrong:
        return wrong

    newest = all_checkpoints(parent)[-1]
    lab.truncate(
        newest / json.loads((newest / MANIFEST).read_text())["shards"][1]["path"], 7
    )
    try:
        _, began, wrong = _again(loop, parent, 27, seed)
    except CheckpointError as error:
        return (
            f"Not yet: the newest checkpoint is torn, and the run does not start: {lab.said(error)}. The older one is "
            "whole; go back to it."
        )
    if wrong:
        return wrong
    if began != 15:
        return (
            f"Not yet: step 20 is torn and step 15 is whole; the run went on from {began}."
        )
    if _steps(parent) != [20, 25]:
        return f"Not yet: after step 27, the checkpoints 20 and 25 are due; there are {_steps(parent)}."
    return "Right: it resumes from the newest checkpoint that is whole, and keeps two by their numbers."

"""Lesson 04's checks turn away the stubs and plausible wrong answers, each with a helpful sentence."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exercises import HINT, LESSONS, defined, exercise_cells, solution_of
from support import checks_04
from support import sharded_resume as lab

from safetrain_core import CheckpointError, load_sharded, rotate_checkpoints, save_sharded
from safetrain_core.checkpoint.folders import all_checkpoints

SCRIPT = LESSONS / "04_sharded_resume.py"
NAMES = {
    **vars(checks_04),
    "say": print,
    "torch": torch,
    "json": json,
    "os": os,
    "shutil": shutil,
    "Path": Path,
    "lab": lab,
    "CheckpointError": CheckpointError,
    "all_checkpoints": all_checkpoints,
    "load_sharded": load_sharded,
    "rotate_checkpoints": rotate_checkpoints,
    "save_sharded": save_sharded,
}
EXERCISES = [("cut", checks_04.check_cut), ("problem", checks_04.check_problem), ("loop", checks_04.check_loop)]


@pytest.mark.parametrize(("number", "name", "check"), [(i, *e) for i, e in enumerate(EXERCISES)])
def test_check_turns_away_the_stub_and_accepts_the_solution(number: int, name: str, check: Callable[..., str]) -> None:
    stub, markdown = exercise_cells(SCRIPT)[number]
    assert check(defined(stub, name, NAMES)).startswith("Not yet: ")
    assert check(defined(solution_of(markdown), name, NAMES)).startswith("Right: ")
    assert len(HINT.findall(markdown)) == 2


def test_lesson_has_the_three_exercises() -> None:
    assert len(exercise_cells(SCRIPT)) == len(EXERCISES)


def rejected(verdict: str, helps: str) -> None:
    assert verdict.startswith("Not yet: ")
    assert helps in verdict, verdict


# --- A ---------------------------------------------------------------------------------------------------------


def even(flat: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    size = len(flat) // ranks
    return [flat[rank * size : (rank + 1) * size].clone() for rank in range(ranks)]


@pytest.mark.parametrize(
    ("wrong", "helps"),
    [
        (lambda flat, ranks: list(torch.tensor_split(flat, ranks)), "is a view of a storage of"),
        (lambda flat, ranks: [p.clone() for p in flat.chunk(ranks)], "the slowest decides"),
        (lambda flat, ranks: [p.clone() for p in flat.chunk(ranks) if ranks != 3][:1], "you made 1 pieces"),
        (even, "All numbers have to be in them"),
        (lambda flat, ranks: [flat[rank::ranks].clone() for rank in range(ranks)], "joined in order of rank"),
        (lambda flat, ranks: [p.tolist() for p in flat.chunk(ranks)], "no 1-D tensor"),
        (lambda flat, ranks: None, "TypeError"),
        (lambda flat, ranks: flat.view(ranks, -1).clone(), "of its own"),
    ],
)
def test_check_cut_says_what_is_wrong(wrong: Callable[..., Any], helps: str) -> None:
    rejected(checks_04.check_cut(wrong), helps)


# --- B ---------------------------------------------------------------------------------------------------------

FINDS = solution_of(exercise_cells(SCRIPT)[1][1])
SHARDS = '    for shard in manifest["shards"]:\n        if Path'


def spoiled(sound: str, old: str, new: str) -> str:
    assert sound.count(old) == 1, f"the solution has changed: {old!r} is not in it once"
    return sound.replace(old, new)


SUM = 'lab.sum_of_file(folder / shard["path"]) != shard["sha256"]'
SHARDS_AGAIN = '    for shard in manifest["shards"]:\n        if lab'
COUNTED = '    if len(list(folder.glob("rank*.bin"))) > world_size:\n        return "too many"\n'
PLAIN_NAME = 'lab.sum_of_file(folder / f"rank{shard[\'rank\']}.bin") != shard["sha256"]'
SIZE = '(folder / shard["path"]).stat().st_size != shard["size_bytes"]'


@pytest.mark.parametrize(
    ("code", "helps"),
    [
        (spoiled(FINDS, SUM, SIZE), "only the sum of the file's bytes tells"),
        (spoiled(FINDS, SUM, "False"), "'sha256 mismatch on rank 1' is due; you found no fault"),
        (spoiled(FINDS, SUM, PLAIN_NAME), "FileNotFoundError"),
        (spoiled(FINDS, SUM, 'not torch.load(folder / shard["path"], weights_only=True)'), "it calls torch.load"),
        (spoiled(FINDS, 'Path(shard["path"]).name != shard["path"]', "False"), "a manifest may be a stranger's"),
        (spoiled(FINDS, 'not manifest["schema"].startswith("ckpt")', "False"), "a schema of ours starts with ckpt"),
        (spoiled(FINDS, 'manifest["world_size"] != world_size', "False"), "the number of ranks that saved it"),
        (spoiled(FINDS, 'not (folder / shard["path"]).is_file()', "False"), "FileNotFoundError"),
        (
            spoiled(FINDS, SHARDS, COUNTED + SHARDS),
            "the manifest alone says",
        ),
        (spoiled(FINDS, SHARDS_AGAIN, "        if lab"), "look for all of them before"),
        (spoiled(FINDS, "    return None\n", "    return True\n"), "return None or a sentence"),
    ],
)  # fmt: skip
def test_check_problem_says_what_is_wrong(code: str, helps: str) -> None:
    rejected(checks_04.check_problem(defined(code, "problem", NAMES)), helps)


# --- C ---------------------------------------------------------------------------------------------------------

SOUND = solution_of(exercise_cells(SCRIPT)[2][1])
STUB = exercise_cells(SCRIPT)[2][0]
NAMED = "names = sorted(os.listdir(parent))"
TRY = """        try:
            _, states = load_sharded(checkpoint, len(run.shards))
        except CheckpointError:
            continue  # in a real run, say so in the log
"""
NO_TRY = "        _, states = load_sharded(checkpoint, len(run.shards))\n"
BY_NUMBER = "names = sorted(os.listdir(parent), key=lambda n: int(n[5:]))"
ROTATE = "            rotate_checkpoints(parent, keep_last=2)\n"
BY_NAME = """            for name in sorted(os.listdir(parent))[:-2]:
                shutil.rmtree(parent / name)
"""


@pytest.mark.parametrize(
    ("code", "helps"),
    [
        (STUB, "step_5 comes after step_10"),
        (spoiled(SOUND, ROTATE, ""), "10 and 15, are to stay"),
        (spoiled(SOUND, ROTATE, BY_NAME), "not by the name"),
        (
            spoiled(spoiled(STUB, NAMED, BY_NUMBER), BY_NAME, ROTATE),
            "a folder without a manifest is no checkpoint",
        ),
        (spoiled(SOUND, TRY, NO_TRY), "the newest checkpoint is torn"),
        (spoiled(SOUND, "reversed(all_checkpoints(parent))", "all_checkpoints(parent)"), "the run went on from step 5"),
        (spoiled(SOUND, "run.load(states)", "run.load(states[::-1])"), "the states of all ranks, in order"),
        (spoiled(SOUND, "run.load(states)", "run.step = states[0]['step']"), "the losses are not those"),
        (spoiled(SOUND, "run.step % 5 == 0", "run.step % 4 == 0"), "steps 5 and 10 are due"),
        (spoiled(SOUND, "            continue", "            break"), "step 15 is whole; the run went on from 0"),
        (spoiled(SOUND, "keep_last=2", "keep_last=-2"), "ValueError"),
    ],
)  # fmt: skip
def test_check_loop_says_what_is_wrong(code: str, helps: str) -> None:
    verdict = checks_04.check_loop(defined(code, "loop", NAMES))
    assert verdict.startswith("Not yet: ")
    assert helps.lower() in verdict.lower(), verdict

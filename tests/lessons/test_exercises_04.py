"""Lesson 04's checks turn away the stubs and plausible wrong answers, each with a helpful sentence."""

from __future__ import annotations

from typing import ClassVar

import torch
from exercises import Exercises, exercises_of

A, B, C = exercises_of("04_sharded_resume")


# --- A ---------------------------------------------------------------------------------------------------------


def even(flat: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    size = len(flat) // ranks
    return [flat[rank * size : (rank + 1) * size].clone() for rank in range(ranks)]


# --- B ---------------------------------------------------------------------------------------------------------

SHARDS = '    for shard in manifest["shards"]:\n        if Path'


SUM = 'lab.sum_of_file(folder / shard["path"]) != shard["sha256"]'
SHARDS_AGAIN = '    for shard in manifest["shards"]:\n        if lab'
COUNTED = '    if len(list(folder.glob("rank*.bin"))) > world_size:\n        return "too many"\n'
PLAIN_NAME = 'lab.sum_of_file(folder / f"rank{shard[\'rank\']}.bin") != shard["sha256"]'
SIZE = '(folder / shard["path"]).stat().st_size != shard["size_bytes"]'


# --- C ---------------------------------------------------------------------------------------------------------

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


class TestLesson04(Exercises):
    wrong: ClassVar = {
        A: [
            (lambda flat, ranks: list(torch.tensor_split(flat, ranks)), "is a view of a storage of"),
            (lambda flat, ranks: [p.clone() for p in flat.chunk(ranks)], "the slowest decides"),
            (lambda flat, ranks: [p.clone() for p in flat.chunk(ranks) if ranks != 3][:1], "you made 1 pieces"),
            (even, "All numbers have to be in them"),
            (lambda flat, ranks: [flat[rank::ranks].clone() for rank in range(ranks)], "joined in order of rank"),
            (lambda flat, ranks: [p.tolist() for p in flat.chunk(ranks)], "no 1-D tensor"),
            (lambda flat, ranks: None, "TypeError"),
            (lambda flat, ranks: flat.view(ranks, -1).clone(), "of its own"),
        ],
        B: [
            ((SUM, SIZE), "only the sum of the file's bytes tells"),
            ((SUM, "False"), "'sha256 mismatch on rank 1' is due; you found no fault"),
            ((SUM, PLAIN_NAME), "FileNotFoundError"),
            ((SUM, 'not torch.load(folder / shard["path"], weights_only=True)'), "it calls torch.load"),
            (('Path(shard["path"]).name != shard["path"]', "False"), "a manifest may be a stranger's"),
            (('not manifest["schema"].startswith("ckpt")', "False"), "a schema of ours starts with ckpt"),
            (('manifest["world_size"] != world_size', "False"), "the number of ranks that saved it"),
            (('not (folder / shard["path"]).is_file()', "False"), "FileNotFoundError"),
            (
                (SHARDS, COUNTED + SHARDS),
                "the manifest alone says",
            ),
            ((SHARDS_AGAIN, "        if lab"), "look for all of them before"),
            (("    return None\n", "    return True\n"), "return None or a sentence"),
        ],
        C: [
            (C.stub, "step_5 comes after step_10"),
            ((ROTATE, ""), "10 and 15, are to stay"),
            ((ROTATE, BY_NAME), "not by the name"),
            (
                C.stub.replace(NAMED, BY_NUMBER).replace(BY_NAME, ROTATE),
                "A folder without a manifest is no checkpoint",
            ),
            ((TRY, NO_TRY), "the newest checkpoint is torn"),
            (("reversed(all_checkpoints(parent))", "all_checkpoints(parent)"), "the run went on from step 5"),
            (("run.load(states)", "run.load(states[::-1])"), "the states of all ranks, in order"),
            (("run.load(states)", "run.step = states[0]['step']"), "the losses are not those"),
            (("run.step % 5 == 0", "run.step % 4 == 0"), "steps 5 and 10 are due"),
            (("            continue", "            break"), "step 15 is whole; the run went on from 0"),
            (("keep_last=2", "keep_last=-2"), "ValueError"),
        ],
    }

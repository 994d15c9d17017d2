"""One of two data-parallel ranks: trains in several ways, and counts how often its gradients are all-reduced.

Run as ``python -m support.ddp_worker RANK SPEC``: lesson 02 starts it, since a notebook's own functions cannot be
spawned. It prints nothing; what it found is in a JSON file.
"""

# No ``from __future__ import annotations``: torch looks at the hook's annotations themselves.
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetrain_core import AmpTrainState, next_token_loss
from safetrain_core.step.accumulate import train_one_optimizer_step
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from . import accumulation as lab
from . import ranks, toy

Window = list[tuple[Tensor, Tensor]]


def text_windows(spec: dict[str, Any], rank: int) -> list[Window]:
    """This rank's micro-batches of text: every rank draws the same batches and takes its own rows."""
    num, accum, world = spec["updates"], spec["accum"], spec["ranks"]
    batches = toy.text_batches(num, spec["seed"], spec["rows"] * accum * world)
    return [
        lab.split((x.chunk(world)[rank], y.chunk(world)[rank]), accum) for x, y in batches
    ]


def line_windows(spec: dict[str, Any], rank: int) -> list[Window]:
    """This rank's micro-batches of lines: the first rank has the shorter ones."""
    num, accum, world = spec["updates"], spec["accum"], spec["ranks"]
    made = lab.line_windows(num, accum * world, spec["rows"], spec["seed"])
    return [micro[rank * accum : (rank + 1) * accum] for micro, _ in made]


def counted(model: DistributedDataParallel) -> dict[str, int]:
    """Count the all-reduces of ``model`` and their bytes, by a communication hook in front of torch's own."""
    count = {"all_reduces": 0, "bytes": 0}

    def hook(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        count["all_reduces"] += 1
        count["bytes"] += bucket.buffer().nbytes
        return allreduce_hook(group, bucket)

    model.register_comm_hook(None, hook)
    return count


def run(way: str, windows: list[Window], seed: int) -> dict[str, Any]:
    """Train through ``windows`` in one way; all-reduces per update, bytes, seconds, weights."""
    model = DistributedDataParallel(toy.tiny_gpt(seed))
    count = counted(model)
    sgd = torch.optim.SGD(model.parameters(), lr=ranks.LR)
    state = AmpTrainState(
        model,
        optimizer=sgd,
        loss_fn=next_token_loss,
        amp_dtype=torch.float32,
        max_norm=0,
        loss_weighting="tokens" if way == ranks.BY_TOKENS else "equal",
    )
    per_update, start = [], time.perf_counter()
    for window in windows:
        before = count["all_reduces"]
        if way in (ranks.EVERY, ranks.LAST):
            train_one_optimizer_step(
                model, sgd, window, next_token_loss, no_sync_until_last=way == ranks.LAST
            )
        else:
            state.step_window(window)
        per_update.append(count["all_reduces"] - before)
    return {
        "per_update": per_update,
        "bytes_per_update": count["bytes"] / len(windows),
        "seconds": time.perf_counter() - start,
        "weights": lab.weights(model).tolist(),
    }


def main(rank: int, spec: dict[str, Any]) -> None:
    """Meet the other rank, train in each way, write what was found."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{spec['rendezvous']}",
        rank=rank,
        world_size=spec["ranks"],
        timeout=timedelta(seconds=spec["timeout_s"]),
    )
    text, lines = text_windows(spec, rank), line_windows(spec, rank)
    found = {
        way: run(way, lines if way in ranks.OF_LINES else text, spec["seed"])
        for way in ranks.WAYS
    }
    Path(spec["results"][rank]).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()  # none leaves while the other still talks to it
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
    sys.stdout.flush()
    # Past the interpreter's end: gloo's threads now and then abort the process there (torch 2.13).
    os._exit(0)

"""A process with little memory: trains one step until it is refused more, then the same step with recomputation.

Run as ``python -m support.memory_worker SPEC``: lesson 05 starts it, since the limit holds for a whole process. It
prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from safetrain_core import MiniGPT, apply_recompute, next_token_loss
from torch import Tensor

from . import recompute as lab


def limit_memory(more_bytes: int) -> None:
    """Let this process take ``more_bytes`` on top of what it has now."""
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    now = pages * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + more_bytes, hard))


def step(model: MiniGPT, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """One forward and backward: the layers that the forward got through, the error that ended it, its traceback."""
    reached = 0

    def count(*_: Any) -> None:
        nonlocal reached
        reached += 1

    handles = [block.register_forward_hook(count) for block in model.blocks]
    try:
        next_token_loss(model(batch[0]), batch[1]).backward()
        return {"reached": reached, "error": None, "trace": None}
    except (RuntimeError, MemoryError) as error:
        said, trace = str(error) or "MemoryError", traceback.format_exc()
        return {"reached": reached, "error": said, "trace": trace}
    finally:
        model.zero_grad()
        for handle in handles:
            handle.remove()


def main() -> None:
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(1)  # each thread would reserve memory of its own
    model = lab.gpt(spec["layers"], spec["seq"], seed=spec["seed"])
    batch = lab.tokens(spec["batch"], spec["seq"], spec["seed"])
    for policy in ("none", "full"):  # in small, so that what torch loads late is loaded
        step(apply_recompute(model, policy), (batch[0][:1], batch[1][:1]))
    limit_memory(spec["limit_bytes"])
    found = [step(apply_recompute(model, policy), batch) for policy in ("none", "full")]
    print(json.dumps(found))


if __name__ == "__main__":
    main()

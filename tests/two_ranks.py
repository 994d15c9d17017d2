"""Run by test_distributed: one of two ranks whose second rank meets a fault. Prints its rows and its weight sum."""

import math
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

from safetrain_core import AmpTrainState
from safetrain_core.distributed import agree, is_main, world_size


def main(rank: int, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    print("agree", agree(rank * 3), "world", world_size(), "main", is_main())
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    state = AmpTrainState(model, amp_dtype=torch.float16, init_scale=1024.0, check_loss_before_backward=True)
    assert not state.check_loss_before_backward, "must be off with several ranks"
    x = torch.ones(3, 4)
    for step in range(4):
        y = torch.zeros(3, 2)
        if rank == 1 and step == 1:
            y += math.nan
        if rank == 1 and step == 2:
            handle = model.weight.register_hook(lambda grad: grad * math.inf)
        row = state.step(x, y)
        if rank == 1 and step == 2:
            handle.remove()
        print("row", row.skipped, row.skip_reason, row.scale)
    print("scale", state.scale, state.scaler.state_dict()["_growth_tracker"])
    print("weights", model.weight.sum().item())
    dist.barrier()  # none leaves while the other still talks to it
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
    sys.stdout.flush()
    # Past the interpreter's end: gloo's threads now and then abort the process there (torch 2.13).
    os._exit(0)

"""Run by test_distributed_recompute: one of two ranks over gloo. Prints what recomputation changes: nothing."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))
from recompute_cases import POLICIES, gpt, gpt_loss, normed, plain_stack, same, vectors

from safetrain_core import apply_recompute
from safetrain_core.memory.segment import Segment


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def step(model, losses):
    """Two micro-batches of this rank's own, the gradients synced; what that leaves."""
    torch.manual_seed(10 + dist.get_rank())
    told = [loss.detach().clone() for loss in losses(model)]
    return {
        **{f"loss {i}": loss for i, loss in enumerate(told)},
        **{f"grad {name}": local(p.grad).clone() for name, p in model.named_parameters()},
        **{f"buffer {name}": b.clone() for name, b in model.named_buffers()},
        "random": torch.get_rng_state(),
    }


def gpt_losses(model):
    for seed in (0, 1):
        loss = gpt_loss(model, 10 * dist.get_rank() + seed) / 2
        loss.backward()
        yield loss


def norm_losses(model):
    loss = model(vectors(seed=dist.get_rank())).square().sum()
    loss.backward()
    yield loss


def sharded(model):
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def compare(name, make, wrap, losses, policies):
    plain = step(wrap(make()), losses)
    for policy, k in policies:
        before, after = wrap(apply_recompute(make(), policy, k)), apply_recompute(wrap(make()), policy, k)
        print(name, policy, k, same(plain, step(before, losses)), same(plain, step(after, losses)))


def main(rank, rendezvous):
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    compare("ddp", gpt, DistributedDataParallel, gpt_losses, POLICIES)
    layers = [case for case in POLICIES if case[0] != "selective"]
    compare("ddp norm", lambda: plain_stack(normed), DistributedDataParallel, norm_losses, layers)
    compare("fsdp", gpt, sharded, gpt_losses, POLICIES)
    # FSDP hands each layer an alias of what the layer before returned: segments must see through it.
    lengths = []
    replay = Segment.replay
    Segment.replay = lambda self: (lengths.append(len(self.calls)), replay(self))[1]
    model = apply_recompute(sharded(gpt()), "every_k", 3)
    gpt_loss(model).backward()
    print("segments", lengths)
    dist.barrier()  # none leaves while the other still talks to it
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
    sys.stdout.flush()
    # Past the interpreter's end: gloo's threads now and then abort the process there (torch 2.13).
    os._exit(0)

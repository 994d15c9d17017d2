"""What each rank runs for test_distributed_recompute: steps with recomputation beside the same without."""

import torch
import torch.distributed as dist
from recompute_cases import gpt, gpt_loss, normed, plain_stack, same, vectors
from torch.nn.parallel import DistributedDataParallel

from safetrain_core import apply_recompute
from safetrain_core.memory.segment import Segment
from safetrain_core.train.worker import sharded


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


def fsdp2(model):
    return sharded(model, torch.device("cpu"))


#: A model, how ranks train it, and its losses.
KINDS = {
    "ddp": (gpt, DistributedDataParallel, gpt_losses),
    "ddp norm": (lambda: plain_stack(normed), DistributedDataParallel, norm_losses),
    "fsdp2": (gpt, fsdp2, gpt_losses),
}


def differences(kind, policies):
    """Policy, k, and what differs from the plain step: with recomputation put in before the wrapping, and after it."""
    make, wrap, losses = KINDS[kind]
    plain = step(wrap(make()), losses)
    told = []
    for policy, k in policies:
        before, after = wrap(apply_recompute(make(), policy, k)), apply_recompute(wrap(make()), policy, k)
        told.append((policy, k, same(plain, step(before, losses)), same(plain, step(after, losses))))
    return told


def segments():
    """Layers in each segment that is replayed. FSDP hands each layer an alias of what the layer before returned."""
    lengths = []
    replay = Segment.replay
    Segment.replay = lambda self: (lengths.append(len(self.calls)), replay(self))[1]
    gpt_loss(apply_recompute(fsdp2(gpt()), "every_k", 3)).backward()
    return lengths

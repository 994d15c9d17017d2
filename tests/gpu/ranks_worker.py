"""Run by test_ranks_gpu in a process group over nccl: steps, a save and a load of an FSDP2 model on one GPU."""

import torch
from torch import nn

from safetrain_core import AmpTrainState, load_dcp, save_dcp
from safetrain_core.distributed import INTERRUPT, agree
from safetrain_core.train.worker import sharded


def built(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)).to(device)
    return AmpTrainState(sharded(model, device), device_type="cuda", init_scale=1024.0)


def run(folder):
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    amp = built(device)
    x, y = torch.ones(4, 8, device=device), torch.zeros(4, 2, device=device)
    rows = [amp.step(x, y * bad) for bad in (1.0, float("nan"), 1.0)]
    state = {"model": amp.model.state_dict(), "optimizer": amp.optimizer.state_dict()}
    save_dcp(state, folder, step=3)
    weights = [p.full_tensor().tolist() for p in amp.model.parameters()]
    other = built(device)
    other.step(x, y)
    loaded = {"model": other.model.state_dict(), "optimizer": other.optimizer.state_dict()}
    load_dcp(folder, loaded)
    same = [p.full_tensor().tolist() for p in other.model.parameters()] == weights
    return [row.skip_reason for row in rows], [row.scale for row in rows], same, agree(1 + INTERRUPT, device)

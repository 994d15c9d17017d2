"""Run by test_dcp on each of several ranks: an FSDP2 model with its optimizer, saved and loaded."""

import torch
from torch import nn

from safetrain_core import load_dcp, save_dcp
from safetrain_core.checkpoint import dcp
from safetrain_core.distributed import rank, world_size
from safetrain_core.errors import CheckpointError
from safetrain_core.train.worker import sharded


def built(seed, width=7):
    """Sizes that no number of ranks divides."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, width), nn.GELU(), nn.Linear(width, 3))
    if world_size() > 1:
        sharded(model, torch.device("cpu"))
    adam = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    torch.manual_seed(seed)
    model(torch.randn(4, 5)).square().sum().backward()
    adam.step()
    return model, adam


def state_of(model, adam, note):
    return {"model": model.state_dict(), "optimizer": adam.state_dict(), "note": note}


def everything(model, adam):
    """All values, whole, as lists."""
    tensors = [*model.parameters(), *(v for s in adam.state.values() for v in s.values())]
    return [(t.full_tensor() if hasattr(t, "full_tensor") else t).detach().tolist() for t in tensors]


def save(folder, seed=0, note="first", step=10):
    model, adam = built(seed)
    save_dcp(state_of(model, adam, note), folder, step=step, own={"rank": rank(), "noise": torch.tensor([rank()])})
    return everything(model, adam)


def load(folder, width=7):
    """What is there after a load, or the error, and whether anything had changed by then."""
    model, adam = built(1, width)
    before = everything(model, adam)
    try:
        manifest, state, own = load_dcp(folder, state_of(model, adam, None))
    except CheckpointError as error:
        return str(error), everything(model, adam) == before
    adam.load_state_dict(state["optimizer"])
    return everything(model, adam), state["note"], own, manifest.step


def save_where_one_cannot_write(folder, which):
    model, adam = built(2)
    real = dcp.atomic_open

    def full(path):
        if rank() == which:
            raise OSError(28, "No space left on device")
        return real(path)

    dcp.atomic_open = full
    try:
        save_dcp(state_of(model, adam, "second"), folder, step=20)
    except CheckpointError as error:
        return str(error)
    finally:
        dcp.atomic_open = real
    return None


def save_what_cannot_be_read_back(folder, which):
    model, _ = built(2)
    try:
        save_dcp({"model": model.state_dict()}, folder, step=20, own={"x": object() if rank() == which else 0})
    except ValueError as error:
        return str(error)
    return None

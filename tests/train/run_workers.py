"""Run by test_several_ranks, on each of several ranks: whole runs of SafeTrainer, sharded by FSDP2."""

import math
import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from safetrain_core import MiniGPT, MiniGPTConfig, SafeTrainer, TrainConfig, next_token_loss
from safetrain_core.distributed import rank, world_size
from safetrain_core.errors import SafeTrainError
from safetrain_core.train.ranks import rank_facts, state_digest
from safetrain_core.train.worker import sharded

SIZE = MiniGPTConfig(vocab_size=11, context=8, layers=2, heads=2, width=16, dropout=0.1)


def data(count=48):
    ids = torch.randint(11, (count, 9), generator=torch.Generator().manual_seed(5))
    return TensorDataset(ids[:, :-1], ids[:, 1:])


def loader(batch_size=2):
    if world_size() == 1:
        return DataLoader(data(), batch_size, shuffle=True)
    return DataLoader(data(), batch_size, sampler=DistributedSampler(data(), shuffle=True))


def trainer(folder, *, wrap="fsdp", seed=0, val=False, dropout=0.1, **options):
    hooks = {name: options.pop(name) for name in ("fault", "before_step") if name in options}
    torch.manual_seed(seed)
    model = MiniGPT(MiniGPTConfig(**{**{f: getattr(SIZE, f) for f in SIZE.__slots__}, "dropout": dropout}))
    if wrap == "fsdp":
        sharded(model, torch.device("cpu"))
    elif wrap == "ddp":
        model = DistributedDataParallel(model)
    defaults = {"max_steps": 12, "gradient_accumulation_steps": 2, "checkpoint_every_n_steps": 4, "learning_rate": 0.01}
    return SafeTrainer(
        model,
        TrainConfig(**{**defaults, **options}),
        loader(),
        loader() if val else None,
        next_token_loss,
        checkpoint_dir=folder,
        **hooks,
    )


def told(made, result):
    rows = [(row.step, row.loss, row.pre_clip, row.post_clip, row.skip_reason) for row in result.rows]
    return {
        "rows": rows,
        "status": result.status,
        "updates": result.state.updates,
        "retries": result.state.retries,
        "position": (result.state.epoch, result.state.batch_in_epoch),
        "digest": state_digest(made.amp),
        "val_loss": result.val_loss,
        "signal": None if result.signal is None else result.signal.name,
    }


def run(folder, resume=None, **options):
    """One run; ``resume`` is a path, or True for the newest."""
    made = trainer(folder, seed=1 if resume else 0, **options)
    began = None
    if resume is not None:
        found = made.resume(None if resume is True else resume)
        began = (str(found), state_digest(made.amp), rank_facts(made.model, made.amp.optimizer).norm)
    return {**told(made, made.fit()), "began": began}


def run_with_nan(folder, where, step, **options):
    def fault(now, model):
        if now == step and rank() == where:
            handles.append(model.norm.register_forward_hook(lambda m, i, out: out * math.nan))
        elif handles:
            handles.pop().remove()

    handles = []
    return run(folder, fault=fault, **options)


def run_with_signal(folder, where, step, number, **options):
    def fault(now, model):
        if now == step and rank() == where:
            os.kill(os.getpid(), number)

    return run(folder, fault=fault, **options)


def run_with_poison(folder, where, step, **options):
    """The weights themselves become NaN on one rank, as a bad kernel or a cosmic ray leaves them."""

    def fault(now, model):
        if now == step and rank() == where:
            with torch.no_grad():
                held = next(model.parameters())
                (held.to_local() if hasattr(held, "to_local") else held).view(-1)[0] = math.nan

    return run(folder, fault=fault, **options)


def run_with_exception(folder, where, step):
    def fault(now, model):
        if now == step and rank() == where:
            raise LookupError(f"no such sample at step {step}")

    return run(folder, fault=fault)


def run_until_it_fails(folder):
    def fault(now, model):
        if now == 3 and rank() == 1:
            model.norm.register_forward_hook(lambda m, i, out: out * math.nan)

    try:
        run(folder, fault=fault, max_nan_retries=2)
    except SafeTrainError as stop:
        return type(stop).__name__, stop.reason, stop.step, stop.newest_good, stop.result.state.retries
    return None


def run_with_jump(folder, step):
    def fault(now, model):
        if now == step:
            with torch.no_grad():
                for held in model.parameters():
                    held.mul_(-60.0)

    return run(folder, fault=fault, loss_jump_factor=1.5, loss_jump_window=3, max_steps=12, dropout=0.0)


def refused(folder):
    try:
        trainer(folder, async_save=True)
    except ValueError as error:
        return str(error)
    return None


class Averages(nn.Module):
    """BatchNorm, whose statistics are each rank's own."""

    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x):
        return self.out(self.norm(x))


def buffers_after_resume(folder, resume):
    torch.manual_seed(0)
    model = Averages()
    sharded(model, torch.device("cpu"))
    points = TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(1)), torch.zeros(32, 4))
    sampler = DistributedSampler(points) if world_size() > 1 else None
    made = SafeTrainer(
        model,
        TrainConfig(max_steps=4, checkpoint_every_n_steps=2, learning_rate=0.01),
        DataLoader(points, 4, sampler=sampler),
        loss_fn=nn.functional.mse_loss,
        checkpoint_dir=folder,
    )
    if resume is not None:
        made.resume(Path(resume))
        return model.norm.running_mean.tolist()
    made.fit()
    return model.norm.running_mean.tolist()


SIGNALS = {name: getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1")}

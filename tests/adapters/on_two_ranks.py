"""A run on the ranks that torchrun has started: ``on_two_ranks.py HOST CASE FOLDER``. Each rank writes what it saw."""

import functools
import json
import os
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import torch

from safetrain_core import ThermalAbort
from safetrain_core.distributed import rank

host, case, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
csv = str(folder / "run.csv")
knobs = {"csv_log_path": csv, "loss_jump_factor": 3.0, "loss_jump_window": 3}
readings = {"jump": [86.0] * 20 + [74.0], "abort": [96.0]}[case]


def celsius():
    """Rank 1 has a card that is hot from the second step's row on, and cools, or does not."""
    if rank() == 0 or len(callback.result.rows) < 2:
        return 60.0
    return readings.pop(0) if len(readings) > 1 else readings[0]


knobs |= {"gpu_temp_guard": True, "gpu_temp_poll_interval_seconds": 0.01, "thermal_source": celsius}


def slowly(*args):  # polls fall into each step
    time.sleep(0.05)


if host == "huggingface":
    from hf_runs import data, guarded
    from transformers import TrainerCallback

    class Slow(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            slowly()

    # Accelerate deals whole batches in turn: the tenth is rank 1's in the fifth step.
    examples = data({10: 300.0} if case == "jump" else None)
    trainer, callback = guarded(folder / "run", knobs, examples=examples, callbacks=[Slow()])
    run, model = trainer.train, trainer.model
else:
    from lightning.pytorch import Callback
    from lightning_runs import guarded, loader
    from torch.utils.data import DataLoader, DistributedSampler

    class SlowToo(Callback):
        on_train_batch_start = slowly

    batches = loader()
    if case == "jump":  # torch deals samples in turn: rank 1 has the odd ones, four a step
        x, labels = batches.dataset.tensors
        here = slice(4 * 8 + 1, 5 * 8, 2)
        x[here], labels[here] = x[here] * 300, (labels[here] + 1) % 3
    options = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
    trainer, model, callback = guarded(folder / "run", knobs, callbacks=[SlowToo()], **options)
    sampler = DistributedSampler(batches.dataset, 2, int(os.environ["RANK"]), shuffle=False)
    run = functools.partial(trainer.fit, model, DataLoader(batches.dataset, 4, sampler=sampler))

raised = None
try:
    run()
except ThermalAbort as stop:
    raised = str(stop)
rows = callback.result.rows
told = {
    "raised": raised,
    "status": callback.result.status,
    "steps": trainer.state.global_step if host == "huggingface" else trainer.global_step,
    "losses": [row.loss for row in rows],
    "reasons": [row.skip_reason for row in rows],
    "pauses": callback.result.pauses,
    "weights": sum(float(weight.double().sum()) for weight in model.state_dict().values()),
    "finite": all(bool(torch.isfinite(weight).all()) for weight in model.state_dict().values()),
}
(folder / f"rank{rank()}.json").write_text(json.dumps(told))

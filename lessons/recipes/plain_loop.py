"""A loop of your own with the guards in it: safe step, CSV, checkpoints, resume, and the doctor's word at the end."""

import argparse
from dataclasses import asdict
from pathlib import Path

import torch

from safetrain_core import AmpTrainState, Checkpoints, StepLog, diagnose, load_checkpoint, save_checkpoint
from safetrain_core.train.telemetry import CsvLog

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--out", type=Path, default=Path("runs/plain_loop"))
parser.add_argument("--steps", type=int, default=60)
args = parser.parse_args()

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
safe = AmpTrainState(model, optimizer=optimizer, scheduler=schedule, amp_dtype=torch.float32)

kept = Checkpoints(args.out)
newest = kept.latest()  # one that is torn is passed over
if newest is not None:
    safe.counters.load_dict(load_checkpoint(newest, model, optimizer, schedule).to_dict())
done = safe.counters.step if newest is not None else None
with CsvLog(args.out / "metrics.csv", list(StepLog.__dataclass_fields__), resume_after=done) as log:
    for step in range(safe.counters.step + 1, args.steps + 1):
        inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))  # your data, by its position
        targets = inputs.sum(1, keepdim=True) if step != 25 else torch.full((16, 1), torch.nan)
        log.write(asdict(safe.step(inputs, targets)))  # step 25 is refused, and leaves no trace
        if step % 10 == 0:
            save_checkpoint(model, optimizer, schedule, safe.counters, args.out / f"step_{step:08d}.pt")
            for old in kept.all()[:-3]:
                old.unlink()
print(f"{safe.counters.updates} updates", *diagnose(args.out / "metrics.csv"), sep="\n")

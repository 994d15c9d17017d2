"""Your own loop, guarded: safe step, CSV, checkpoints, resume, and a word of the doctor."""

import sys
from dataclasses import asdict
from pathlib import Path

import safetrain_core as st
import torch
from safetrain_core.train.csv_log import CsvLog
from torch import nn

out = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/plain_loop")
last = int(sys.argv[2]) if len(sys.argv) > 2 else 60

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))
adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, T_max=200)
parts = (model, adam, cosine)
safe = st.AmpTrainState(model, optimizer=adam, scheduler=cosine, amp_dtype=torch.float32)

kept = st.Checkpoints(out)
newest = kept.latest()  # one that is torn is passed over
if newest is not None:
    safe.counters.load_dict(st.load_checkpoint(newest, *parts).to_dict())
columns = list(st.StepLog.__dataclass_fields__)
with CsvLog(out / "metrics.csv", columns, resume_after=safe.counters.step or None) as log:
    for step in range(safe.counters.step + 1, last + 1):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))  # your data
        y = x.sum(1, keepdim=True) * (
            torch.nan if step == 25 else 1.0
        )  # step 25 is refused
        log.write(asdict(safe.step(x, y)))
        if step % 10 == 0:
            st.save_checkpoint(*parts, safe.counters, out / f"step_{step:08d}.pt")
            for old in kept.all()[:-3]:
                old.unlink()
print(f"{safe.counters.updates} updates", *st.diagnose(out / "metrics.csv"), sep="\n")

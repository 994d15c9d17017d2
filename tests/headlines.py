"""The README's section "Measured": which rows of ``tests/benchmarks/RESULTS.md`` it shows."""

from __future__ import annotations

import re
from pathlib import Path

from quoted import by_name, rows_behind
from results import HOLDS, KEPT, SHORT, read

#: The rows that the README shows; all others are a click away.
HEADLINES = (
    "step: safe step / bare loop, float32, MiniGPT 4 x 128",
    "step: safe step / Lightning Fabric loop, float32",
    "step: safe step / Accelerate loop, float32",
    "step: safe step: host reads",
    "step: guard / clip_grad_norm_, 200 x 250,000, no clip due",
    "step: per-parameter guard with item() / guard, no clip due",
    "accumulation: guarded window / bare loop, 4 micro-batches",
    "trainer: SafeTrainer with CSV / the same steps by hand",
    "several ranks: all-reduces per update besides the gradients', fsdp2, loss, norm and verdict",
    "checkpoint: atomic_save / torch.save + fsync, 400 MB",
    "checkpoint: verify and load / torch.load, 400 MB",
    "checkpoint: kills that lost the previous checkpoint",
    "sharded: save_sharded / four torch.save + fsync in turn, 4 x 64 MB",
    "sharded: load_sharded / four torch.load, 4 x 64 MB",
    "sharded: load_dcp / DCP load, which verifies nothing, 256 MB",
    "memory: predicted against counted peak bytes, math, largest error",
    "thermal: host reads that the guard adds to 20 steps",
    "low rank: GaLore state / galore-torch's, held",
    "low rank: GaLore update / galore-torch's, between bases",
    "doctor: found least often of all symptoms",
    "doctor: healthy runs with an error",
    "doctor: 10^6 rows of our CSV, processor time",
    "kit: import safetrain_core after torch",
)


def measured_table(kept: Path = KEPT) -> str:
    """The README's table of what ``make bench`` has measured: the headlines, and every claim that falls short."""
    rows = by_name(read(kept))
    page = kept.read_text(encoding="utf-8")
    when, on = (re.search(rf"^- {what}: (.+?)[,\n]", page, flags=re.MULTILINE)[1] for what in ("when", "on"))
    short = [name for name, row in rows.items() if row.verdict == SHORT]
    claims = sum(row.verdict in (HOLDS, SHORT) for row in rows.values())
    fall = f"{len(short)} of {claims} claims fall{'s' * (len(short) == 1)} short"
    lines = [
        f"By `make bench` on {when}, {on}; x is a ratio of times. {fall}.",
        "[All rows, with machine, versions and spread](tests/benchmarks/RESULTS.md).",
        "",
        "| what | measured | target | |",
        "|---|---|---|---|",
    ]
    for name in dict.fromkeys([*HEADLINES, *short]):
        (row,) = rows_behind(name, rows)
        area, what, measured, target, verdict, _ = row.cells()
        lines.append(f"| {area}: {what} | {measured} | {target} | {'' if verdict == '-' else verdict} |")
    return "\n".join(lines)

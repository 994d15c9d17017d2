"""Symptoms 9 to 12, and 14, of lesson 00: checkpoint folders that are really damaged, and what the doctor makes of them.

Each function saves something tiny in a temporary folder, does to it what people and machines do to checkpoints, and
tries to load it. With ``mended=True`` it saves or loads as one should.
"""

from __future__ import annotations

import dataclasses
import io
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetrain_core import (
    CheckpointError,
    Checkup,
    Evidence,
    Finding,
    TrainState,
    atomic_save,
    load_checkpoint,
    load_sharded,
    rotate_checkpoints,
    save_checkpoint,
    save_sharded,
    verify_checkpoints,
)
from safetrain_core.checkpoint.manifest import SHARD_SCHEMA
from torch import nn

from . import toy
from .sharded_resume import said
from .symptom_page import Picture, Shown

RANKS = 4


def shards_of(seed: int, step: int) -> list[dict[str, Any]]:
    """What each of four ranks saves: its quarter of a small model's weights after ``step`` steps."""
    model = toy.tiny_mlp(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in toy.sensor_batches(step, seed):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    return [
        {"param_shard": piece.clone(), "step": step}
        for piece in torch.tensor_split(flat, RANKS)
    ]


def attempt(load: Callable[[], Any], what: str) -> str:
    """What a load says: ``what`` where it succeeds, else its error."""
    try:
        load()
    except CheckpointError as error:
        return f"CheckpointError: {said(error)}"
    return what


def other_ranks(seed: int, mended: bool) -> Shown:
    """9. Saved on four ranks, and the queue gave only two for the next job."""
    ranks = RANKS if mended else 2
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "step_00000010")
        save_sharded(shards_of(seed, 10), path, step=10)
        return looked_through(
            folder,
            [
                f"saved on {RANKS} ranks, loading on {ranks}",
                attempt(lambda: load_sharded(path, ranks), f"loaded on {ranks} ranks"),
            ],
            verify_checkpoints(folder, world_size=ranks),
        )


def cut_save(seed: int, mended: bool) -> Shown:
    """10. The next save goes over the old files, and ends in the middle of rank 1's."""
    with tempfile.TemporaryDirectory() as folder:
        path, states = Path(folder, "step_00000010"), shards_of(seed, 20)
        save_sharded(shards_of(seed, 10), path, step=10)
        if mended:
            save_sharded(states, path, step=20)  # new names, and the manifest last
        else:
            for rank in (0, 1):
                payload = {
                    "schema": SHARD_SCHEMA,
                    "rank": rank,
                    "step": 20,
                    "state": states[rank],
                }
                data = io.BytesIO()
                torch.save(payload, data)
                whole = data.getvalue()
                part = whole if rank == 0 else whole[: len(whole) // 2]
                with open(next(path.glob(f"rank{rank}.*")), "r+b") as file:
                    file.write(part)
        return looked_through(
            folder,
            [attempt(lambda: load_sharded(path, RANKS), "loaded: step 20, all four ranks")],
            verify_checkpoints(folder),
        )


def lost_shard(seed: int, mended: bool) -> Shown:
    """11. The folder is copied to another machine, and the copy takes one file too few."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "here", "step_00000010")
        save_sharded(shards_of(seed, 10), path, step=10)
        there = Path(folder, "there")
        left = shutil.ignore_patterns() if mended else shutil.ignore_patterns("rank3*")
        shutil.copytree(path.parent, there, ignore=left)
        copied = there / path.name
        shown = ["here:  " + _listing(path), "there: " + _listing(copied)]
        shown.append(attempt(lambda: load_sharded(copied, RANKS), "loaded on four ranks"))
        return looked_through(folder, shown, verify_checkpoints(there))


def other_schema(seed: int, mended: bool) -> Shown:
    """12. A file of another program, which has its own name for what is in it."""
    model = toy.tiny_mlp(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "step_00000010.pt")
        state = TrainState(step=10, updates=10)
        if mended:
            save_checkpoint(model, optimizer, None, state, path)
        else:
            payload = {"schema": "weights.v2", "weights": model.state_dict(), "step": 10}
            atomic_save(payload, path)

        def load() -> None:
            load_checkpoint(path, toy.tiny_mlp(seed + 1), optimizer, None)

        shown = [attempt(load, "loaded: step 10")]
        return looked_through(folder, shown, verify_checkpoints(folder))


def never_rotated(seed: int, mended: bool) -> Shown:
    """14. A checkpoint every ten steps, and none is ever removed."""
    state = shards_of(seed, 10)[0]
    kilobytes = []
    with tempfile.TemporaryDirectory() as folder:
        for step in range(10, 250, 10):
            save_sharded([state], Path(folder, f"step_{step:08d}"), step)
            if mended:
                rotate_checkpoints(folder, keep_last=5)
            files = [file for file in Path(folder).rglob("*") if file.is_file()]
            kilobytes.append(sum(file.stat().st_size for file in files) / 1000)
        grown = round(kilobytes[-1] / kilobytes[0])
        lines = [f"24 saves, and {grown} times the room of one"]
        picture = Picture("kB on the disk", {"checkpoints": kilobytes}, xlabel="save")
        return looked_through(folder, lines, verify_checkpoints(folder), picture)


def _listing(folder: Path) -> str:
    names = (entry.name for entry in folder.iterdir())
    return " ".join(sorted(said(name) for name in names))


def looked_through(
    folder: str, lines: list[str], told: Checkup, picture: Picture | None = None
) -> Shown:
    """The doctor's findings, with ``run`` in place of the temporary folder's name."""
    findings = [_relative(finding, folder) for finding in told.findings]
    return Shown(lines, findings, picture)


def _relative(finding: Finding, folder: str) -> Finding:
    def short(value: Any) -> Any:
        return said(value.replace(folder, "run")) if isinstance(value, str) else value

    evidence = tuple(
        Evidence(one.step, {name: short(value) for name, value in one.values.items()})
        for one in finding.evidence
    )
    return dataclasses.replace(finding, symptom=short(finding.symptom), evidence=evidence)

"""Symptoms 9 to 14 of lesson 00: checkpoint folders that are really damaged, and what the doctor makes of them.

Each function saves something tiny in a temporary folder, does to it what people and machines do to checkpoints, and
tries to load it. With ``mended=True`` it saves or loads as one should.
"""

from __future__ import annotations

import dataclasses
import io
import json
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
from safetrain_core.checkpoint.manifest import MANIFEST, SHARD_SCHEMA, Shard, ShardManifest
from torch import Tensor, nn

from . import toy
from .sharded_resume import said, sum_of_file, visible_memory
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
        return _looked_through(
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
        return _looked_through(
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
        return _looked_through(folder, shown, verify_checkpoints(there))


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
        return _looked_through(folder, shown, verify_checkpoints(folder))


#: Symptom 13: two ranks have half of the 64 words each, and the last word of each half is in every 100th batch only.
WORDS, WIDTH, LABELS, RARE, EVERY = 64, 16, 8, (31, 63), 100
#: The checkpoint's step, and the bytes of each file that never reached the disk: those of its last word.
SAVED_AT, LOST = 20, 4 * WIDTH


def _words(step: int, seed: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(100_003 * seed + step)
    words = torch.randint(0, WORDS - len(RARE), (16,), generator=draws)
    words += (words >= RARE[0]).long()
    if step % EVERY == 0:
        words[:2] = torch.tensor(RARE)
    return words, words % LABELS


def _speaker(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, LABELS))


def _flat(model: nn.Sequential) -> list[nn.Parameter]:
    """The weights in the order of the flat parameter: the head, then word after word."""
    return [model[1].weight, model[1].bias, model[0].weight]


def _train(model: nn.Module, first: int, last: int, seed: int) -> list[float]:
    losses = []
    for step in range(first, last + 1):
        words, labels = _words(step, seed)
        loss = F.cross_entropy(model(words), labels)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight -= 0.3 * weight.grad
        losses.append(loss.item())
    return losses


def partial_shard(seed: int, mended: bool) -> Shown:
    """13. Power fails when the manifest is on the disk and the last bytes of the shards are not; the loader asks nothing."""
    model = _speaker(seed)
    losses = _train(model, 1, SAVED_AT, seed)
    flat = nn.utils.parameters_to_vector(_flat(model)).detach()
    half = WIDTH * WORDS // 2
    pieces = list(flat.split([len(flat) - half, half]))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"step_{SAVED_AT:08d}")
        if mended:
            save_sharded([{"param_shard": piece} for piece in pieces], path, SAVED_AT)
            loaded = [state["param_shard"] for state in load_sharded(path, 2)[1]]
        else:
            _save_raw(pieces, path)
            with visible_memory():  # what torch.empty finds is NaN here, and anything elsewhere
                loaded = [_read_raw(path, r, len(p)) for r, p in enumerate(pieces)]
        resumed = _speaker(seed + 1)
        nn.utils.vector_to_parameters(torch.cat(loaded), _flat(resumed))
        losses += _train(resumed, SAVED_AT + 1, 2 * EVERY - SAVED_AT, seed)
        told = verify_checkpoints(folder)
        good = next((i for i, loss in enumerate(losses) if loss != loss), len(losses))
        lines = [f"saved after step {SAVED_AT}, loaded without an error"]
        lines += [f"{good - SAVED_AT} steps with a good loss after the resume"]
        if good < len(losses):
            lines.append(f"step {good + 1}: loss {losses[good]}, and so on to the end")
        shown = _looked_through(folder, lines, told)
    shown.picture = Picture("loss", {"loss": losses})
    shown.picture.marks = [good + 1] if good < len(losses) else []
    return shown


def _save_raw(pieces: list[Tensor], folder: Path) -> None:
    """A raw file per rank, and a manifest; of each file the last bytes never get to the disk."""
    folder.mkdir()
    shards, offset = [], 0
    for rank, piece in enumerate(pieces):
        path = folder / f"rank{rank}.bin"
        path.write_bytes(piece.numpy().tobytes())
        size = path.stat().st_size
        shards.append(Shard(rank, path.name, sum_of_file(path), size, offset, len(piece)))
        offset += len(piece)
    manifest = ShardManifest(SHARD_SCHEMA, len(pieces), SAVED_AT, 0.0, tuple(shards))
    (folder / MANIFEST).write_text(json.dumps(manifest.to_json()))
    for shard in shards:
        path = folder / shard.path
        path.write_bytes(path.read_bytes()[:-LOST])


def _read_raw(folder: Path, rank: int, count: int) -> Tensor:
    memory = torch.empty(count)
    with open(folder / f"rank{rank}.bin", "rb") as file:
        file.readinto(memory.numpy())  # tells how many bytes it got; nobody asks
    return memory


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
        shown = _looked_through(folder, lines, verify_checkpoints(folder))
    shown.picture = Picture("room on the disk (kB)", {"checkpoints": kilobytes}, xlabel="save")
    return shown


def _listing(folder: Path) -> str:
    names = (entry.name for entry in folder.iterdir())
    return " ".join(sorted(said(name) for name in names))


def _looked_through(folder: str, lines: list[str], told: Checkup) -> Shown:
    """The doctor's findings, with ``run`` in place of the temporary folder's name."""
    return Shown(lines, [_relative(finding, folder) for finding in told.findings])


def _relative(finding: Finding, folder: str) -> Finding:
    def short(value: Any) -> Any:
        return said(value.replace(folder, "run")) if isinstance(value, str) else value

    evidence = tuple(
        Evidence(one.step, {name: short(value) for name, value in one.values.items()})
        for one in finding.evidence
    )
    return dataclasses.replace(finding, symptom=short(finding.symptom), evidence=evidence)

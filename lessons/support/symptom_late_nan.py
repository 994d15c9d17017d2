"""Symptom 13 of lesson 00: a resume that looks well, from shards whose last bytes never reached the disk.

Two ranks share a table of words, half each, and save it raw. The rarest word of each half comes last in its file.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from safetrain_core import load_sharded, save_sharded, verify_checkpoints
from safetrain_core.checkpoint.manifest import MANIFEST, SHARD_SCHEMA, Shard, ShardManifest
from torch import Tensor, nn

from .sharded_resume import sum_of_file, visible_memory
from .symptom_folders import looked_through
from .symptom_page import Picture, Shown

#: Two ranks have half of the 64 words each, and the last word of each half is in every 100th batch only.
WORDS, WIDTH, LABELS, RARE, EVERY = 64, 16, 8, (31, 63), 100
#: The checkpoint's step, and the bytes of each file that never reached the disk: those of its last word.
SAVED_AT, LOST = 20, 4 * WIDTH


def words_of(step: int, seed: int) -> tuple[Tensor, Tensor]:
    """The batch of ``step``: words, and the label that goes with each."""
    draws = torch.Generator().manual_seed(100_003 * seed + step)
    words = torch.randint(0, WORDS - len(RARE), (16,), generator=draws)
    words += (words >= RARE[0]).long()
    if step % EVERY == 0:
        words[:2] = torch.tensor(RARE)
    return words, words % LABELS


def speaker(seed: int) -> nn.Sequential:
    """The table of words, and a head."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, LABELS))


def flat_order(model: nn.Sequential) -> list[nn.Parameter]:
    """The weights in the order of the flat parameter: the head, then word after word."""
    return [model[1].weight, model[1].bias, model[0].weight]


def train(model: nn.Module, first: int, last: int, seed: int) -> list[float]:
    """Plain SGD from step ``first`` to step ``last``; the losses."""
    losses = []
    for step in range(first, last + 1):
        words, labels = words_of(step, seed)
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
    model = speaker(seed)
    losses = train(model, 1, SAVED_AT, seed)
    flat = nn.utils.parameters_to_vector(flat_order(model)).detach()
    half = WIDTH * WORDS // 2
    pieces = list(flat.split([len(flat) - half, half]))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"step_{SAVED_AT:08d}")
        if mended:
            save_sharded([{"param_shard": piece} for piece in pieces], path, SAVED_AT)
            loaded = [state["param_shard"] for state in load_sharded(path, 2)[1]]
        else:
            save_raw(pieces, path)
            # What torch.empty finds is NaN in here. Elsewhere it may be anything.
            with visible_memory():
                loaded = [read_raw(path, r, len(p)) for r, p in enumerate(pieces)]
        resumed = speaker(seed + 1)
        nn.utils.vector_to_parameters(torch.cat(loaded), flat_order(resumed))
        losses += train(resumed, SAVED_AT + 1, 2 * EVERY - SAVED_AT, seed)
        told = verify_checkpoints(folder)
        good = next((i for i, loss in enumerate(losses) if loss != loss), len(losses))
        lines = [f"saved after step {SAVED_AT}, loaded without an error"]
        lines += [f"{good - SAVED_AT} steps with a good loss after the resume"]
        if good < len(losses):
            lines.append(f"step {good + 1}: loss {losses[good]}, and so on to the end")
        marks = [good + 1] if good < len(losses) else []
        picture = Picture("loss", {"loss": losses}, marks=marks, marked="NaN from here on")
        return looked_through(folder, lines, told, picture)


def save_raw(pieces: list[Tensor], folder: Path) -> None:
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


def read_raw(folder: Path, rank: int, count: int) -> Tensor:
    """A rank's numbers, as far as its file has them."""
    memory = torch.empty(count)
    with open(folder / f"rank{rank}.bin", "rb") as file:
        file.readinto(memory.numpy())  # tells how many bytes it got; nobody asks
    return memory

"""The experiments of lesson 04 as functions of their knobs: a run cut into shards, folders that a crash leaves behind."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetrain_core import (
    CheckpointError,
    MiniGPT,
    MiniGPTConfig,
    RankFailed,
    ShardManifest,
    StepLog,
    clip_global_l2_norm,
    launch,
    load_sharded,
    next_token_loss,
)
from safetrain_core.checkpoint.manifest import MANIFEST, SHARD_SCHEMA, Shard
from torch import Tensor, nn

from . import toy
from .figures import STYLES, draw, log_scale, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LR, ROWS, WIDTH = 3e-3, 16, 32
#: Bytes that are missing at the end of the last shard of a save that was cut off.
CUT = 1024


def said(error: BaseException | str) -> str:
    """An error's text: names in place of whole paths, no digits of sums and nonces, sizes marked as measured.

    >>> said(ValueError("/some/where/rank0.bin is torn"))
    'rank0.bin is torn'
    >>> said("rank1.0123456789ab.bin has 0123456789ab...")
    'rank1.<nonce>.bin has <sum>...'
    >>> said("a.bin has 9 bytes of 10")
    'a.bin has ~9 bytes of ~10'
    """
    text = re.sub(r"(?<![\w.])/\S*/(?=[^/\s]+)", "", str(error))
    text = re.sub(r"(?<=rank\d)\.[0-9a-f]{12}(?=\.bin)", ".<nonce>", text)
    text = re.sub(r"has (\d+) bytes of (\d+)", r"has ~\1 bytes of ~\2", text)
    return re.sub(r"\b[0-9a-f]{12}(?=\.\.\.)", "<sum>", text)


# --- a run in shards ------------------------------------------------------------------------------------------


def vocabulary() -> int:
    """Token ids of the model: the characters, and what is reserved before them to make it a multiple of 64.

    >>> vocabulary() % 64
    0
    """
    return -(-len(toy.text().vocab) // 64) * 64


@lru_cache(maxsize=1)
def by_frequency() -> Tensor:
    """Character id -> token id, the rarest last: a vocabulary in the order that BPE has, too."""
    counts = torch.bincount(toy.text().train.ids, minlength=len(toy.text().vocab))
    order = counts.argsort(descending=True, stable=True)
    ids = torch.arange(vocabulary() - len(order), vocabulary())
    return torch.empty_like(order).scatter_(0, order, ids)


def batch_of(step: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The batch of ``step``: the data position of this run is its step.

    >>> x, y = batch_of(1)
    >>> x.shape, torch.equal(x[:, 1:], y[:, :-1])
    (torch.Size([16, 32]), True)
    """
    x, y = next(toy.text_batches(1, 100_003 * seed + step, ROWS))
    return by_frequency()[x], by_frequency()[y]


class ShardedRun:
    """A tiny GPT whose flat FP32 weights and AdamW moments are cut into ``ranks`` shards, as ZeRO stage 1 does it.

    Each shard has an AdamW of its own, which sees its piece of the gradient; then the pieces are gathered into the
    model. Here one process does it for all ranks. The flat parameter has the weights in the order in which backward is
    done with them, the head first and the token embedding last; without dropout, and with a constant learning rate,
    the step is all that is left to save.

    >>> run = ShardedRun(ranks=2)
    >>> run.train(1)
    >>> run.step, [shard.numel() for shard in run.shards]
    (1, [17216, 17216])
    """

    def __init__(self, seed: int = 0, ranks: int = 4) -> None:
        torch.manual_seed(seed)
        config = MiniGPTConfig(
            vocabulary(), context=toy.CONTEXT, layers=2, heads=4, width=WIDTH, tied=False
        )
        self.model = MiniGPT(config)
        self.weights = list(self.model.parameters())[::-1]
        flat = torch.cat([w.detach().flatten() for w in self.weights])
        self.shards = [nn.Parameter(s.clone()) for s in torch.tensor_split(flat, ranks)]
        self.optimizers = [torch.optim.AdamW([shard], lr=LR) for shard in self.shards]
        self.seed, self.step = seed, 0
        self.rows: list[StepLog] = []

    @property
    def losses(self) -> list[float]:
        """The loss of each step that this object has taken."""
        return [row.loss for row in self.rows]

    def train(self, steps: int) -> None:
        """Take ``steps`` more steps."""
        for _ in range(steps):
            x, y = batch_of(self.step + 1, self.seed)
            loss = next_token_loss(self.model(x), y)
            self.model.zero_grad()
            loss.backward()
            pre, post = clip_global_l2_norm(self.model.parameters(), 1.0)
            gradient = torch.cat([w.grad.flatten() for w in self.weights])
            for shard, piece, optimizer in zip(
                self.shards,
                torch.tensor_split(gradient, len(self.shards)),
                self.optimizers,
                strict=True,
            ):
                shard.grad = piece
                optimizer.step()
            self._gather()
            self.step += 1
            self.rows.append(
                StepLog(self.step, LR, float(pre), float(post), loss.item(), None)
            )

    def _gather(self) -> None:
        flat = torch.cat([shard.detach() for shard in self.shards])
        pieces = flat.split([w.numel() for w in self.weights])
        with torch.no_grad():
            for weight, piece in zip(self.weights, pieces, strict=True):
                weight.copy_(piece.view_as(weight))

    def states(self) -> list[dict[str, Any]]:
        """What each rank has: its piece of the weights, its optimizer, the step."""
        return [
            {
                "param_shard": shard.detach(),
                "optimizer": optimizer.state_dict(),
                "step": self.step,
            }
            for shard, optimizer in zip(self.shards, self.optimizers, strict=True)
        ]

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        """Go on from these states, one for each rank."""
        with torch.no_grad():
            for shard, optimizer, state in zip(
                self.shards, self.optimizers, states, strict=True
            ):
                shard.copy_(state["param_shard"])
                optimizer.load_state_dict(state["optimizer"])
        self.step = states[0]["step"]
        self._gather()


@lru_cache(maxsize=8)
def uninterrupted(seed: int, ranks: int, steps: int) -> ShardedRun:
    """The run that nothing happens to."""
    run = ShardedRun(seed, ranks)
    run.train(steps)
    return run


def resumed(states: Sequence[dict[str, Any]], seed: int, until: int) -> ShardedRun:
    """Everything made anew, loaded, and trained to step ``until``."""
    run = ShardedRun(seed, len(states))
    run.load(states)
    run.train(until - run.step)
    return run


def tensors_of(value: Any, name: str = "") -> dict[str, Tensor]:
    """All tensors in a state, by their place.

    >>> list(tensors_of({"a": torch.ones(1), "b": [{"c": torch.ones(1)}]}))
    ['.a', '.b.0.c']
    """
    if isinstance(value, Tensor):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found: dict[str, Tensor] = {}
    for key, item in items:
        if isinstance(item, dict | list | tuple | Tensor):
            found |= tensors_of(item, f"{name}.{key}")
    return found


def same_bytes(one: Any, other: Any) -> bool:
    """Whether two states have the same tensors at the same places, byte for byte (NaN and -0.0 included)."""
    a, b = tensors_of(one), tensors_of(other)
    return a.keys() == b.keys() and all(
        (a[k].dtype, a[k].shape) == (b[k].dtype, b[k].shape)
        and a[k].numpy().tobytes() == b[k].numpy().tobytes()
        for k in a
    )


def sum_of_file(path: Path) -> str:
    """The sha256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def same_for(one: Sequence[float], other: Sequence[float]) -> int:
    """How many losses are equal before the first that is not (NaN equals nothing).

    >>> same_for([1.0, 2.0, 3.0], [1.0, 2.5, 3.0])
    1
    """
    pairs = zip(one, other, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(one))


# --- a partial shard behind a manifest ------------------------------------------------------------------------


def raw_bytes(state: dict[str, Any]) -> bytes:
    """A rank's weights and its two moments, one after the other, as plain float32."""
    moments = state["optimizer"]["state"][0]
    return b"".join(
        tensor.numpy().tobytes()
        for tensor in (state["param_shard"], moments["exp_avg"], moments["exp_avg_sq"])
    )


def from_numbers(numbers: Sequence[Tensor], step: int) -> list[dict[str, Any]]:
    """States of all ranks from what ``raw_bytes`` holds, as tensors of 3 x n numbers."""
    groups = ShardedRun(0, len(numbers)).optimizers[0].state_dict()["param_groups"]
    states = []
    for three in numbers:
        weights, mean, square = three.view(3, -1)
        moments = {"step": torch.tensor(float(step)), "exp_avg": mean, "exp_avg_sq": square}
        optimizer = {"state": {0: moments}, "param_groups": groups}
        states.append({"param_shard": weights, "optimizer": optimizer, "step": step})
    return states


@contextlib.contextmanager
def visible_memory() -> Iterator[None]:
    """Fresh memory holds NaN in here, as torch fills it in its deterministic mode."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def rare_rows() -> int:
    """Rows of the token embedding in the last ``CUT`` bytes of the last shard.

    >>> rare_rows()
    8
    """
    return CUT // (4 * WIDTH)


def first_rare_step(seed: int, after: int, at_most: int) -> int | None:
    """The first step after ``after`` whose batch holds one of the tokens in the rows that are missing."""
    rare = vocabulary() - rare_rows()
    steps = range(after + 1, after + at_most + 1)
    return next((n for n in steps if bool((batch_of(n, seed)[0] >= rare).any())), None)


def nan_figure(whole: Sequence[float], late: Sequence[float], resumed_at: int) -> Figure:
    """The loss of the run and of the one resumed from the partial shard, to the step at which it is NaN."""
    nan_at = resumed_at + len(late)
    fig, ax = draw(
        "Resumed from a partial shard: the same losses, and then NaN", "step", "loss (nats)"
    )
    steps = range(1, len(whole) + 1)
    ax.plot(steps, whole, color="#999999", linewidth=4, label="never interrupted")
    ax.plot(
        range(resumed_at + 1, nan_at),
        late[:-1],
        **{**style(1), "marker": ""},
        label="resumed from the partial shard",
    )
    ax.axvline(resumed_at + 0.5, color="#000000", linewidth=0.8, linestyle=":")
    ax.axvline(nan_at, color="#000000", linewidth=1.2)
    ax.annotate(
        f"NaN, {nan_at - resumed_at} steps\nafter the resume",
        (nan_at, max(whole)),
        xytext=(-6, 0),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=9,
    )
    ax.annotate(
        "resume",
        (resumed_at + 0.5, min(whole)),
        xytext=(4, 0),
        textcoords="offset points",
        fontsize=9,
    )
    ax.legend(frameon=False, loc="upper center")
    return fig


# --- killed between two renames -------------------------------------------------------------------------------


def publish_in_place(states: Sequence[dict[str, Any]], folder: Path, step: int) -> None:
    """A save that is careful, and not careful enough: .tmp, fsync, rename, manifest last, under the old names."""
    folder.mkdir(parents=True, exist_ok=True)
    shards, offset = [], 0
    for rank, state in enumerate(states):
        path, numel = folder / f"rank{rank}.bin", state["param_shard"].numel()
        payload = {"schema": SHARD_SCHEMA, "rank": rank, "step": step, "state": state}
        with open(f"{path}.tmp", "wb") as file:
            torch.save(payload, file)
            file.flush()
            os.fsync(file.fileno())
        written = Path(f"{path}.tmp")
        shards.append(
            Shard(
                rank,
                path.name,
                sum_of_file(written),
                written.stat().st_size,
                offset,
                numel,
            )
        )
        offset += numel
    manifest = ShardManifest(SHARD_SCHEMA, len(shards), step, 0.0, tuple(shards))
    with open(folder / f"{MANIFEST}.tmp", "wb") as file:
        file.write(json.dumps(manifest.to_json()).encode())
        file.flush()
        os.fsync(file.fileno())
    for name in [*(shard.path for shard in shards), MANIFEST]:
        os.replace(folder / f"{name}.tmp", folder / name)  # one after the other


def killed(worker: Callable[..., Any], *args: Any) -> str:
    """Run ``worker`` in a process of its own, which has to end by a kill; what ``launch`` says of that.

    Raises:
        RuntimeError: it ended otherwise.
    """
    try:
        launch(worker, 1, *args, timeout_s=60)
    except RankFailed as error:
        if error.kind == "killed":
            return str(error).partition(";")[0]
        raise RuntimeError(f"the process was to be killed, but: {error}") from error
    raise RuntimeError("the process was to be killed, and ended by itself")


@dataclass(frozen=True)
class Left:
    """What is in a folder after a kill: the step that loads, or the reason; the manifest's step, and each file's."""

    step: int | None
    reason: str
    told: int
    steps: list[int]

    @property
    def mixed(self) -> bool:
        """Whether manifest and files, as a loader without sums takes them, are from more than one step."""
        return len({self.told, *self.steps}) > 1


def left_in(folder: Path) -> Left:
    """Load ``folder`` with all its checks, and once more with none."""
    told = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    names = [shard["path"] for shard in told["shards"]]
    steps = [torch.load(folder / name, weights_only=True)["step"] for name in names]
    try:
        return Left(load_sharded(folder, len(names))[0].step, "", told["step"], steps)
    except CheckpointError as error:
        return Left(None, said(error), told["step"], steps)


def after_each_rename(
    how: str, old: Path, new: Path, scratch: Path, ranks: int
) -> list[Left]:
    """A folder with the checkpoint ``old`` gets that of ``new``, and the process is killed after 0, 1, ... renames.

    Args:
        how: ``in place`` or ``save_sharded``. scratch: a folder of its own for each kill is made in it.
    """
    from . import sharded_worker

    found = []
    for renames in range(ranks + 2):
        folder = scratch / f"{how.replace(' ', '_')}_{renames}"
        shutil.copytree(old, folder)
        killed(sharded_worker.save_and_die, how, str(new), str(folder), renames)
        found.append(left_in(folder))
    return found


def rename_figure(kills: dict[str, list[Left]], old: int, new: int) -> Figure:
    """For each number of renames before the kill: what loads, for a loader without sums and with them."""
    from matplotlib.patches import Rectangle

    naive, ours = kills["in place"], kills["save_sharded"]
    rows = {
        "in place,\nno sums": [_mix(left) for left in naive],
        "in place,\nsha256": [_what(left) for left in naive],
        "save_sharded": [_what(left) for left in ours],
    }
    fig, ax = draw(
        f"Step {new} saved over step {old}, and killed in between: what loads then?",
        "renames done before the kill (the last one is the manifest's)",
        "",
        height=3.2,
    )
    ax.grid(False)
    for row, boxes in enumerate(rows.values()):
        for column, (text, good) in enumerate(boxes):
            ax.add_patch(
                Rectangle(
                    (column + 0.03, row + 0.08),
                    0.94,
                    0.84,
                    facecolor="#CFE6F5" if good else "#D55E00",
                    hatch="" if good else "//",
                    edgecolor=STYLES[0]["color"] if good else "#FFFFFF",
                )
            )
            ax.text(
                column + 0.5,
                row + 0.5,
                text,
                ha="center",
                va="center",
                fontsize=8.5 if len(naive) <= 6 else 6.5,
                bbox={"facecolor": "#FFFFFF", "edgecolor": "none", "pad": 1.5},
            )
    ax.set_xlim(0, len(naive))
    ax.set_ylim(len(rows), 0)
    ax.set_xticks([i + 0.5 for i in range(len(naive))], [str(i) for i in range(len(naive))])
    ax.set_yticks([i + 0.5 for i in range(len(rows))], list(rows))
    ax.tick_params(length=0)
    return fig


def _mix(left: Left) -> tuple[str, bool]:
    counts = {step: left.steps.count(step) for step in sorted(set(left.steps))}
    if not left.mixed:
        return f"step {left.told}", True
    if len(counts) == 1:
        return f"all of step {left.steps[0]},\nmanifest: {left.told}", False
    return "\n".join(f"{n} of step {step}" for step, n in counts.items()), False


def _what(left: Left) -> tuple[str, bool]:
    return ("nothing", False) if left.step is None else (f"step {left.step}", True)


# --- broken on purpose ----------------------------------------------------------------------------------------


def edited(folder: Path, **changes: Any) -> None:
    """Write these fields into the manifest of ``folder``, as somebody with an editor would."""
    path = folder / MANIFEST
    told = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    path.write_text(json.dumps(told), encoding="utf-8")


def truncate(path: Path, missing: int) -> None:
    """Cut ``missing`` bytes off a file's end."""
    os.truncate(path, path.stat().st_size - missing)


def flip(path: Path, at: int) -> None:
    """Turn over one bit of the byte ``at`` of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def swap(one: Path, other: Path) -> None:
    """Give each of two files the other's name."""
    between = one.with_name("between")
    os.replace(one, between)
    os.replace(other, one)
    os.replace(between, other)


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# --- how long -------------------------------------------------------------------------------------------------


def bytes_per_rank(params: float, ranks: int) -> float:
    """Bytes of FP32 weights and two moments in each rank's file: 12 P / N.

    >>> bytes_per_rank(1e9, 4)
    3000000000.0
    """
    return 12 * params / ranks


def write_seconds(
    params: float, ranks: int, link_gb_s: float, storage_gb_s: float
) -> float:
    """Seconds to write 12 P bytes: the ranks' links add up, to what the storage behind them takes in.

    >>> write_seconds(1.2e12, 1, 1, 100) / 3600, write_seconds(1.2e12, 64, 1, 100) / 60
    (4.0, 3.75)
    """
    return 12 * params / (1e9 * min(ranks * link_gb_s, storage_gb_s))


def span(seconds: float) -> str:
    """Seconds in words.

    >>> span(225), span(14400), span(12), span(0.25)
    ('3.8 min', '4 h', '12 s', '0.25 s')
    """
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds:.2g} s"


def write_figure(
    params: float, ranks: int, link_gb_s: float, storage_gb_s: float
) -> Figure:
    """Minutes to write a checkpoint over the number of ranks that write."""
    fig, ax = draw(
        "One file per rank: bandwidth adds up, to what the storage takes",
        "ranks that write (log scale)",
        "time of one save (min, log scale)",
    )
    grid = [2**i for i in range(11)]
    minutes = [write_seconds(params, n, link_gb_s, storage_gb_s) / 60 for n in grid]
    ax.plot(grid, minutes, **style(0), label="one file per rank")
    alone = minutes[0]
    ax.plot(
        grid, [alone] * len(grid), **{**style(1), "marker": ""}, label="rank 0 writes all"
    )
    here = write_seconds(params, ranks, link_gb_s, storage_gb_s) / 60
    ax.plot([ranks], [here], color="#000000", marker="o", markersize=7, linestyle="none")
    ax.annotate(
        f"{ranks} ranks: {span(60 * here)}",
        (ranks, here),
        xytext=(8, 8),
        textcoords="offset points",
        fontsize=9,
    )
    ax.set_xscale("log", base=2)
    ax.set_xticks(grid, [str(n) for n in grid])
    log_scale(ax)
    ax.legend(frameon=False, loc="lower left")
    return fig


def write_picture(
    params: float, ranks: int, link_gb_s: float, storage_gb_s: float
) -> tuple[Figure, str]:
    """The figure of the control, and its text: bytes in each file, and the time of a save."""
    fig = write_figure(params, ranks, link_gb_s, storage_gb_s)
    size = bytes_per_rank(params, ranks) / 1e9
    seconds = write_seconds(params, ranks, link_gb_s, storage_gb_s)
    full = ranks * link_gb_s > storage_gb_s
    fig.axes[0].set_title(
        f"{ranks} files of {size:,.3g} GB: {span(seconds)}"
        + (", and the storage is what limits" if full else ""),
        fontsize=11,
        loc="left",
    )
    return fig, (
        f"Time of one save over the number of ranks that write: {ranks} files of {size:,.3g} GB take {span(seconds)}, "
        f"against {span(write_seconds(params, 1, link_gb_s, storage_gb_s))} for one rank."
    )

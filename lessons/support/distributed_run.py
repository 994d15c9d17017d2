"""The plan of lesson 08, what its ranks hand back, and the numbers and pictures made of it."""

from __future__ import annotations

import csv
import math
import os
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetrain_core import CHECKPOINT_STEP, MiniGPT, MiniGPTConfig, StepLog, TrainConfig
from safetrain_core.checkpoint.dcp_files import DcpManifest
from safetrain_core.corpus import default_corpus_files, read_text
from safetrain_core.train.ranks import RankFacts
from safetrain_core.train.worker import Job, Report

from .figures import STYLES, draw, log_scale, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: FP32 weight and AdamW's two moments of a parameter, in bytes.
BYTES = 12

#: The rank that meets the fault, and the step in which it does.
FAULTY, BAD = 1, 3

#: Steps of the experiments beside the run; rows of a batch; learning rate; micro-batches of a window.
SHORT, LONG, ROWS, LR, ACCUM = 6, 12, 8, 3e-3, 2

#: Every character of the lesson's text: 96, so that all dimensions of the model divide by 2, 4 and 8.
CHARACTERS = string.printable[:95] + "\n"
SIZE = MiniGPTConfig(len(CHARACTERS), context=32, layers=2, heads=4, width=32, dropout=0.1)

#: Rows of a weight that four ranks do not divide.
UNEVEN = 10

#: Ways to keep random states.
ONE_STATE, OWN_STATES = "one state, loaded by all", "each rank's own"

#: Ways to take an update, and the kinds of messages that are counted in it.
EVERY, LAST, GUARDED = "sync on every one", "sync on the last", "AmpTrainState"
WAYS = (EVERY, LAST, GUARDED)
KINDS = ("all-gather", "reduce-scatter", "all-reduce")


def write_text(path: Path) -> Path:
    """A text of ``CHARACTERS`` and no others, from a few modules of Python's standard library."""
    text = "\n".join(read_text(file) for file in default_corpus_files()[:8])
    kept = "".join(c for c in text if c in CHARACTERS)[:240_000]
    path.write_text(CHARACTERS + kept, encoding="utf-8")
    return path


@dataclass(frozen=True)
class Plan:
    """What all ranks are to do; plain values, so that it can be sent to them.

    Args:
        steps: optimizer updates of the run. at: the update after which it is saved. out: an empty folder.
        bound_s: how long a naive rank waits for one that has gone.
    """

    ranks: int
    steps: int
    seed: int
    out: Path
    corpus: Path
    bound_s: float = 5.0

    @property
    def at(self) -> int:
        """Step of the checkpoint: ``CHECKPOINT_STEP``, or half-way through a run too short for that."""
        return CHECKPOINT_STEP if self.steps > CHECKPOINT_STEP else self.steps // 2

    @property
    def job(self) -> Job:
        """The end-to-end run."""
        config = TrainConfig(
            batch_size=ROWS,
            gradient_accumulation_steps=ACCUM,
            max_steps=self.steps,
            learning_rate=LR,
            checkpoint_every_n_steps=self.at,
            max_rolling_checkpoints=self.steps,
            seed=self.seed,
        )
        out = self.out / "run"
        return Job(config, SIZE, out, [str(self.corpus)], quiet=True, witness=True)

    @property
    def checkpoint(self) -> Path:
        return self.out / "run" / f"step_{self.at:08d}"


def sizes(ranks: int) -> list[int]:
    """1, 2, 4, ... and the other numbers of ranks that divide ``ranks``.

    >>> sizes(4), sizes(6)
    ([1, 2, 4], [1, 2, 3, 6])
    """
    return [n for n in range(1, ranks + 1) if ranks % n == 0]


# --- what a rank hands back -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Left:
    """Leaving out the backward: the steps whose gradients this rank shared, and the one in which it waited in vain.

    ``ended_in``: the text of the error by which that wait ended.
    """

    shared: list[int]
    stuck_in: int | None
    ended_in: str


@dataclass(frozen=True)
class Alone:
    """Each rank judging alone.

    Args:
        away: distance to rank 0's weights after each step, as a share of their length. losses: this rank's own.
        norm: of its weights at the end. updates, updates_sharded: taken under DDP, under FSDP2.
    """

    away: list[float]
    losses: list[float]
    norm: float
    updates: int
    updates_sharded: int


@dataclass(frozen=True)
class Resumed:
    """Mean losses of the uninterrupted run and of the resumed one; whether this rank got its own random state back."""

    whole: list[float]
    again: list[float]
    own_state: bool


@dataclass(frozen=True)
class Broken:
    """What one rank found in the first launch."""

    left: Left
    alone: Alone
    maxima: list[float]
    resumed: dict[str, Resumed]
    uneven: RankFacts


@dataclass(frozen=True)
class Whole:
    """What one rank found in the second launch.

    Args:
        agreements: (the ranks' codes, what the hand version agrees on, what the package does).
        codes: of the hand version's steps. rows: of the package's. untouched: by its SKIP. gap: largest, of a weight.
        messages: in an update, by kind, for each of ``WAYS``. shares: by number of ranks. report: of the run.
    """

    agreements: list[tuple[list[int], int, int]]
    codes: list[int]
    rows: list[StepLog]
    untouched: bool
    gap: float
    messages: dict[str, dict[str, int]]
    shares: dict[int, RankFacts]
    report: Report


# --- pure numbers ---------------------------------------------------------------------------------------------


def rows_held(rows: int, ranks: int) -> list[int]:
    """Rows of a weight on each rank, as FSDP2 cuts it: ceil(rows / ranks) each, until there are no more.

    >>> rows_held(96, 4), rows_held(10, 4), rows_held(3, 4)
    ([24, 24, 24, 24], [3, 3, 3, 1], [1, 1, 1, 0])
    """
    most = math.ceil(rows / ranks)
    return [max(0, min(most, rows - most * rank)) for rank in range(ranks)]


def shares_by_rule(ranks: int) -> list[int]:
    """Bytes of weights and moments of the lesson's model on each rank, each weight cut by its rows.

    >>> sum(shares_by_rule(3)) == sum(shares_by_rule(1)), set(shares_by_rule(4))
    (True, {87936})
    """
    weights = [weight.shape for weight in MiniGPT(SIZE).parameters()]
    held = [
        [rows * math.prod(rest) for rows in rows_held(first, ranks)]
        for first, *rest in weights
    ]
    return [BYTES * sum(numbers) for numbers in zip(*held, strict=True)]


def bytes_per_rank(parameters: float, ranks: int) -> float:
    """12 P / N: FP32 weights and AdamW's two moments, in bytes on each of N ranks.

    >>> bytes_per_rank(7e9, 8) / 1e9
    10.5
    """
    return BYTES * parameters / ranks


def largest_gap(one: Sequence[float], other: Sequence[float]) -> float:
    return max((abs(a - b) for a, b in zip(one, other, strict=True)), default=0.0)


def losses_of(report: Report) -> dict[int, float]:
    """Step -> loss."""
    return {row.step: row.loss for row in report.result.rows if row.loss is not None}


def logged_column(path: Path, name: str) -> list[str]:
    """One column of a run's log, as text."""
    with path.open(newline="", encoding="utf-8") as file:
        return [row[name] for row in csv.DictReader(file)]


def without_names(text: str, folder: Path, manifest: DcpManifest) -> str:
    """``text`` with what differs from run to run left out: the folder, the nonce, the sums."""
    nonce = manifest.part.removeprefix("dcp.")
    text = text.replace(f"{folder}{os.sep}", "").replace(nonce, "<nonce>")
    return re.sub(r"\b[0-9a-f]{12,64}\b", "<digits>", text)


def flip_one_bit(path: Path) -> None:
    """Turn over one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# --- pictures -------------------------------------------------------------------------------------------------


def drift_figure(away: list[list[float]]) -> Figure:
    """Distance of each rank's weights from rank 0's, after each step."""
    fig, ax = draw(
        f"One rank skips step {BAD} alone, and is another model from then on",
        "step", "distance from rank 0's weights, %",
    )  # fmt: skip
    steps = range(1, len(away[0]) + 1)
    for index, rank in enumerate([FAULTY, 0]):
        name = f"rank {rank}" if rank == FAULTY or len(away) == 2 else "all other ranks"
        ax.plot(steps, [100 * d for d in away[rank]], label=name, **style(index))
    ax.axvline(BAD, color="#777777", linestyle=":", linewidth=1)
    ax.annotate(
        " its loss is NaN",
        (BAD, 1),
        xycoords=("data", "axes fraction"),
        va="top",
        fontsize=9,
    )
    ax.legend(frameon=False)
    return fig


def random_figure(resumed: dict[str, Resumed], at: int) -> Figure:
    """How far the resumed runs' losses are from the uninterrupted one's."""
    fig, ax = draw(
        "With one random state for all ranks, the resumed run is another run",
        "step", "|loss - uninterrupted loss|",
    )  # fmt: skip
    for index, (label, run) in enumerate(resumed.items()):
        steps = range(at + 1, len(run.whole) + 1)
        gaps = [abs(a - b) for a, b in zip(run.again, run.whole[at:], strict=True)]
        ax.plot(steps, gaps, label=label, **style(index))
    ax.axvline(at, color="#777777", linestyle=":", linewidth=1)
    ax.annotate(
        " checkpoint", (at, 1), xycoords=("data", "axes fraction"), va="top", fontsize=9
    )
    ax.set_xlim(0, len(run.whole) + 1)
    ax.legend(frameon=False)
    return fig


def loss_figure(first: Report, second: Report, at: int) -> Figure:
    """The uninterrupted run's losses, and those of the second launch on top."""
    fig, ax = draw("Two launches, one run", "step", "loss, nats per character")
    whole, again = losses_of(first), losses_of(second)
    ax.plot(
        list(whole),
        list(whole.values()),
        color="#BBBBBB",
        linewidth=6,
        label="first launch",
    )
    ax.plot(list(again), list(again.values()), label="second launch, resumed", **style(0))
    ax.axvline(at, color="#777777", linestyle=":", linewidth=1)
    ax.annotate(
        " checkpoint", (at, 1), xycoords=("data", "axes fraction"), va="top", fontsize=9
    )
    ax.legend(frameon=False)
    return fig


def memory_figure(shares: dict[int, list[RankFacts]]) -> Figure:
    """Bytes of weights and moments on each rank, for each number of ranks, beside 12 P / N."""
    fig, ax = draw(
        "N ranks hold 12 P / N bytes each",
        "ranks that share the model, N",
        "bytes on one rank, kB",
    )
    names, start = [], 0.0
    for ranks, facts in shares.items():
        places = [start + i for i in range(ranks)]
        weights = [fact.weight_bytes / 1e3 for fact in facts[:ranks]]
        moments = [fact.optimizer_bytes / 1e3 for fact in facts[:ranks]]
        first = ranks == 1
        ax.bar(
            places, weights, 0.8, color="#0072B2", label="FP32 weights" if first else None
        )
        ax.bar(
            places, moments, 0.8, bottom=weights, color="#FFFFFF", edgecolor="#0072B2",
            hatch="///", label="two moments" if first else None,
        )  # fmt: skip
        ideal = bytes_per_rank(facts[0].parameters, ranks) / 1e3
        ends = (places[0] - 0.6, places[-1] + 0.6)
        ax.plot(
            ends,
            [ideal, ideal],
            color="#D55E00",
            linewidth=2,
            label="12 P / N" if first else None,
        )
        names.append((sum(places) / ranks, f"N = {ranks}"))
        start += ranks + 1.5
    ax.set_xticks([place for place, _ in names], [name for _, name in names])
    ax.legend(frameon=False)
    return fig


#: What one accelerator has, in GB.
CAPACITY_GB = 80


def plan_picture(
    parameters: float, ranks: int, micro_batch: int, accum_steps: int
) -> tuple[Figure, str]:
    """12 P / N over N for a model of ``parameters``, with the chosen N marked, and the effective batch."""
    each = bytes_per_rank(parameters, ranks) / 1e9
    batch = micro_batch * accum_steps * ranks
    size = f"{parameters / 1e9:g} B"
    fig, ax = draw(
        f"{size} weights on {ranks} ranks: {each:.3g} GB on each; "
        f"one update = {micro_batch} x {accum_steps} x {ranks} = {batch:,} rows",
        "ranks N", "GB on one rank",
    )  # fmt: skip
    ax.title.set_fontsize(10)
    counts = [2**i for i in range(11)]
    ax.plot(
        counts,
        [bytes_per_rank(parameters, n) / 1e9 for n in counts],
        label="12 P / N",
        **style(0),
    )
    ax.axhline(
        CAPACITY_GB, label=f"a device of {CAPACITY_GB} GB", **{**style(1), "marker": ""}
    )
    ax.plot(
        [ranks], [each], marker="o", markersize=12, markerfacecolor="none", markeredgewidth=2,
        color=STYLES[3]["color"], linestyle="none", label=f"N = {ranks}",
    )  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    log_scale(ax)
    ax.legend(frameon=False)
    fits = "fits" if each < CAPACITY_GB else "does not fit"
    return fig, (
        f"A line of 12 P / N bytes over N from 1 to 1024. {size} weights on {ranks} ranks need {each:.3g} GB on each, "
        f"which {fits} a device of {CAPACITY_GB} GB; an update takes {batch:,} rows."
    )


def manifest_rows(manifest: DcpManifest) -> list[list[Any]]:
    """What each file of a verified DCP checkpoint is: name without its nonce, what is in it, bytes, its sum's digits."""
    rows = []
    for file in sorted(manifest.files, key=lambda file: file.path):
        inside = "DCP's index" if file.path == ".metadata" else "its share of each tensor"
        rows.append([f"dcp.<nonce>/{file.path}", inside, file.size_bytes, len(file.sha256)])
    for number, file in enumerate(manifest.ranks):
        inside = "random state, data position" + (", what all share" if number == 0 else "")
        rows.append(
            [f"rank{number}.<nonce>.bin", inside, file.size_bytes, len(file.sha256)]
        )
    return rows

"""The experiments of lesson 03 as functions of their knobs: runs that end early, files that are torn, calls that count."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import logging
import math
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from safetrain_core import (
    Checkpoints,
    SafeTrainer,
    TrainConfig,
    atomic_save,
    capture_rng_state,
    restore_rng_state,
)
from safetrain_core.optim.schedule import make_schedule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from . import toy
from .figures import STYLES, draw, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Samples of the data set, rows of a batch, and so batches of an epoch.
SAMPLES, ROWS = 32, 4
PER_EPOCH = SAMPLES // ROWS
LR = 0.02
BUCKETS = ("model", "optimizer", "scheduler", "counters", "rng")
#: Updates between two checkpoints of the trainer that is killed.
SAVE_EVERY = 5
#: Numbers in the payload of the process that is killed in mid-save: a megabyte of float32.
SAVED_NUMBERS = 250_000


def said(error: BaseException) -> str:
    """An error's text, first line, with file names in place of whole paths.

    >>> said(ValueError("/some/where/a.pt is torn"))
    'a.pt is torn'
    """
    first = (str(error).splitlines() or [""])[0]
    return re.sub(r"\S*[/\\](?=[^/\\\s]+\.pt)", "", first)


# --- a run that can be put down and taken up ------------------------------------------------------------------


def small_model() -> nn.Sequential:
    """16 inputs, 32 hidden units with dropout, one output."""
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 1))


class Run:
    """A small training run: AdamW, cosine, dropout, a shuffled loader, inputs jittered by Python's and NumPy's dice.

    ``counters`` has the step and the data position, ``epoch_start`` the random states that the epoch began with. What a
    run has done is in ``losses`` and ``seen`` (sample numbers, one list per step), and ``curve`` is the loss over all
    the data after each step, without dropout.

    >>> run = Run()
    >>> run.train(10)
    >>> run.counters, len(run.losses)
    ({'step': 10, 'epoch': 1, 'batch_in_epoch': 2}, 10)
    """

    def __init__(self, seed: int = 0, total_steps: int = 24) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.model = small_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR)
        self.scheduler = make_schedule(self.optimizer, "cosine", total_steps=total_steps)
        self.x, self.y = next(toy.sensor_batches(1, seed))
        data = TensorDataset(self.x, self.y, torch.arange(SAMPLES))
        self.loader = DataLoader(data, batch_size=ROWS, shuffle=True)
        self.counters = {"step": 0, "epoch": 0, "batch_in_epoch": 0}
        self.epoch_start: dict[str, Any] | None = None
        self.losses: list[float] = []
        self.curve: list[float] = []
        self.seen: list[list[int]] = []

    def batches(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Batches without end, from where the counters stand."""
        while True:
            for batch in self._epoch():
                self.counters["batch_in_epoch"] += 1
                yield batch
            self.counters["epoch"] += 1
            self.counters["batch_in_epoch"] = 0
            self.epoch_start = None

    def _epoch(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        now, began = capture_rng_state(), self.epoch_start
        if began is None:
            self.epoch_start = now
            batches = iter(self.loader)
            behind = self.counters["batch_in_epoch"]
            return itertools.islice(batches, behind, None)
        restore_rng_state(began)  # shuffle as this epoch was shuffled
        batches = iter(self.loader)
        for _ in range(self.counters["batch_in_epoch"]):
            next(batches)
        restore_rng_state(now)
        return batches

    def train(self, steps: int) -> None:
        """Take ``steps`` more steps."""
        for x, y, ids in itertools.islice(self.batches(), steps):
            x = x * random.uniform(0.9, 1.1)
            x = x + torch.from_numpy(np.random.normal(0, 0.05, x.shape)).float()
            loss = F.mse_loss(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.counters["step"] += 1
            self.losses.append(loss.item())
            self.seen.append(ids.tolist())
            self.curve.append(self.whole_loss())

    def whole_loss(self) -> float:
        """Loss over all the data, without dropout and jitter."""
        self.model.eval()
        with torch.no_grad():
            loss = F.mse_loss(self.model(self.x), self.y).item()
        self.model.train()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The data position, apart from its counters."""
        return {"epoch_start": self.epoch_start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""
        self.epoch_start = state["epoch_start"]


def packed(run: Run) -> dict[str, Any]:
    """The five buckets of a run, as they come back from a file."""
    payload = {
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "scheduler": run.scheduler.state_dict(),
        "counters": run.counters,
        "rng": {"now": capture_rng_state(), "epoch_start": run.epoch_start},
    }
    file = io.BytesIO()
    torch.save(payload, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def unpacked(run: Run, saved: dict[str, Any]) -> None:
    """Put the buckets that are there into ``run``."""
    for name in ("model", "optimizer", "scheduler"):
        if name in saved:
            getattr(run, name).load_state_dict(saved[name])
    run.counters.update(saved.get("counters", {}))
    if "rng" in saved:
        run.epoch_start = saved["rng"]["epoch_start"]
        restore_rng_state(saved["rng"]["now"])


@lru_cache(maxsize=8)
def uninterrupted(seed: int = 0, total_steps: int = 24) -> Run:
    """The run that nothing happens to."""
    run = Run(seed, total_steps)
    run.train(total_steps)
    return run


def resumed(
    seed: int = 0,
    total_steps: int = 24,
    interrupt_at: int = 10,
    without: str | None = None,
    *,
    pack: Callable[[Run], Any] = packed,
    unpack: Callable[[Run, Any], None] = unpacked,
) -> Run:
    """Train to ``interrupt_at``; make everything anew, as a new process does; load; train the rest.

    Args:
        without: a bucket that is left out of the checkpoint.
        pack, unpack: other ways to save and load.
    """
    first = Run(seed, total_steps)
    first.train(interrupt_at)
    saved = pack(first)
    if without is not None:
        del saved[without]
    second = Run(seed, total_steps)
    unpack(second, saved)
    second.losses, second.curve, second.seen = (
        list(done) for done in (first.losses, first.curve, first.seen)
    )
    second.train(total_steps - interrupt_at)
    return second


def saving(without: str | None = None) -> Callable[[Run, Path], None]:
    """A function that saves a run as ``packed``, for a probe; ``without`` is a bucket that it leaves out."""

    def save(run: Run, path: Path) -> None:
        payload = packed(run)
        torch.save({name: part for name, part in payload.items() if name != without}, path)

    return save


def loading(run: Run, path: Path) -> None:
    """Load what ``saving`` wrote."""
    unpacked(run, torch.load(path, weights_only=True))


def next_step(run: Run) -> float:
    """One more step; its loss."""
    run.train(1)
    return run.losses[-1]


def first_difference(one: Sequence[float], other: Sequence[float]) -> int | None:
    """The first step, from 1, whose losses differ; None where all are the same.

    >>> first_difference([1.0, 2.0, 3.0], [1.0, 2.5, 3.0])
    2
    """
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=True), start=1) if a != b),
        None,
    )


def largest_difference(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference between two runs' losses; infinite where one of them is not finite."""
    gaps = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return max(gaps) if all(map(math.isfinite, gaps)) else math.inf


def epoch_around(step: int) -> slice:
    """The steps, from 0, of the epoch that holds the step after ``step``.

    >>> epoch_around(10)
    slice(8, 16, None)
    """
    start = step // PER_EPOCH * PER_EPOCH
    return slice(start, start + PER_EPOCH)


def sample_counts(seen: Sequence[Sequence[int]]) -> list[int]:
    """How often each of the samples was seen.

    >>> sample_counts([[0, 1], [1, 31]])[:3]
    [1, 2, 0]
    """
    flat = [number for batch in seen for number in batch]
    return [flat.count(number) for number in range(SAMPLES)]


def buckets_figure(whole: Run, runs: dict[str, Run], interrupt_at: int) -> Figure:
    """A panel per run: the loss over all the data beside the uninterrupted run's."""
    from matplotlib.figure import Figure

    fig = Figure(figsize=(7.2, 4.4), layout="constrained")
    panels = fig.subplots(2, 3, sharex=True, sharey=True).flatten()
    steps = range(1, len(whole.curve) + 1)
    for ax, (label, run) in zip(panels, runs.items(), strict=True):
        ax.plot(steps, whole.curve, color="#999999", linewidth=3, label="never interrupted")
        ax.plot(steps, run.curve, **{**style(1), "markersize": 3}, label="resumed")
        ax.axvline(interrupt_at + 0.5, color="#000000", linewidth=0.8, linestyle=":")
        step = first_difference(whole.losses, run.losses)
        since = "never" if step is None else f"from step {step}"
        ax.set_title(f"{label}: {since}", fontsize=10, loc="left")
        ax.grid(True, color="#DDDDDD", linewidth=0.6)
        ax.set_axisbelow(True)
        ax.xaxis.get_major_locator().set_params(integer=True)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
    fig.suptitle(
        "What is left out, and from which step on the loss differs",
        fontsize=11,
        x=0.01,
        ha="left",
    )
    lines, labels = panels[0].get_legend_handles_labels()
    fig.legend(lines, labels, frameon=False, fontsize=9, ncols=2, loc="upper right")
    fig.supxlabel("step (dotted: the interruption)", fontsize=10)
    fig.supylabel("loss over all samples", fontsize=10)
    return fig


# --- the same through the trainer, in processes of their own --------------------------------------------------


def trainer(
    seed: int,
    total_steps: int,
    folder: str | Path | None,
    *,
    note: Callable[[dict[str, Any]], Any],
    before_step: Callable[[int, nn.Module], None] | None = None,
) -> SafeTrainer:
    """A SafeTrainer on the same data, with a checkpoint every ``SAVE_EVERY`` updates.

    Args:
        note: gets, for each attempt, its step, its loss, the numbers of its samples, and the printed row.
    """
    torch.manual_seed(seed)
    model = small_model()
    x, y = next(toy.sensor_batches(1, seed))
    seen: list[list[int]] = []
    model.register_forward_pre_hook(
        lambda module, inputs: seen.append(
            (inputs[0][:, None] == x).all(dim=-1).nonzero()[:, 1].tolist()
        )
    )
    config = TrainConfig(
        batch_size=ROWS,
        max_steps=total_steps,
        learning_rate=LR,
        checkpoint_every_n_steps=SAVE_EVERY,
        seed=seed,
    )
    return SafeTrainer(
        model,
        config,
        DataLoader(TensorDataset(x, y), batch_size=ROWS, shuffle=True),
        on_row=lambda row: note(
            {"step": row.step, "loss": row.loss, "seen": seen[-1], "row": str(row)}
        ),
        before_step=before_step,
        checkpoint_dir=folder,
    )


@dataclass(frozen=True)
class Told:
    """What a process told before it ended: its exit status, its rows."""

    status: int
    rows: list[dict[str, Any]]


def in_a_process(
    seed: int,
    total_steps: int,
    folder: Path,
    *,
    kill_after: int | None = None,
    timeout_s: float = 90,
) -> Told:
    """``trainer`` in a process of its own, from the newest checkpoint in ``folder``.

    Args:
        kill_after: the process begins with an empty folder, and kills itself after this step.

    Raises:
        RuntimeError: it failed otherwise, or took longer than ``timeout_s``.
    """
    if kill_after is not None:
        shutil.rmtree(folder, ignore_errors=True)
    rows = folder.parent / f"{folder.name}-rows-{kill_after}.jsonl"
    spec = {
        "seed": seed, "total_steps": total_steps, "folder": str(folder), "kill_after": kill_after, "rows": str(rows),
    }  # fmt: skip
    process = _start(["train", json.dumps(spec)], rows.with_suffix(".err"))
    status = _wait(process, timeout_s)
    if status != 0 and (kill_after is None or status == 1):
        raise RuntimeError(f"the process ended with status {status}: {_last_line(rows)}")
    lines = rows.read_text(encoding="utf-8").splitlines()
    return Told(status, [json.loads(line) for line in lines])


def _start(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    here = str(Path(__file__).resolve().parent.parent)
    paths = filter(None, [here, os.environ.get("PYTHONPATH")])
    command = [sys.executable, "-m", "support.checkpoint_worker", *arguments]
    quiet = subprocess.DEVNULL
    with log.open("wb") as stderr:
        return subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=quiet,
            stdout=quiet,
            stderr=stderr,
        )


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> int:
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the process did not end within {timeout_s:g} s") from None
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _last_line(rows: Path) -> str:
    lines = rows.with_suffix(".err").read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


# --- killed in mid-save ---------------------------------------------------------------------------------------


def small_payload(step: int) -> dict[str, Any]:
    """Something to save: a step, and a megabyte of weights that tell it."""
    return {
        "schema": "ckpt.v1",
        "state": {"step": step, "updates": step},
        "weight": torch.full((SAVED_NUMBERS,), float(step)),
    }


def killed_in_mid_save(
    hows: Sequence[str], folder: Path, timeout_s: float = 90
) -> dict[str, tuple[Path, int]]:
    """One process per way of saving, each killed in the middle of its second save to the same path.

    Args:
        hows: ``naive`` or ``atomic``, each in a folder of that name.

    Returns:
        For each, the path it saved to, and its exit status.

    Raises:
        RuntimeError: a process ended by itself, or did not come to its second save within ``timeout_s``.
    """
    running = {}
    for how in hows:
        shutil.rmtree(folder / how, ignore_errors=True)
        (folder / how).mkdir(parents=True)
        log = folder / f"{how}.err"
        running[how] = _start(["save", how, str(folder / how)], log)
    deadline = time.monotonic() + timeout_s
    try:
        for how, process in running.items():
            while not (folder / how / "half").exists():
                if process.poll() is not None:
                    told = (folder / f"{how}.err").read_text(errors="replace").strip()
                    raise RuntimeError(f"{how} ended by itself: {told.splitlines()[-1:]}")
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{how} did not save within {timeout_s:g} s")
                time.sleep(0.02)
            process.kill()  # SIGKILL: nothing in the process can see or delay it
    finally:
        for process in running.values():
            if process.poll() is None:
                process.kill()
            process.wait()
    for how in hows:
        (folder / how / "half").unlink()
    return {how: (folder / how / "last.pt", process.returncode) for how, process in running.items()}  # fmt: skip


# --- every state that a crash may leave -----------------------------------------------------------------------

#: A save as its file-system calls, over an older file; the new content is written in two pieces.
OLD, NEW = b"old!", b"new?"
_WRITES = [("write", NEW[:2]), ("write", NEW[2:])]
SAVERS: dict[str, list[tuple[str, bytes]]] = {
    "naive": [("open target", b""), *_WRITES],
    "rename, no fsync": [("open .tmp", b""), *_WRITES, ("rename", b"")],
    "atomic_save": [
        ("open .tmp", b""),
        *_WRITES,
        ("fsync file", b""),
        ("rename", b""),
        ("fsync folder", b""),
    ],
}


def states_after(calls: Sequence[tuple[str, bytes]]) -> set[bytes | None]:
    """What may be at the target's name after a crash that follows these calls.

    Data is certain up to the last fsync of its file; what came later may be kept, lost, or cut in the middle. A new
    name is certain after the fsync of its folder; until then it may be there or not.

    >>> sorted(states_after([("open target", b""), ("write", b"ne")]))
    [b'', b'n', b'ne', b'old!']
    """
    written, certain, renamed, name_certain = b"", 0, False, False
    for call, data in calls:
        if call == "write":
            written += data
        elif call == "fsync file":
            certain = len(written)
        elif call in ("rename", "open target"):
            renamed = True
        elif call == "fsync folder":
            name_certain = True
    if not renamed:
        return {OLD}
    lengths = {certain, (certain + len(written)) // 2, len(written)}
    return {written[:length] for length in lengths} | (set() if name_certain else {OLD})


def survival(name: str) -> list[tuple[str, int, int]]:
    """After each call of a saver: the call, the states a crash may leave at the target, and those that load whole."""
    calls = SAVERS[name]
    table = []
    for end in range(1, len(calls) + 1):
        states = states_after(calls[:end])
        table.append((calls[end - 1][0], len(states), len(states & {OLD, NEW})))
    return table


def crash_figure() -> Figure:
    """Each saver a row, each call a box: in how many of the states after it the target loads."""
    from matplotlib.patches import Rectangle

    fig, ax = draw(
        "A crash after each call: states in which the target loads whole",
        "file-system calls of one save over an older file, in order",
        "",
        height=3.2,
    )
    ax.grid(False)
    for row, name in enumerate(SAVERS):
        for column, (call, states, loads) in enumerate(survival(name)):
            whole = loads == states
            box = Rectangle(
                (column + 0.03, row + 0.08),
                0.94,
                0.84,
                facecolor="#CFE6F5" if whole else "#D55E00",
                hatch="" if whole else "//",
                edgecolor=STYLES[0]["color"] if whole else "#FFFFFF",
            )
            ax.add_patch(box)
            ax.text(
                column + 0.5,
                row + 0.5,
                f"{call}\n{loads} of {states}",
                ha="center",
                va="center",
                fontsize=8.5,
                bbox={"facecolor": "#FFFFFF", "edgecolor": "none", "pad": 1.5},
            )
    ax.set_xlim(0, max(map(len, SAVERS.values())))
    ax.set_ylim(len(SAVERS), 0)
    ax.set_xticks(
        [i + 0.5 for i in range(max(map(len, SAVERS.values())))],
        [str(i + 1) for i in range(max(map(len, SAVERS.values())))],
    )
    ax.set_yticks([row + 0.5 for row in range(len(SAVERS))], list(SAVERS))
    ax.tick_params(length=0)
    return fig


# --- bytes that are not what they were ------------------------------------------------------------------------


def flipped(data: bytes, at: int, bit: int = 0) -> bytes:
    """``data`` with one bit of the byte ``at`` turned over.

    >>> flipped(b"abc", 1)
    b'acc'
    """
    changed = bytearray(data)
    changed[at] ^= 1 << bit
    return bytes(changed)


def spoil_momentum(path: Path, run: Run) -> None:
    """Turn over one bit in ``path``: the top exponent bit of one of the first layer's moments in AdamW."""
    moment = run.optimizer.state[run.model[0].weight]["exp_avg"]
    stored = moment.detach().numpy().astype("<f4").tobytes()
    data = path.read_bytes()
    largest = int(moment.abs().argmax())
    path.write_bytes(flipped(data, data.index(stored) + 4 * largest + 3, bit=6))


def refused(path: Path, data: bytes, look: Callable[[Path], Any]) -> bool:
    """Whether ``look`` raises for a file at ``path`` with this content."""
    path.write_bytes(data)
    try:
        look(path)
    except Exception:  # noqa: BLE001 - a broken archive makes torch raise errors of several kinds
        return True
    return False


# --- rotation -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """What the package logs meanwhile, with file names in place of whole paths."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(said(Warning(record.getMessage())))  # type: ignore[method-assign]
    logger = logging.getLogger("safetrain_core")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def folder_bytes(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.iterdir())


def bytes_while_saving(
    folder: Path, payload: dict[str, Any], saves: int, keep_last: int
) -> list[int]:
    """Bytes in ``folder``, emptied first, after each of ``saves`` rolling saves."""
    shutil.rmtree(folder, ignore_errors=True)
    kept = Checkpoints(folder, keep_last=keep_last)
    sizes = []
    for step in range(1, saves + 1):
        kept.save(payload, step)
        sizes.append(folder_bytes(folder))
    return sizes


# --- how often ------------------------------------------------------------------------------------------------


def youngs_interval(save_s: float, mtbf_s: float) -> float:
    """Seconds between two saves by J. W. Young's rule (1974): sqrt(2 x save x mean time between failures).

    >>> youngs_interval(save_s=2, mtbf_s=3600)
    120.0
    """
    return math.sqrt(2 * save_s * mtbf_s)


def share_lost(interval_s: float, save_s: float, mtbf_s: float) -> float:
    """Young's estimate of the time lost: saving, and half an interval of work at each failure.

    >>> round(share_lost(120, save_s=2, mtbf_s=3600), 4)
    0.0333
    """
    return save_s / interval_s + interval_s / (2 * mtbf_s)


def share_lost_simulated(
    interval_s: float, save_s: float, mtbf_s: float, failures: int = 20_000, seed: int = 0
) -> float:
    """The same from dice: failures at random times; only intervals that were saved before one count as work."""
    times = np.random.default_rng(seed).exponential(mtbf_s, failures)
    kept = np.floor(times / (interval_s + save_s)) * interval_s
    return float(1 - kept.sum() / times.sum())


def _span(seconds: float) -> str:
    """Seconds in words.

    >>> _span(90), _span(7200), _span(12)
    ('1.5 min', '2 h', '12 s')
    """
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def interval_figure(save_s: float, mtbf_s: float) -> Figure:
    """The share of the time lost, over the time between two saves."""
    fig, ax = draw(
        "Too often costs saves, too rarely costs work",
        "time between two saves (min, log scale)",
        "time lost (%)",
    )
    best = youngs_interval(save_s, mtbf_s)
    grid = [best * 2 ** (i / 4) for i in range(-16, 17)]
    lost = [100 * share_lost(t, save_s, mtbf_s) for t in grid]
    minutes = [t / 60 for t in grid]
    ax.plot(minutes, lost, **{**style(0), "marker": ""}, label="lost in all")
    saves = [100 * save_s / t for t in grid]
    work = [100 * t / (2 * mtbf_s) for t in grid]
    ax.plot(minutes, saves, **{**style(1), "marker": ""}, label="by saving")
    ax.plot(minutes, work, **{**style(2), "marker": ""}, label="by work done twice")
    least = 100 * share_lost(best, save_s, mtbf_s)
    ax.plot([best / 60], [least], color="#000000", marker="o", linestyle="none")
    ax.annotate(
        f"Young: every {_span(best)}, {least:.2g} % lost",
        (best / 60, least),
        arrowprops={"arrowstyle": "-", "linewidth": 0.8},
        xytext=(0, 27),
        textcoords="offset points",
        fontsize=9,
        ha="center",
    )
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_ylim(0, 5 * least)
    ax.legend(frameon=False, loc="upper center")
    return fig


def interval_picture(save_s: float, mtbf_s: float, size_gb: float) -> tuple[Figure, str]:
    """The figure of the control, and its text: interval, loss, and what goes to the disk."""
    fig = interval_figure(save_s, mtbf_s)
    best = youngs_interval(save_s, mtbf_s)
    day = size_gb * 86400 / (best + save_s)
    fig.axes[0].set_title(
        f"Save {_span(save_s)}, a failure every {_span(mtbf_s)}: {day:,.0f} GB written a day",
        fontsize=11,
        loc="left",
    )
    return fig, (
        f"Time lost over the time between two saves that take {_span(save_s)}, with a failure every {_span(mtbf_s)} "
        f"on average; the least is at {_span(best)}."
    )


# --- what it costs --------------------------------------------------------------------------------------------


def saved_bytes(part: Any) -> int:
    """Bytes of ``part`` in a file of its own."""
    file = io.BytesIO()
    torch.save(part, file)
    return len(file.getvalue())


def save_seconds(
    folder: Path,
    savers: dict[str, Callable[[Any, Path], Any]],
    payload: Any,
    times: int = 9,
) -> dict[str, float]:
    """Seconds of one save over an older file, for each way: the median; the ways take turns."""
    taken: dict[str, list[float]] = {name: [] for name in savers}
    for turn in range(times + 1):
        for name, save in savers.items():
            start = time.perf_counter()
            save(payload, folder / "timed.pt")
            if turn > 0:
                taken[name].append(time.perf_counter() - start)
    return {name: median(seconds) for name, seconds in taken.items()}


def async_seconds(folder: Path, payload: dict[str, Any], times: int = 9) -> float:
    """Seconds until ``save`` returns where the write goes on beside training: the median."""
    kept = Checkpoints(folder, keep_last=1, async_save=True)
    taken = []
    for step in range(1, times + 1):
        start = time.perf_counter()
        kept.save(payload, step)
        taken.append(time.perf_counter() - start)
        kept.wait()
    return median(taken)


def save_old_layout(run: Run, path: Path) -> None:
    """The run in the layout of ``ckpt.v0``, which had no random states, classes, loader or config."""
    atomic_save(
        {
            "schema": "ckpt.v0",
            "model": run.model.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "scheduler": run.scheduler.state_dict(),
            "state": {**run.counters, "updates": run.counters["step"], "retries": 0, "losses": []},
        },
        path,
    )  # fmt: skip

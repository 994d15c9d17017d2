"""Resume: the curve beside its baseline, and what the schedule does on skips and after a resume."""

from __future__ import annotations

import numpy as np

from .finding import Evidence, Finding
from .log import Log, Series
from .rule import changes, rule, skips

__all__ = ["leaves_baseline", "schedule_moves_on_skips", "schedule_restarts"]

LESSON = "03_checkpoint_resume"

#: Two runs are the same where no loss differs by more than this share: equal bit for bit on a CPU, about 1e-5 on a GPU.
SAME = 1e-4
#: What is compared, in the order in which a difference explains those after it.
COMPARED = ("lr", "scale", "loss", "norm", "val_loss")

#: Fewest skipped steps, inside a part of the schedule that moves, to judge it by.
MOVES_LEAST = 2
#: Share of them after which it moved.
MOVES_SHARE = 0.9

#: A jump of the learning rate back to its start counts where it is at least this share of the highest rate.
JUMP = 0.02
#: A cycle that ends by design ends at its bottom: below this share of its highest rate (or where it is flat).
CYCLE_END = 0.15
#: After a restart the rates are those of the start within this share of the highest rate.
LIKE_START = 0.03
#: Rows after a jump that are compared with the start.
START_ROWS = 20

#: What made a difference, by the column that differed first.
_CAUSES = {
    "lr": "the schedule was not restored (or its length changed): the learning rate differs first",
    "scale": "the GradScaler was not restored: the scaling factor differs first",
    "loss": "the data order or the random numbers (dropout) are others, or the weights are: the generators started "
    "afresh, or the loader began its epoch anew",
    "norm": "the losses agree and the gradients do not: dropout in backward, another batch size, or scaled gradients",
    "val_loss": "the training losses agree and the validation does not: other buffers or another validation set",
}


def leaves_baseline(log: Log, baseline: Log) -> list[Finding]:
    """The first step at which a run is no longer the one that it should repeat.

    Args:
        log: the run, for example a resumed one. baseline: the same run, uninterrupted.

    >>> from .readers import read_log
    >>> base = read_log([{"step": s, "loss": 5 - s / 10} for s in range(1, 9)])
    >>> bent = read_log([{"step": s, "loss": 5 - s / 10 + (s > 4)} for s in range(1, 9)])
    >>> leaves_baseline(bent, base)[0].symptom
    'the run leaves its baseline at step 5'
    """
    first: dict[str, tuple[float, float, float]] = {}
    compared = 0
    for role in COMPARED:
        if role not in log.series or role not in baseline.series:
            continue
        steps, ours, theirs = _common(log.series[role], baseline.series[role])
        compared = max(compared, len(steps))
        known = np.isfinite(ours) & np.isfinite(theirs)
        gap = np.abs(np.where(known, ours, 0) - np.where(known, theirs, 0))
        same = (np.isfinite(ours) == np.isfinite(theirs)) & (gap <= SAME * np.maximum(np.abs(theirs), 1e-12))
        if len(steps) and not same.all():
            at = int(np.argmin(same))
            first[role] = float(steps[at]), float(ours[at]), float(theirs[at])
    if compared == 0:
        raise ValueError(
            f"{log.source} and its baseline {baseline.source} have no step in common with the same thing measured; "
            "name the log of the same run"
        )
    if not first:
        return []
    step = min(place[0] for place in first.values())
    leading = next(role for role in COMPARED if role in first and first[role][0] == step)
    evidence = tuple(
        Evidence(int(place[0]), {role: place[1], "baseline": place[2]})
        for role, place in sorted(first.items(), key=lambda item: (item[1][0], COMPARED.index(item[0])))
    )
    cause = _other_batch_size(log, baseline, step) or _CAUSES[leading]
    if cause == _CAUSES[leading] and leading in ("loss", "norm") and step > log.steps[0]:
        cause += "; or, if this is the second step after the resume, the optimizer's moments were left out"
    return [
        Finding(
            f"the run leaves its baseline at step {int(step)}",
            "leaves_baseline",
            "error",
            evidence,
            cause,
            "save and restore weights, optimizer, schedule, scaler, data position and every random number generator, "
            "the generators last: save_checkpoint and load_checkpoint do",
            LESSON,
        )
    ]


def _other_batch_size(log: Log, baseline: Log, until: float) -> str | None:
    """The cause, where both logs tell how many samples are behind an update, and they differ by then."""
    if not (log.has("batch_size") and baseline.has("batch_size")):
        return None
    steps, ours, theirs = _common(log.series["batch_size"], baseline.series["batch_size"])
    other = np.flatnonzero((steps <= until) & (ours != theirs))
    if not len(other):
        return None
    at = other[0]
    return (
        f"another batch size: {ours[at]:g} samples behind an update at step {steps[at]:g}, {theirs[at]:g} in the "
        "baseline; with another number of ranks, change the micro-batch or the accumulation so that they agree"
    )


def _common(one: Series, other: Series) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps that both measured, and the two values there; the last of each where a step has several."""
    mine = dict(zip(one.steps.tolist(), one.values.tolist(), strict=True))
    theirs = dict(zip(other.steps.tolist(), other.values.tolist(), strict=True))
    steps = sorted(mine.keys() & theirs.keys())
    return np.array(steps), np.array([mine[s] for s in steps]), np.array([theirs[s] for s in steps])


@rule("lr", "skipped|norm+scale")
def schedule_moves_on_skips(log: Log) -> list[Finding]:
    """The learning rate goes on after a step that was skipped, as if it had been taken."""
    lr = log.series["lr"].finite()
    place = np.searchsorted(lr.steps, log.steps[skips(log)])
    held, moved = 0, []
    for at in place.tolist():
        if not 2 <= at < len(lr) - 3 or np.ptp(np.diff(lr.steps[at - 2 : at + 4])) > 0:
            continue
        rates = lr.values[at - 2 : at + 4]
        # Logged before or after the schedule moved: a schedule that waits repeats one of the two.
        waits = rates[2] in (rates[1], rates[3])
        if waits:
            held += 1
        elif len(set(rates.tolist())) == len(rates):  # the schedule moves here in every other step
            moved.append(at)
    if len(moved) < MOVES_LEAST or len(moved) < MOVES_SHARE * (len(moved) + held):
        return []
    return [
        Finding(
            f"the schedule moved on after {len(moved)} skipped steps",
            "schedule_moves_on_skips",
            "warning",
            tuple(
                Evidence(
                    int(lr.steps[at]),
                    {"lr of the skipped step": float(lr.values[at]), "next": float(lr.values[at + 1])},
                )
                for at in moved[:3]
            ),
            "scheduler.step() runs for attempts, not for updates: with a scaler's skips the schedule ends before the "
            "updates that it was made for",
            "step the schedule only where the optimizer stepped (the scaler's factor did not fall in update())",
            LESSON,
        )
    ]


@rule("lr")
def schedule_restarts(log: Log) -> list[Finding]:
    """In the middle of its schedule the learning rate is back at the start, and goes through the start again."""
    lr = log.series["lr"].finite()
    top = float(lr.values.max(initial=0))
    if len(lr) < 6 or top <= 0:
        return []
    jumps = [at for at in changes(lr.values).tolist() if abs(lr.values[at] - lr.values[at - 1]) > JUMP * top]
    # Steps that a schedule takes everywhere (a few rows in all, a fast warm-up) are no jumps.
    restarts = [at for at in jumps[:2000] if _like_start(lr, at, top)]
    bad = [at for at in restarts if not _cycle_ended(lr, at, top)]
    if not bad or len(bad) > 8:
        return []
    at = bad[0]
    before, after = float(lr.values[at - 1]), float(lr.values[at])
    return [
        Finding(
            f"the learning rate goes from {before:.3g} back to its start ({after:.3g}) at step {int(lr.steps[at])}",
            "schedule_restarts",
            "error",
            (
                Evidence(int(lr.steps[at]), {"lr": after, "step before": before}),
                Evidence(int(lr.steps[0]), {"lr at the start": float(lr.values[0])}),
            ),
            "a resume made a new schedule and did not load the old one's state: warm-up and decay begin again",
            "save scheduler.state_dict() with the checkpoint and load it after the optimizer's; or make the schedule a "
            "function of the update count",
            LESSON,
        )
    ]


def _like_start(lr: Series, at: int, top: float) -> bool:
    """Whether the rates from ``at`` on are those of the start, and leave where the schedule was."""
    start = lr.steps[0]
    count = min(START_ROWS, len(lr) - at, at)
    if count < 3:
        return False
    gap = lr.steps[at] - lr.steps[at - 1]
    head = lr.values[: at + 1]
    # The resume lies somewhere between the two rows: try where the restart may have happened.
    for offset in np.unique(np.linspace(lr.steps[at], lr.steps[at - 1] + gap / 1000, 5)):
        replayed = np.interp(lr.steps[at : at + count] - offset + start, lr.steps[: at + 1], head)
        if np.all(np.abs(replayed - lr.values[at : at + count]) <= LIKE_START * top):
            moved = np.ptp(np.append(lr.values[at : at + count], lr.values[at - 1])) > JUMP * top
            return bool(moved and abs(lr.values[at] - lr.values[at - 1]) > 3 * _usual_change(lr, at))
    return False


def _usual_change(lr: Series, at: int) -> float:
    """The largest change from row to row in the rows before a jump."""
    before = np.abs(np.diff(lr.values[max(0, at - START_ROWS) : at]))
    return float(before.max()) if len(before) else 0.0


def _cycle_ended(lr: Series, at: int, top: float) -> bool:
    """Whether the rate was at the bottom of a cycle before ``at``: a restart by design."""
    before = lr.values[:at]
    low = float(before[-1]) <= CYCLE_END * top
    tail = np.abs(np.diff(before[-4:]))
    flat = len(before) > 8 and tail.max(initial=0) < 0.2 * np.abs(np.diff(before)).max(initial=0)
    return bool(low or (flat and before[-1] <= before.min() * 1.05))

"""The loss by itself and beside the gradient norm: NaN that stays, spikes."""

from __future__ import annotations

import numpy as np

from .finding import Evidence, Finding
from .log import Log, Series
from .rule import center, rule, skips, spread

__all__ = ["nan_stays", "spike_stays"]

LESSON = "01_clipping_amp"

#: So many rows at the end without one good number, and NaN has come to stay.
NAN_ROWS = 3

#: Rows before and after a jump whose medians are compared.
SPIKE_ROWS = 12
#: Fewest rows before and after.
SPIKE_ROWS_LEAST = 5
#: The level after a jump, as a multiple of the level before, where the gradient norm leaps with it.
SPIKE_LEVEL = 1.25
#: The jump, as a multiple of the noise of a median of that many rows.
SPIKE_SIGMAS = 6.0
#: A gradient norm is a spike above this multiple of the median before.
SPIKE_NORM = 8.0
#: Without a norm, a jump of the loss to more than this multiple that lasts to the end is taken for one.
SPIKE_LEVEL_ALONE = 2.0
#: A single loss above all its neighbours by this factor is a spike that passed.
PASSING_LEVEL = 2.0
#: A clip held where the norm after it is less than this share of the norm before it.
CLIP_HELD = 0.9


@rule("loss")
def nan_stays(log: Log) -> list[Finding]:
    """From some step on there is no good loss (or no good norm) any more."""
    loss = log.series["loss"]
    found = _bad_end(loss)
    name, series = "loss", loss
    if found is None and "norm" in log.series:
        name, series = "gradient norm", log.series["norm"]
        found = _bad_end(series)
        if found is not None and not np.all(loss.values[loss.rows >= series.rows[found]] == 0):
            # The loss goes on: the steps are refused (the scaler's rules see that), unless it is a trainer's "0".
            found = None
    if found is None:
        return _nan_that_went(log)
    before = series.where(np.arange(len(series)) < found).finite()
    value = float(series.values[found])
    evidence = [Evidence(int(series.steps[found]), {name: value, "rows from here on": len(series) - found})]
    if len(before):
        evidence.append(Evidence(int(before.steps[-1]), {f"last good {name}": float(before.values[-1])}))
    zero = " (its trainer writes a loss of 0 for NaN: Hugging Face's logging_nan_inf_filter)"
    return [
        Finding(
            f"{name} is {'NaN' if value != value else value} from step {int(series.steps[found])} on"
            + (zero if name != "loss" else ""),
            "nan_stays",
            "error",
            tuple(evidence),
            "a gradient left its type's range, or a bad batch or a too large step: Inf, then Inf / Inf; it reached the "
            "weights, and every number after it is NaN",
            "go back to a checkpoint before that step; skip steps whose gradients are not finite (a GradScaler for "
            "float16, AmpTrainState for any type) and clip the global norm at 1.0",
            LESSON,
        )
    ]


def _bad_end(series: Series) -> int | None:
    """Where the last stretch without a good number begins; None where it is shorter than ``NAN_ROWS``."""
    good = np.flatnonzero(np.isfinite(series.values))
    begins = int(good[-1]) + 1 if len(good) else 0
    long = len(series) - begins >= NAN_ROWS or (not len(good) and len(series) > 0)
    return begins if long else None


def _nan_that_went(log: Log) -> list[Finding]:
    """A loss that was no number and came back, in steps that nobody says were skipped."""
    loss = log.series["loss"]
    bad = loss.where(~np.isfinite(loss.values))
    bad = bad.where(~np.isin(bad.rows, skips(log)))
    if not len(bad):
        return []
    return [
        Finding(
            f"the loss was no number in {len(bad)} of {len(loss)} rows",
            "nan_passes",
            "warning",
            tuple(Evidence(int(s), {"loss": float(v)}) for s, v in zip(bad.steps[:3], bad.values[:3], strict=True)),
            "a bad batch or an overflow; the log does not say whether the step was skipped",
            "look at those batches; log whether a step was skipped; skip where the loss or a gradient is not finite",
            LESSON,
        )
    ]


@rule("loss")
def spike_stays(log: Log) -> list[Finding]:
    """The loss leaps from one row to the next, and stays up; where the worst such rise begins."""
    loss = log.series["loss"].finite()
    loss = loss.where(~np.isin(loss.rows, skips(log)))
    if len(loss) < 2 * SPIKE_ROWS_LEAST + 1 or center(loss.values) <= 0:
        return []
    places: list[tuple[int, float, float]] = []
    for at in _leaps(loss):
        before = loss.values[max(0, at - SPIKE_ROWS) : at]
        after = loss.values[at + 1 : at + 1 + SPIKE_ROWS]
        if len(before) < SPIKE_ROWS_LEAST or len(after) < SPIKE_ROWS_LEAST:
            continue
        low, high = center(before), center(after)
        noise = 1.25 * spread(before) / min(len(before), len(after)) ** 0.5
        # Every row after is above every row before: a leap, not a slope or a noisy stretch.
        apart = np.quantile(after, 0.1) > np.quantile(before, 0.9)
        if low > 0 and high > SPIKE_LEVEL * low and high - low > SPIKE_SIGMAS * noise and apart:
            places.append((at, low, high))
    if not places:
        return _spike_that_went(log, loss)
    worst, usual, top = max(places, key=lambda place: (place[2] / place[1], place[0]))
    at, low, high = _begins([place for place in places if place[0] <= worst], loss)
    norm = _norm_near(log, int(loss.rows[at])) or _norm_near(log, int(loss.rows[worst]))
    end = center(loss.values[-max(SPIKE_ROWS_LEAST, len(loss) // 20) :])
    if norm is None:
        sure = top > SPIKE_LEVEL_ALONE * usual and end > SPIKE_LEVEL * usual and "norm" not in log.series
    else:
        sure = True
    held = norm is not None and norm[2] is not None and norm[2] < CLIP_HELD * norm[0]
    told: dict[str, float | int | str | None] = {"median loss before": low, "after": high, "at the end": end}
    evidence = [Evidence(int(loss.steps[at]), {"loss": float(loss.values[at]), **told})]
    if norm is not None:
        evidence.append(
            Evidence(int(norm[3]), {"norm": norm[0], "median norm before": norm[1], "after the clip": norm[2]})
        )
    cause = "that batch's gradient norm was many times the usual one, and nothing held it back"
    if norm is None:
        cause += " (as far as a log without such a norm can tell); or the data or the learning rate changed there"
    if held:
        cause = "the clip held the norm, and the step was still too large: the learning rate, or Adam's first moments"
    return [
        Finding(
            f"the loss leaps from {low:.4g} to {high:.4g} at step {int(loss.steps[at])} and stays up",
            "spike_stays",
            "error" if sure else "warning",
            tuple(evidence),
            cause,
            "lower the learning rate or warm up longer; look at that batch"
            if held
            else "clip the global norm, at 1.0 to begin with; look at that batch",
            LESSON,
        )
    ]


def _begins(places: list[tuple[int, float, float]], loss: Series) -> tuple[int, float, float]:
    """The place at which the rise that ends with ``places[-1]`` left the old level: that is the batch to look at."""
    begins = places[-1]
    for place in places[-2::-1]:
        at = place[0]
        if begins[0] - at >= SPIKE_ROWS:
            break
        if loss.values[at] > SPIKE_LEVEL * loss.values[max(0, at - SPIKE_ROWS) : at].max():
            begins = place
    return begins


def _spike_that_went(log: Log, loss: Series) -> list[Finding]:
    """Single losses far above their neighbours, with a norm far above its own that no clip held."""
    found = []
    for at in _leaps(loss):
        around = np.concatenate([loss.values[max(0, at - SPIKE_ROWS) : at], loss.values[at + 1 : at + 1 + SPIKE_ROWS]])
        if len(around) < SPIKE_ROWS_LEAST or not loss.values[at] > PASSING_LEVEL * np.max(around):
            continue
        norm = _norm_near(log, int(loss.rows[at]))
        if "norm" in log.series and (norm is None or (norm[2] is not None and norm[2] < CLIP_HELD * norm[0])):
            continue
        told: dict[str, float | int | str | None] = {"loss": float(loss.values[at]), "median around": center(around)}
        found.append(
            Evidence(int(loss.steps[at]), told | ({"norm": norm[0], "median norm before": norm[1]} if norm else {}))
        )
    if not found:
        return []
    return [
        Finding(
            f"the loss spikes in {len(found)} steps, and comes back",
            "spike_passes",
            "warning",
            tuple(found),
            "single bad batches; nothing held their gradients back, and the next may do lasting harm",
            "look at those batches; clip the global norm, at 1.0 to begin with",
            LESSON,
        )
    ]


def _leaps(loss: Series, most: int = 50) -> list[int]:
    """Rows where a spike may begin: the largest of a row's rise over the row before, as factors."""
    values = np.maximum(loss.values, 1e-30)
    rise = values[1:] / values[:-1]
    if len(rise) > 2:  # a leap may take two rows: the bad batch, then what its step did
        rise[1:] = np.maximum(rise[1:], values[2:] / values[:-2])
    likely = np.flatnonzero(rise > 1.2) + 1
    return sorted(likely[np.argsort(-rise[likely - 1], kind="stable")][:most].tolist())


def _norm_near(log: Log, row: int) -> tuple[float, float, float | None, float] | None:
    """The spike of the norm at or just before ``row``: norm, median before, norm after the clip, step. None = none."""
    if "norm" not in log.series:
        return None
    norm = log.series["norm"].finite()
    here = np.flatnonzero((norm.rows >= row - 2) & (norm.rows <= row + 1))
    if not len(here):
        return None
    before = center(norm.values[max(0, int(here[0]) - SPIKE_ROWS) : int(here[0])])
    spiked = here[norm.values[here] > SPIKE_NORM * before]
    if not len(spiked):
        return None
    at = int(spiked[0])  # those after it may be larger: they follow from it
    clipped = log.series["clipped"].on(norm.rows[at : at + 1])[0] if "clipped" in log.series else float("nan")
    return float(norm.values[at]), before, None if clipped != clipped else float(clipped), float(norm.steps[at])

"""Mixed precision: what the scaling factor, the skips and the norms tell together."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .finding import Evidence, Finding
from .log import Log, Series
from .rule import center, changes, overflows, rule, skips, spread

__all__ = ["norm_follows_scale", "scale_collapsed", "scale_never_moves", "skip_rate"]

LESSON = "01_clipping_amp"

#: Share of skipped steps above which the values, not the factor, are the problem.
SKIP_RATE = 0.05
#: Rows over which the share is taken; all of them where there are fewer.
SKIP_WINDOW = 1000
#: Fewer skips than this tell nothing.
SKIPS_LEAST = 5
#: A scaler begins high and halves its way down, which is no rate: rows that this may take ...
SEARCH_MOST = 48
#: ... while of so many rows at least half are skipped.
SEARCH_ROWS = 8

#: From this factor on, gradients that are still scaled are too large to be taken for unscaled ones.
SCALE_LARGE = 256.0
#: The norm follows the factor where log norm rises by this much per log factor (1 = it is multiplied by it).
SLOPE_LEAST, SLOPE_MOST = 0.6, 1.4
#: ... and this slope is so many times its own error.
SLOPE_SIGMAS = 4.0
#: Rows on each side of a change of the factor that are compared.
SLOPE_ROWS = 12
#: A norm above this, with a large factor that never changes, is likely to be a scaled one.
NORM_SUSPECT = 1000.0

#: A scaling factor below this means that no factor helps; at it there is none left to search for.
SCALE_LEAST = 1.0


def _scaler(log: Log) -> Series | None:
    """The scaling factor, where a scaler is at work: a disabled one says 1.0 throughout."""
    scale = log.series["scale"].finite()
    return None if not len(scale) or np.all(scale.values == 1.0) else scale


@rule("scale", "skipped|norm")
def scale_never_moves(log: Log) -> list[Finding]:
    """The factor is the same before and after every overflow, where it must halve."""
    scale, rows = _scaler(log), overflows(log)
    if scale is None or not len(rows) or len(changes(scale.values)):
        return []
    followed = rows[rows < scale.rows[-1]]
    if not len(followed):
        return []
    evidence = tuple(
        Evidence(int(log.steps[row]), {"skipped": "overflow", "scale here and after": float(scale.values[0])})
        for row in followed[:3]
    )
    return [
        Finding(
            f"the scaling factor stays at {scale.values[0]:g} although {len(rows)} steps overflowed",
            "scale_never_moves",
            "error",
            evidence,
            "the path that skips a step never reaches scaler.update(), or the factor is set anew each step: "
            "the same factor overflows again and again",
            "end every window in scaler.update(), skipped or not; let scaler.step() do the skipping",
            LESSON,
        )
    ]


@rule("norm", "scale")
def norm_follows_scale(log: Log) -> list[Finding]:
    """The norm halves and doubles with the factor: it, and the clip behind it, saw scaled gradients."""
    scale = _scaler(log)
    norm = log.series["norm"].finite()
    norm = norm.where(norm.values > 0)
    if scale is None or len(norm) < 4:
        return []
    factor = scale.on(norm.rows)
    norm, factor = norm.where(np.isfinite(factor) & (factor > 0)), factor[np.isfinite(factor) & (factor > 0)]
    if len(norm) < 4:
        return []
    logs, levels = np.log2(norm.values), np.log2(factor)
    slope, error, at = _slope(logs, levels)
    large = center(factor) >= SCALE_LARGE
    if at and large and SLOPE_LEAST <= slope <= SLOPE_MOST and slope >= SLOPE_SIGMAS * error:
        severity, seen = (
            "error",
            f"the gradient norm follows the scaling factor (slope {slope:.2f}, 1 = multiplied by it)",
        )
    elif not at and large and center(norm.values) > NORM_SUSPECT and center(norm.values) > 0.01 * center(factor):
        severity, at = "warning", [0, len(norm) - 1]
        seen = f"the gradient norm is {center(norm.values):.4g} beside a scaling factor of {center(factor):g}"
    else:
        return []
    evidence = tuple(
        Evidence(int(norm.steps[i]), {"norm": float(norm.values[i]), "scale": float(factor[i])})
        for change in at[:3]
        for i in ((change - 1, change) if change and severity == "error" else (change,))
    )
    return [
        Finding(
            seen,
            "norm_follows_scale",
            severity,
            evidence,
            "the norm and the clip see gradients that are still multiplied by the scaling factor: "
            "each step is cut to max_norm / factor",
            "scaler.unscale_(optimizer) first, then the norm and the clip, then scaler.step(optimizer)",
            LESSON,
        )
    ]


def _slope(logs: NDArray[np.float64], levels: NDArray[np.float64]) -> tuple[float, float, list[int]]:
    """How log norm moves with log factor over the changes of the factor: slope, its error, and where it changed."""
    found, weights, noise = [], [], []
    at = changes(levels)
    edges = [0, *at.tolist(), len(levels)]
    for index, change in enumerate(at.tolist()[:200]):
        before = logs[max(edges[index], change - SLOPE_ROWS) : change]
        after = logs[change : min(edges[index + 2], change + SLOPE_ROWS)]
        moved = levels[change] - levels[change - 1]
        found.append((center(after) - center(before)) * moved)
        weights.append(moved**2)
        around = logs[max(0, change - SLOPE_ROWS) : change + SLOPE_ROWS]
        noise.append((1.25 * spread(around)) ** 2 * (1 / len(before) + 1 / len(after)) * moved**2)
    if not found:
        return 0.0, float("inf"), []
    return sum(found) / sum(weights), max(sum(noise) ** 0.5, 0.02) / sum(weights), at.tolist()


@rule("skipped|norm+scale")
def skip_rate(log: Log) -> list[Finding]:
    """More than one step of twenty was refused, beyond the scaler's first search for its factor."""
    flags = np.zeros(len(log))
    rows = skips(log)
    flags[rows] = 1
    known = log.series["skipped" if "skipped" in log.series else "norm"].rows
    scaled = "scale" in log.series and _scaler(log) is not None
    scale = log.series["scale"].on(known) if scaled else np.full(len(known), np.nan)
    flags, steps = flags[known], log.steps[known]
    begun = _search_ends(flags, scale)
    flags, steps = flags[begun:], steps[begun:]
    window = min(SKIP_WINDOW, len(flags))
    if window < 2 * SKIPS_LEAST:
        return []
    total = np.concatenate([[0.0], np.cumsum(flags)])
    counts = total[window:] - total[:-window]
    worst = int(np.argmax(counts))
    count = int(counts[worst])
    if count < SKIPS_LEAST or not count / window > SKIP_RATE:
        return []
    hit = steps[worst : worst + window][flags[worst : worst + window] > 0]
    reasons = log.texts.get("skip_reason", {})
    told = sorted({reasons[int(row)] for row in rows.tolist() if int(row) in reasons})
    evidence = (Evidence(int(hit[0]), {"first of": count, "last at step": int(hit[-1]), "steps in all": window}),)
    return [
        Finding(
            f"{count / window:.1%} of {window} steps were skipped" + (f" ({', '.join(told)})" if told else ""),
            "skip_rate",
            "error",
            evidence,
            "the values themselves do not fit float16, or the data is bad: a smaller scaling factor cannot help",
            "look at the reasons of the skips; better units for the inputs or the loss, a lower learning rate, "
            "or bfloat16; and an alert above 5 %",
            LESSON,
        )
    ]


def _search_ends(flags: NDArray[np.float64], scale: NDArray[np.float64]) -> int:
    """Where the scaler has found its factor: behind a start in which every stretch was skipped by half or more.

    It ends at the latest where the factor has come down to 1, since what overflows there does so unscaled; and a log
    whose whole length would be search shows no factor that was found.
    """
    least = np.flatnonzero(scale <= SCALE_LEAST)
    most = min([SEARCH_MOST, len(flags) // 2, *least[:1].tolist()])
    at = 0
    while at < most and (flags[at] > 0 or flags[at : at + SEARCH_ROWS].mean() >= 0.5):
        at += 1
    return at


@rule("scale")
def scale_collapsed(log: Log) -> list[Finding]:
    """The factor fell below 1: it was halved and halved, and no factor helped."""
    scale = _scaler(log)
    if scale is None or not scale.values[-1] < SCALE_LEAST or not scale.values[0] >= SCALE_LEAST:
        return []
    first = int(np.flatnonzero(scale.values < SCALE_LEAST)[0])
    return [
        Finding(
            f"the scaling factor fell to {scale.values[-1]:g}",
            "scale_collapsed",
            "error",
            (
                Evidence(int(scale.steps[first]), {"scale": float(scale.values[first])}),
                Evidence(int(scale.steps[0]), {"scale": float(scale.values[0])}),
            ),
            "the gradients are Inf or NaN whatever the factor: a NaN in the weights or the data, or values that do not "
            "fit float16 even unscaled",
            "find the first step that was skipped without end; go back to a checkpoint before it, and use bfloat16",
            LESSON,
        )
    ]

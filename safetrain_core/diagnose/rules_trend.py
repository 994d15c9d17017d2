"""Where the loss of a whole run goes: up again, or nowhere."""

from __future__ import annotations

import numpy as np

from .finding import Evidence, Finding
from .log import Log
from .rule import block_medians, center, rule, spread

__all__ = ["diverged", "not_learning"]

#: Fewest losses to speak of a trend.
TREND_ROWS = 20
#: Blocks into which a run is cut; a block's median is a point of the trend.
TREND_BLOCKS = 10
#: The end above the beginning by this factor: diverged.
DIVERGED = 1.25
#: The first rows, whose median is the beginning as such: a rate far too high spoils the loss within a few steps.
FIRST_ROWS = 3
#: Where the very first loss alone lies below nearly all that followed, the later median is above it by this factor.
FIRST_ALONE = 1.5
#: Share of the progress that was lost again: worth a look.
LOST_SHARE = 0.5
#: A rise counts where it is so many times the noise of a block's median.
TREND_SIGMAS = 4.0
#: Improvement below this share of the first level: not learning.
IMPROVED_LEAST = 0.02


@rule("loss")
def diverged(log: Log) -> list[Finding]:
    """The loss ends above where it began, or gives back most of what it had won."""
    loss = log.series["loss"].finite()
    if len(loss) < TREND_ROWS:
        return []
    points = block_medians(loss.values, TREND_BLOCKS)
    start, end, least = float(points[0]), float(points[-1]), int(np.argmin(points))
    low = float(points[least])
    noise = 1.25 * spread(loss.values) / (len(loss) / TREND_BLOCKS) ** 0.5
    first, one = center(loss.values[:FIRST_ROWS]), float(loss.values[0])
    late = loss.values[len(loss) // 2 :]
    only_one = False
    if len(loss) >= 2 * TREND_ROWS and 0 < first < np.quantile(late, 0.02):
        start, low = min(start, first), min(low, first)  # nearly all of the second half lies above the first rows
    elif len(loss) >= 2 * TREND_ROWS and 0 < FIRST_ALONE * one < center(late) and one < np.quantile(late, 0.02):
        start, low, only_one = min(start, one), min(low, one), True
    elif not end - low > TREND_SIGMAS * noise:
        return []
    if start <= 0:
        return []
    lost = (end - low) / (start - low) if start > low else float("inf")
    above = end > DIVERGED * start
    if not above and not (lost > LOST_SHARE and end > DIVERGED * low):
        return []
    block = len(loss) // TREND_BLOCKS
    evidence = (
        Evidence(int(loss.steps[-1]), {"median loss of the last tenth": end}),
        Evidence(int(loss.steps[min(least * block, len(loss) - 1)]), {"median loss of the best tenth": low}),
        Evidence(int(loss.steps[0]), {"median loss of the first tenth": start}),
    )
    return [
        Finding(
            f"the loss ends at {end:.4g}, {'above its beginning' if above else 'far above its best'} of "
            f"{start if above else low:.4g}",
            "diverged",
            "error" if above and not only_one else "warning",
            evidence,
            "the learning rate is too high for this part of the run, or a bad step was never undone",
            "resume from a checkpoint near the best step with a lower learning rate; clip the norm at 1.0; "
            "SafeTrainer's loss_jump_factor goes back by itself",
            "01_clipping_amp",
        )
    ]


@rule("loss")
def not_learning(log: Log) -> list[Finding]:
    """The loss does not fall."""
    loss = log.series["loss"].finite()
    if len(loss) < TREND_ROWS:
        return []
    points = block_medians(loss.values, TREND_BLOCKS)
    improved = (points[0] - points.min()) / abs(points[0]) if points[0] else 1.0
    if not improved < IMPROVED_LEAST:
        return []
    still = [
        role
        for role in ("lr", "norm")
        if role in log.series and len(log.series[role]) and not np.any(np.nan_to_num(log.series[role].values))
    ]
    constant = bool(np.all(loss.values == loss.values[0]))
    names = {"lr": "the learning rate is 0", "norm": "the gradient norm is 0"}
    why = [names[role] for role in still] + (["the loss is the same number in every row"] if constant else [])
    return [
        Finding(
            f"the loss does not fall: {points[0]:.4g} at first, {points[-1]:.4g} at the end",
            "not_learning",
            "warning" if why else "info",
            (Evidence(int(loss.steps[-1]), {"improved by": f"{improved:.1%}", "rows": len(loss)}),),
            "; ".join(why) or "it began near what it can reach (fine-tuning), or the weights do not get the gradient",
            "overfit a single batch first; look whether the optimizer holds the model's parameters, whether zero_grad "
            "comes before backward, and what the schedule gives in the first steps",
            "02_accumulation" if why else "",
        )
    ]

"""The clip, and the training loss beside the validation loss."""

from __future__ import annotations

import numpy as np

from .finding import Evidence, Finding
from .log import Log
from .rule import center, rule, skips

__all__ = ["clips_every_step", "loss_times_k", "overfits"]

#: Share of the steps that the clip cut, from which on it acts on every step.
CLIPPED_SHARE = 0.95
#: Fewest rows to say so: the first steps of a run are often all clipped.
CLIPPED_ROWS = 50
#: A step was cut where the norm behind the clip is below this share of the norm before it.
CUT = 0.999

#: Validations that are compared with the training loss before them: the first, before the two drift apart.
K_VALIDATIONS = 6
#: Training losses before a validation whose mean is compared.
K_ROWS = 10
#: From this K on hardly anything else explains it; 2 and 3 may be a regularizer that validation leaves out.
K_SURE = 4
#: Neither half of them has a ratio smaller by this factor: where the loss only falls fast, the later half is near 1.
K_STEADY = 2.0
#: Below ``K_SURE`` all agree within this factor, and the ratio is a whole number within this share.
K_STEADY_SMALL, K_ROUND_SMALL = 1.25, 0.15

#: Validation loss above its best by this share, while the training loss fell by ``TRAIN_FELL``: memorizing.
VAL_ROSE, TRAIN_FELL = 0.15, 0.03
#: Last validations whose mean is compared with the best.
VAL_LAST = 3


@rule("norm", "clipped")
def clips_every_step(log: Log) -> list[Finding]:
    """The clip cuts every step: it sets the length of each, and the learning rate no longer does."""
    norm = log.series["norm"].finite()
    after = log.series["clipped"].on(norm.rows)
    known = np.isfinite(after)
    norm, after = norm.where(known), after[known]
    late = slice(len(norm) // 5, None)
    cut = after[late] < CUT * norm.values[late]
    if len(cut) < CLIPPED_ROWS or not cut.mean() >= CLIPPED_SHARE:
        return []
    factor = center(norm.values[late] / np.maximum(after[late], 1e-30))
    return [
        Finding(
            f"{cut.mean():.0%} of the steps are clipped, by a factor of {factor:.3g} (median)",
            "clips_every_step",
            "warning",
            (
                Evidence(int(norm.steps[-1]), {"norm": float(norm.values[-1]), "after the clip": float(after[-1])}),
                Evidence(None, {"median norm": center(norm.values[late]), "median after": center(after[late])}),
            ),
            "max_norm lies below every norm of this run: each step has the same length whatever the gradient says",
            f"set max_norm near the norms that the run has ({center(norm.values[late]):.3g} is their median), so "
            "that it cuts the outliers; if the norms are in the thousands, see whether they are unscaled",
            "01_clipping_amp",
        )
    ]


@rule("loss", "val_loss")
def loss_times_k(log: Log) -> list[Finding]:
    """The training loss is a whole multiple of the validation loss, from the first validation on."""
    ratios, places = _ratios(log)
    if len(ratios) < 2:
        return []
    ratio, half = _pooled(places), (len(places) + 1) // 2
    k = round(ratio)
    if k < 2 or not min(_pooled(places[:half]), _pooled(places[half:])) > ratio / K_STEADY:
        return []
    apart = max(ratios.max() / ratio, ratio / ratios.min())
    if k < K_SURE and not (apart < K_STEADY_SMALL and abs(ratio / k - 1) < K_ROUND_SMALL):
        return []
    evidence = tuple(
        Evidence(step, {"training loss": train, "validation loss": val, "ratio": train / val})
        for step, train, val in places[:3]
    )
    return [
        Finding(
            f"the training loss is {ratio:.3g} times the validation loss, from the first validation on",
            "loss_times_k",
            "error" if k >= K_SURE else "warning",
            evidence,
            f"the losses of K micro-batches (K near {k}) are added up and never divided: the logged loss is K times "
            "too large, and so are the gradients, unless only the log adds them up",
            "divide each micro-batch's loss by the number of micro-batches before backward, or weight by tokens",
            "02_accumulation",
        )
    ]


def _pooled(places: list[tuple[int, float, float]]) -> float:
    return sum(train for _, train, _ in places) / sum(val for _, _, val in places)


def _ratios(log: Log) -> tuple[np.ndarray, list[tuple[int, float, float]]]:
    """Training loss / validation loss at the first validations; and (step, training, validation) of each."""
    loss = log.series["loss"].finite()
    loss = loss.where(~np.isin(loss.rows, skips(log)))
    val = log.series["val_loss"].finite()
    places: list[tuple[int, float, float]] = []
    begin = 0
    for step, value in zip(val.steps, val.values, strict=True):
        end = int(np.searchsorted(loss.steps, step, side="right"))
        train = loss.values[max(begin, end - K_ROWS) : end]
        begin = end
        if len(train) and value > 0 and train.min() > 0:
            places.append((int(step), float(train.mean()), float(value)))
        if len(places) == K_VALIDATIONS:
            break
    return np.array([train / value for _, train, value in places]), places


@rule("loss", "val_loss")
def overfits(log: Log) -> list[Finding]:
    """The validation loss rises while the training loss falls."""
    loss, val = log.series["loss"].finite(), log.series["val_loss"].finite()
    if len(val) < VAL_LAST + 1 or len(loss) < 2 * VAL_LAST:
        return []
    best = int(np.argmin(val.values))
    low, last = float(val.values[best]), float(np.mean(val.values[-VAL_LAST:]))
    if best > len(val) - 1 - VAL_LAST or not last > (1 + VAL_ROSE) * low:
        return []
    row = int(np.searchsorted(loss.steps, val.steps[best], side="right"))
    then, now = center(loss.values[max(0, row - K_ROWS) : row]), center(loss.values[-K_ROWS:])
    if not now < (1 - TRAIN_FELL) * then:
        return []
    return [
        Finding(
            f"the validation loss has risen by {last / low - 1:.0%} since step {int(val.steps[best])}",
            "overfits",
            "warning",
            (
                Evidence(int(val.steps[best]), {"best validation loss": low, "training loss": then}),
                Evidence(int(val.steps[-1]), {"validation loss": float(val.values[-1]), "training loss": now}),
            ),
            "the model learns the training set by heart: too many epochs for this much data",
            "keep the best checkpoint (SafeTrainer does), stop there, or regularize",
            "03_checkpoint_resume",
        )
    ]

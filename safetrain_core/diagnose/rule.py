"""What a rule is, and what several of them ask a log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .finding import Finding
from .log import Floats, Log

__all__ = ["Rule", "block_medians", "center", "changes", "overflows", "rule", "skips", "spread"]


@dataclass(frozen=True)
class Rule:
    """One thing to look for: ``needs`` are the roles without which it cannot look.

    ``a|b`` where either will do, ``a|b+c`` where a does, or b and c together.
    """

    name: str
    needs: tuple[str, ...]
    look: Callable[[Log], list[Finding]]

    def lacks(self, log: Log) -> list[str]:
        """The needs that ``log`` does not meet."""
        return [need for need in self.needs if not any(log.has(*way.split("+")) for way in need.split("|"))]


def rule(*needs: str) -> Callable[[Callable[[Log], list[Finding]]], Rule]:
    """Make a rule of a function; its name is the function's.

    >>> @rule("loss")
    ... def never(log):
    ...     return []
    >>> never.name, never.needs
    ('never', ('loss',))
    """
    return lambda look: Rule(look.__name__, needs, look)


def center(values: Floats) -> float:
    """The median; NaN of nothing."""
    return float(np.median(values)) if len(values) else float("nan")


def spread(values: Floats) -> float:
    """Standard deviation as the median of absolute steps tells it: neither outliers nor a trend count.

    For independent normal noise of deviation s, |x[i+1] - x[i]| has the median 0.954 s.

    >>> spread(np.array([1.0, 2.0, 1.0, 2.0, 900.0, 1.0]))
    1.048...
    """
    return float(np.median(np.abs(np.diff(values)))) / 0.954 if len(values) > 1 else 0.0


def block_medians(values: Floats, blocks: int) -> Floats:
    """Medians of ``blocks`` stretches of equal length, what is left over in the last."""
    size = max(1, len(values) // blocks)
    edges = list(range(0, len(values) - size + 1, size))[:blocks]
    return np.array([np.median(values[a:b]) for a, b in zip(edges, [*edges[1:], len(values)], strict=True)])


def changes(values: Floats) -> NDArray[np.int64]:
    """Positions whose value is not that before."""
    return np.flatnonzero(np.diff(values) != 0) + 1


def skips(log: Log) -> NDArray[np.int64]:
    """Rows whose update was refused: by their column (a flag, or a count that rises), else by a norm that is no number.

    Without a column, a norm of Inf or NaN beside a scaling factor is a step that a GradScaler refuses.
    """
    if "skipped" in log.series:
        told = log.series["skipped"]
        values = np.nan_to_num(told.values)
        if values.max(initial=0) > 1 and np.all(np.diff(values) >= 0):
            values = np.diff(values, prepend=min(values[0], 1.0))
        return told.rows[values > 0]
    if log.has("norm", "scale"):
        norm = log.series["norm"]
        return norm.rows[~np.isfinite(norm.values)]
    return np.empty(0, dtype=np.int64)


def overflows(log: Log) -> NDArray[np.int64]:
    """The refused rows that a GradScaler answers by a smaller factor: the gradients, not the loss, were bad."""
    rows = skips(log)
    if "skip_reason" in log.texts:
        reason = log.texts["skip_reason"]
        return np.array([row for row in rows.tolist() if reason.get(row) == "non_finite_grad"], dtype=np.int64)
    if "loss" in log.series:
        loss = log.series["loss"].on(rows)
        measured = np.isin(rows, log.series["loss"].rows)
        return rows[np.isfinite(loss) | ~measured]
    return rows

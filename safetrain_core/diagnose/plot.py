"""The curves of a log with the evidence marked. matplotlib is asked for only here, when a picture is wanted."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .finding import Finding
from .log import Floats, Log

__all__ = ["save_plot"]

#: What is drawn, from top to bottom, where the log has it: role -> label of its axis.
PANELS = {
    "loss": "loss",
    "norm": "gradient norm",
    "scale": "scaling factor",
    "lr": "learning rate",
}
#: Points drawn at most per curve.
POINTS = 5000

#: A mark differs by shape too, not by colour alone.
_MARKS = {"error": ("#b2182b", "v"), "warning": ("#e08214", "^")}


def save_plot(log: Log, findings: Sequence[Finding], path: str | Path, baseline: Log | None = None) -> None:
    """Draw ``log`` into the file ``path``; its ending says the format.

    Args:
        findings: errors and warnings are marked at the steps of their evidence. baseline: drawn beside the loss.

    Raises:
        ValueError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        # The only place of the package that draws; loaded by name, so that nothing else pulls matplotlib in.
        figure_module = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ValueError(
            "--plot needs the package matplotlib, which is not installed; pip install matplotlib, or leave --plot out"
        ) from error
    roles = [role for role in PANELS if role in log.series and len(log.series[role].finite())]
    roles = roles or [next(iter(log.series))]
    figure = figure_module.Figure(figsize=(9, 1 + 2.2 * len(roles)), layout="constrained")
    axes = figure.subplots(len(roles), 1, sharex=True, squeeze=False)[:, 0]
    for axis, role in zip(axes, roles, strict=True):
        _curve(axis, log, role, "this run", color="#2166ac", linestyle="-")
        if baseline is not None and role in baseline.series:
            _curve(axis, baseline, role, "baseline", color="#555555", linestyle="--")
        logarithmic = _wide(log.series[role].finite().values)
        axis.set_ylabel(PANELS.get(role, role) + (" (log scale)" if logarithmic else ""))
        if logarithmic:
            axis.set_yscale("log")
    _mark(axes, findings)
    axes[0].set_title(f"{log.source}: {_verdict(findings)}", fontsize=10)
    axes[-1].set_xlabel("step")
    handles, labels = axes[0].get_legend_handles_labels()
    if len(labels) > 1:
        unique = dict(zip(labels, handles, strict=True))
        axes[0].legend(unique.values(), unique.keys(), frameon=False, fontsize=8)
    try:
        figure.savefig(str(path), dpi=120)
    except OSError as error:
        raise ValueError(f"--plot {path} cannot be written: {error.strerror}; name another file") from error


def _wide(values: Floats) -> bool:
    """Whether values are positive, but for a few, and so far apart that a linear axis would show only the largest."""
    positive = values[values > 0]
    return len(positive) > 0.9 * len(values) and bool(positive.max() > 30 * np.median(positive))


def _curve(axis: Any, log: Log, role: str, label: str, **style: Any) -> None:
    series = log.series[role].finite()
    every = max(1, len(series) // POINTS)
    axis.plot(series.steps[::every], series.values[::every], label=label, linewidth=1, **style)


def _mark(axes: Any, findings: Sequence[Finding]) -> None:
    for finding in findings:
        if finding.severity not in _MARKS:
            continue
        color, marker = _MARKS[finding.severity]
        steps = [evidence.step for evidence in finding.evidence[:20] if evidence.step is not None]
        for axis in axes:
            for step in steps:
                axis.axvline(step, color=color, linewidth=0.6, linestyle=":")
        if steps:
            axes[0].plot(
                steps, [0.97] * len(steps), transform=axes[0].get_xaxis_transform(), linestyle="none", marker=marker,
                color=color, label=finding.rule, markersize=6,
            )  # fmt: skip


def _verdict(findings: Sequence[Finding]) -> str:
    names = [finding.rule for finding in findings if finding.severity != "info"]
    return ", ".join(names) or "healthy"

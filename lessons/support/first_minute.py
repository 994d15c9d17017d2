"""The picture of lesson 00."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .figures import draw, mark_skips, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from safetrain_core import StepLog


def first_minute_figure(plain: list[float], rows: list[StepLog]) -> Figure:
    """The plain loop's losses, which end in NaN, and the guarded ones with their SKIPs."""
    title = "One bad batch ends the plain run; a SKIP saves the other"
    fig, ax = draw(title, "step", "loss (mean squared error)")
    hollow = {**style(1), "markersize": 8, "fillstyle": "none"}
    ax.plot(range(1, len(plain) + 1), plain, label="plain loop, until it is NaN", **hollow)
    taken = [row for row in rows if not row.skipped]
    ax.plot(
        [row.step for row in taken],
        [row.loss for row in taken],
        label="AmpTrainState",
        **style(0),
    )
    mark_skips(ax, [row.step for row in rows if row.skipped])
    ax.set_ylim(bottom=-0.12)
    ax.set_xlim(0, len(plain) + 1)
    ax.legend(frameon=False)
    return fig

"""Pictures: one message each, readable in grey and by the colour-blind, each with a text that says the same."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from . import report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 100

#: Okabe and Ito's colours, dark ones first, each with its own line and marker, so that grey is enough.
STYLES = (
    {"color": "#0072B2", "linestyle": "-", "marker": "o"},
    {"color": "#D55E00", "linestyle": "--", "marker": "s"},
    {"color": "#009E73", "linestyle": "-.", "marker": "^"},
    {"color": "#000000", "linestyle": ":", "marker": "D"},
)


def style(index: int) -> dict[str, Any]:
    """Line, marker and colour of the curve with this index."""
    return {**STYLES[index % len(STYLES)], "markersize": 4, "linewidth": 1.6}


def draw(
    title: str, xlabel: str, ylabel: str, *, height: float = 3.0
) -> tuple[Figure, Axes]:
    """An empty figure with one pair of labelled axes; the title is the message."""
    from matplotlib.figure import Figure

    fig = Figure(figsize=(7.2, height), layout="constrained")
    ax = fig.subplots()
    ax.set_title(title, fontsize=11, loc="left")
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    if xlabel == "step":
        ax.xaxis.get_major_locator().set_params(integer=True)
    ax.grid(True, color="#DDDDDD", linewidth=0.6)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    return fig, ax


def log_scale(ax: Axes) -> None:
    """A logarithmic y axis with plain numbers, and enough of them when the range is short."""
    from matplotlib.ticker import LogLocator, NullFormatter

    ax.set_yscale("log")
    low, high = ax.get_ylim()
    ax.yaxis.set_major_locator(
        LogLocator(subs=(1.0,) if high > 100 * low else (1.0, 2.0, 3.0, 4.0, 5.0))
    )
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    ax.yaxis.set_minor_formatter(NullFormatter())


def mark_skips(
    ax: Axes, steps: Iterable[int], *, label: str = "SKIP", index: int = 3
) -> None:
    """A tick mark with an x at the foot of the axes for each refused step."""
    steps = list(steps)
    if not steps:
        return
    foot = ax.get_xaxis_transform()
    ax.plot(
        steps,
        [0.04] * len(steps),
        transform=foot,
        linestyle="none",
        marker="x",
        markersize=7,
        markeredgewidth=1.8,
        color=STYLES[index]["color"],
        label=label,
        clip_on=False,
    )


def png_of(fig: Figure) -> bytes:
    """The figure as a small PNG: 64 colours are enough for lines and text."""
    from PIL import Image

    raw, small = io.BytesIO(), io.BytesIO()
    fig.savefig(raw, format="png", dpi=DPI, metadata={"Software": None})
    Image.open(raw).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(
        small, "PNG", optimize=True
    )
    return small.getvalue()


def show(fig: Figure, name: str, *, alt: str) -> None:
    """Show a figure: in a notebook below the cell, in a script as a PNG under ``--out``.

    JupyterLab gives an image output no alt attribute, but it gives one to an image in Markdown; other readers
    take the PNG and the text in its metadata. So a notebook gets both.
    """
    png = png_of(fig)
    if path := report.current.path_for(f"{name}.png"):
        path.write_bytes(png)
        print(f"saved {path}")
    elif report.in_notebook():
        from IPython.display import display

        text = base64.b64encode(png).decode()
        display(
            {
                "text/markdown": f"![{alt}](data:image/png;base64,{text})",
                "image/png": text,
                "text/plain": f"[figure: {alt}]",
            },
            raw=True,
            metadata={"image/png": {"alt": alt}},
        )

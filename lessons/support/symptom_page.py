"""What lesson 00 shows of a symptom: some lines, a picture with the evidence marked, and the doctor's word."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from .figures import draw, log_scale, mark_skips, png_of, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from safetrain_core import Finding, StepLog


@dataclass(frozen=True)
class Picture:
    """Curves over steps from 1, by their label; steps to mark (None: the first finding's evidence); SKIP steps."""

    ylabel: str
    curves: dict[str, Sequence[float | None]]
    log: bool = False
    marks: Sequence[int] | None = None
    marked: str = "the doctor's evidence"
    skips: Sequence[int] = ()
    xlabel: str = "step"


@dataclass(frozen=True)
class Shown:
    """A symptom, produced: lines as its user would see them, the doctor's findings, and a picture where one helps."""

    lines: list[str]
    findings: Sequence[Finding]
    picture: Picture | None = None

    @property
    def first(self) -> Finding | None:
        """The finding that names the symptom; None where nothing was found."""
        return self.findings[0] if self.findings else None


def losses_of(rows: Sequence[StepLog]) -> Picture:
    """The losses of a run on a log scale, and its SKIP rows."""
    skips = [row.step for row in rows if row.skipped]
    return Picture("loss", {"loss": [row.loss for row in rows]}, log=True, skips=skips)


def rows_around(rows: Sequence[StepLog], step: int, after: int = 4) -> list[str]:
    """The printed rows from two before ``step`` to ``after`` behind it, with the last one of the run.

    >>> from safetrain_core import StepLog
    >>> rows = [StepLog(n, 0.1, None, None, 1.0, None) for n in range(1, 21)]
    >>> [line[10:14].strip() for line in rows_around(rows, 5, after=1)]
    ['3', '4', '5', '6', '', '20']
    """
    first, last = max(0, step - 3), min(len(rows), step + after)
    lines = [str(row) for row in rows[first:last]]
    return lines if last == len(rows) else [*lines, "...", str(rows[-1])]


def figure_of(shown: Shown, title: str) -> Figure:
    """The curves with the doctor's evidence marked, as ``safetrain diagnose --plot`` marks it."""
    picture = shown.picture
    ylabel = picture.ylabel + (" (log scale)" if picture.log else "")
    fig, ax = draw(title, picture.xlabel, ylabel)
    for index, (label, values) in enumerate(picture.curves.items()):
        points = [
            (x, y) for x, y in enumerate(values, start=1) if y is not None and y - y == 0
        ]
        look = {**style(index), "markevery": max(1, len(points) // 30)}
        ax.plot(*zip(*points, strict=True), label=label, **look)
    if picture.log:
        log_scale(ax)
    else:
        ax.set_ylim(bottom=0)
    ax.set_xlim(0, 1 + max(map(len, picture.curves.values())))
    mark_skips(ax, picture.skips)
    marks = picture.marks
    if marks is None:
        first = shown.first
        bad = first is not None and first.severity != "info"
        marks = [e.step for e in first.evidence if e.step is not None] if bad else []
    if marks:
        foot = ax.get_xaxis_transform()
        for step in marks:
            ax.axvline(step, color="#000000", linewidth=0.8, linestyle=":")
        ax.plot(
            marks, [1.0] * len(marks), transform=foot, linestyle="none", marker="v", color="#000000",
            label=picture.marked, clip_on=False,
        )  # fmt: skip
    handles, labels = ax.get_legend_handles_labels()
    if len(labels) > 1:
        fig.legend(
            handles, labels, frameon=False, fontsize=9, loc="outside lower center", ncols=4
        )
    return fig


PRE = (
    "white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.35; margin: 0.4em 0; "
    "font-family: var(--jp-code-font-family, monospace); font-size: 12px"
)
CELL = "text-align: left; vertical-align: top; white-space: normal; padding: 2px 8px; line-height: 1.35"


def page_of(shown: Shown, title: str, source: str = "") -> str:
    """HTML: the lines, the picture, what the doctor says first, and the code that did it to unfold."""
    parts = [f"<div><b>{escape(title)}</b></div>", _pre("\n".join(shown.lines))]
    if shown.picture is not None:
        alt = f"{title}. {', '.join(shown.picture.curves)} over {shown.picture.xlabel}s."
        data = base64.b64encode(png_of(figure_of(shown, title))).decode()
        parts.append(f'<img alt="{escape(alt)}" src="data:image/png;base64,{data}">')
    parts += ["<div><b>The doctor says</b></div>", _finding(shown.first)]
    if source:
        parts.append(
            f"<details><summary>The code that did it</summary>{_pre(source)}</details>"
        )
    return "\n".join(parts)


def _pre(text: str) -> str:
    return f'<pre style="{PRE}">{escape(text)}</pre>'


def _finding(finding: Finding | None) -> str:
    """A finding as a table, whose long sentences wrap beside their names."""
    if finding is None:
        return "<div>Nothing found: all that was looked at holds.</div>"
    rows = [("symptom", finding.symptom)]
    rows += [("evidence", str(evidence)) for evidence in finding.evidence[:3]]
    rows += [("cause", finding.cause), ("fix", finding.fix)]
    rows += [("lesson", finding.lesson)] if finding.lesson else []
    cells = "".join(
        f'<tr><td style="{CELL}; font-weight: 600">{name}</td><td style="{CELL}">{escape(text)}</td></tr>'
        for name, text in rows
    )
    mark = f"<div><code>{finding.severity.upper()} {finding.rule}</code></div>"
    return f"{mark}<table>{cells}</table>"

"""The pictures of lesson 06: the state machine, temperatures over simulated time, poll interval against overshoot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from safetrain_core import Thresholds, next_state

from . import thermal as lab
from .figures import STYLES, draw, mark_skips, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: A walk through the whole table, by hand: what the sensor says, one reading after the other.
WALK: tuple[float, ...] = (70, 84, 86, 80, math.nan, 74, 88, 96, 20)

#: Where the three states stand, left to right.
PLACES = {"normal": 0.0, "paused": 4.0, "aborted": 8.0}


def walked(limits: Thresholds, readings: Sequence[float] = WALK) -> list[str]:
    """The state after each reading, from normal on."""
    states = [lab.NORMAL]
    for celsius in readings:
        states.append(next_state(states[-1], celsius, limits))
    return [str(state) for state in states[1:]]


def walk_around(limits: Thresholds) -> tuple[float, ...]:
    """``WALK``, moved so that it passes these thresholds in the same way."""
    pause, resume, critical = limits.pause_c, limits.resume_c, limits.critical_c
    between = (pause + resume) / 2
    return (resume - 5, pause - 0.5, pause + 1, between, math.nan, resume - 1, pause + 2, critical + 1, 20)  # fmt: skip


def machine_figure(limits: Thresholds, now: str | None = None, title: str | None = None) -> Figure:  # fmt: skip
    """The three states and what leads from one to the other; ``now`` is drawn filled."""
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

    fig, ax = draw(title or "Three states, and no way out of the third", "", "", height=3.0)
    ax.set_axis_off()
    ax.set_xlim(-1.3, 9.3)
    ax.set_ylim(-2.2, 2.2)
    for state, x in PLACES.items():
        here = state == now
        ax.add_patch(
            FancyBboxPatch(
                (x - 0.85, -0.4),
                1.7,
                0.8,
                boxstyle="round,pad=0.1",
                facecolor="#111111" if here else "#FFFFFF",
                edgecolor="#D55E00" if state == "aborted" else STYLES[0]["color"],
                linewidth=2,
            )
        )
        color = "#FFFFFF" if here else "#111111"
        ax.text(x, 0, state, ha="center", va="center", fontsize=11, color=color)

    def arrow(start: tuple[float, float], end: tuple[float, float], bend: float) -> None:
        ax.add_patch(
            FancyArrowPatch(
                start,
                end,
                connectionstyle=f"arc3,rad={bend}",
                arrowstyle="-|>",
                mutation_scale=14,
                color="#333333",
            )
        )

    arrow((1.0, 0.25), (3.0, 0.25), -0.25)
    ax.text(2.0, 0.72, f"t > {limits.pause_c:g} C", ha="center", fontsize=9)
    arrow((3.0, -0.25), (1.0, -0.25), -0.25)
    ax.text(2.0, -0.95, f"t < {limits.resume_c:g} C", ha="center", fontsize=9)
    arrow((5.0, 0.0), (7.0, 0.0), 0.0)
    ax.text(6.0, 0.18, f"t > {limits.critical_c:g} C", ha="center", fontsize=9)
    arrow((0.0, 0.55), (8.0, 0.55), -0.28)
    ax.text(4.0, 1.85, f"t > {limits.critical_c:g} C", ha="center", fontsize=9)
    ax.text(
        4.0,
        -1.75,
        "unknown: stay where you are; three in a row: aborted",
        ha="center",
        fontsize=9,
    )
    return fig


def machine_picture(limits: Thresholds, number: int) -> tuple[Figure, str]:
    """The machine after the first ``number`` readings of the walk, and its text."""
    readings = walk_around(limits)
    states = ["normal", *walked(limits, readings)]
    now = states[number]
    said = "at the start" if number == 0 else f"after reading {number}, {readings[number - 1]:g} C"  # fmt: skip
    text = f"The state machine {said}: {now}."
    return machine_figure(limits, now, f"{said[0].upper()}{said[1:]}: {now}"), text


def threshold_lines(ax: Axes, limits: Thresholds, *, resume: bool = True) -> None:
    """A line at each threshold, named beside its right end."""
    named = [("critical", limits.critical_c, "-"), ("pause", limits.pause_c, "--")]
    named += [("resume", limits.resume_c, ":")] if resume else []
    for name, celsius, line in named:
        ax.axhline(celsius, color="#000000", linestyle=line, linewidth=1.0)
        ax.annotate(
            f"{name} {celsius:g}",
            (1, celsius),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )


def shade(ax: Axes, spans: Sequence[tuple[float, float]], label: str) -> None:
    """Grey from foot to top while a state lasted, hatched so that it is not taken for paper."""
    for number, (start, end) in enumerate(spans):
        ax.axvspan(
            start,
            end,
            facecolor="#DDDDDD",
            edgecolor="#AAAAAA",
            hatch="//",
            linewidth=0,
            label=label if number == 0 else None,
        )


def course_on(ax: Axes, course: lab.Course, *, shaded: str = "paused") -> None:
    """A temperature over simulated seconds, with one state shaded."""
    shade(ax, course.spans(shaded), shaded.upper())
    ax.plot(course.seconds, course.celsius, **{**style(0), "marker": ""})


def run_figure(
    run: lab.HotRun,
    limits: Thresholds,
    title: str,
    *,
    shaded: str = "paused",
    note: tuple[float, str] | None = None,
) -> Figure:
    """The card's temperature during a training run: what was shaded, what was skipped, where it was aborted.

    ``note``: a second, and what happened then.
    """
    fig, ax = draw(title, "simulated time (s)", "temperature (C)", height=3.2)
    course = run.bench.course
    course_on(ax, course, shaded=shaded)
    threshold_lines(ax, limits)
    mark_skips(ax, run.skipped_at, label="SKIP")
    if run.abort is not None:
        ax.plot(
            course.seconds[-1],
            course.celsius[-1],
            linestyle="none",
            marker="*",
            markersize=13,
            color="#D55E00",
            markeredgecolor="#000000",
            label="ABORT",
        )
    if note is not None:
        at = course.celsius[course.seconds.index(note[0])]
        ax.annotate(
            note[1],
            (note[0], at),
            xytext=(-10, -45),
            textcoords="offset points",
            ha="right",
            arrowprops={"arrowstyle": "-|>", "linewidth": 0.8},
            fontsize=9,
        )
    with_legend(ax, course.seconds[-1])
    return fig


def with_legend(ax: Axes, seconds: float) -> None:
    """Room for a legend above the curve, where nothing is drawn."""
    ax.set_ylim(20, 130)
    ax.set_yticks(range(20, 121, 20))
    ax.set_xlim(0, seconds * 1.02)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=True, framealpha=1, edgecolor="none", loc="upper left", ncols=3, fontsize=9)  # fmt: skip


def flapping_figure(courses: dict[str, lab.Course], limits: Thresholds) -> Figure:
    """The same minutes under one threshold and under two, one above the other."""
    from matplotlib.figure import Figure as NewFigure

    fig = NewFigure(figsize=(7.2, 3.8), layout="constrained")
    panels = fig.subplots(len(courses), 1, sharex=True, sharey=True)
    for ax, (name, course) in zip(panels, courses.items(), strict=True):
        course_on(ax, course)
        ax.set_title(
            f"{name}: {course.pauses} pauses in 10 minutes", fontsize=11, loc="left"
        )
        ax.axhline(limits.pause_c, color="#000000", linestyle="--", linewidth=1.0)
        if name != next(iter(courses)):
            ax.axhline(limits.resume_c, color="#000000", linestyle=":", linewidth=1.0)
        ax.set_ylabel("temperature (C)")
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
    panels[0].legend(
        frameon=True, framealpha=1, edgecolor="none", loc="upper left", fontsize=9
    )
    panels[-1].set_xlabel("simulated time (s)")
    panels[-1].set_xlim(0, 200)
    panels[-1].set_ylim(limits.resume_c - 15, limits.pause_c + 8)
    return fig


def overshoot_figure(found: dict[int, float], limits: Thresholds) -> Figure:
    """The hottest before the first pause, over the poll interval; found, and the most that the formula allows."""
    fig, ax = draw(
        "Read too rarely, and a card passes critical between two readings",
        "poll interval (s)",
        "hottest (C)",
        height=3.2,
    )
    longest = max(found)
    grid = [longest * i / 100 for i in range(101)]
    ceiling = [lab.ceiling_c(limits.pause_c, p) for p in grid]
    ax.plot(grid, ceiling, **{**style(1), "marker": ""}, label="the most it can reach")
    ax.plot(list(found), list(found.values()), **{**style(0), "linestyle": "none"}, label="found, reading at the worst moment")  # fmt: skip
    threshold_lines(ax, limits, resume=False)
    at = lab.longest_poll_s(limits.pause_c, limits.critical_c)
    ax.annotate(
        f"{at:.0f} s",
        (at, limits.critical_c),
        xytext=(0, -34),
        textcoords="offset points",
        ha="center",
        arrowprops={"arrowstyle": "-|>", "linewidth": 0.8},
        fontsize=9,
    )
    ax.set_xlim(0, longest * 1.03)
    ax.legend(frameon=False, loc="upper left", fontsize=9)
    return fig


def settings_picture(pause_c: int, gap_c: int, poll_s: int, seconds: int = 600) -> tuple[Figure, str]:  # fmt: skip
    """The figure of the control: ten minutes under these settings, and its text."""
    limits = Thresholds(pause_c, pause_c - gap_c, lab.CRITICAL_C)
    course = lab.simulate(lab.guard_rule(pause_c, pause_c - gap_c), seconds=seconds, poll_s=poll_s)  # fmt: skip
    ended = course.hottest_c > limits.critical_c and course.seconds[-1] < seconds
    end = f"aborted after {course.seconds[-1]:.0f} s" if ended else f"trains {100 * course.trained:.0f}% of the time"  # fmt: skip
    words = f"{course.pauses} pauses, hottest {course.hottest_c:.1f} C, {end}"
    fig, ax = draw(words, "simulated time (s)", "temperature (C)", height=3.2)
    course_on(ax, course)
    threshold_lines(ax, limits)
    with_legend(ax, seconds)
    return fig, (
        f"Temperature over ten minutes with pause at {pause_c} C, resume at {pause_c - gap_c} C and a reading every "
        f"{poll_s} s: {words}."
    )

"""The table that ``make bench`` prints and keeps in ``tests/benchmarks/RESULTS.md``: its rows, written and read."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

KEPT = Path(__file__).parent / "benchmarks" / "RESULTS.md"

#: Areas in the order of the table.
AREAS = (
    "step",
    "accumulation",
    "trainer",
    "several ranks",
    "checkpoint",
    "sharded",
    "memory",
    "thermal",
    "low rank",
    "doctor",
    "kit",
)

HOLDS, SHORT, COMPARED, SKIPPED, BROKEN = "holds", "FALLS SHORT", "-", "skipped", "DID NOT END"
COLUMNS = ("area", "what", "measured", "target", "verdict", "spread")

#: What is measured, and measured with: their versions are told.
PACKAGES = (
    "torch",
    "numpy",
    "lightning",
    "accelerate",
    "galore-torch",
    "apollo-torch",
    "ckptplan",
    "runmedic",
    "losslint",
)


@dataclass(frozen=True)
class Row:
    """One line: ``value`` in ``unit``; ``sign`` (``<=``, ``>=``) and ``target``, or None for what is only compared."""

    area: str
    what: str
    value: float
    unit: str = ""
    sign: str | None = None
    target: float | None = None
    low: float | None = None
    high: float | None = None
    why: str | None = None  # it was skipped, or did not end

    @property
    def verdict(self) -> str:
        """Whether it holds; NaN never does."""
        if self.why is not None:
            return SKIPPED if self.why.startswith("skipped") else BROKEN
        if self.sign is None or self.target is None:
            return COMPARED
        return HOLDS if (self.value <= self.target if self.sign == "<=" else self.value >= self.target) else SHORT

    def cells(self) -> tuple[str, ...]:
        """As the table shows it.

        >>> Row("step", "ours / theirs", 1.0312, "x", "<=", 1.03, 0.99, 1.1).cells()
        ('step', 'ours / theirs', '1.031 x', '<= 1.03 x', 'FALLS SHORT', '0.990 to 1.100')
        """
        unit = f" {self.unit}" if self.unit else ""
        if self.why is not None:
            return self.area, self.what, self.why, "", self.verdict, ""
        target = "" if self.target is None else f"{self.sign} {shown(self.target, exact=True)}{unit}"
        spread = "" if self.low is None or self.high is None else f"{shown(self.low)} to {shown(self.high)}"
        return self.area, self.what, f"{shown(self.value)}{unit}", target, self.verdict, spread


def shown(value: float, *, exact: bool = False) -> str:
    """A number as it is printed: whole ones whole, others by three places, small ones by three digits.

    >>> [shown(v) for v in (3.0, 1.03125, 0.00012345, 123456.0, 0.0, math.inf)]
    ['3', '1.031', '0.000123', '123456', '0', 'inf']
    """
    if exact or not math.isfinite(value):
        return f"{value:g}"
    if value == int(value):
        return str(int(value))
    return f"{value:.3f}" if abs(value) >= 0.01 else f"{value:.3g}"


def in_order(rows: Iterable[Row]) -> list[Row]:
    """By area, and as they came within one."""
    return sorted(rows, key=lambda row: AREAS.index(row.area) if row.area in AREAS else len(AREAS))


def as_text(rows: Iterable[Row]) -> list[str]:
    """Lines for a terminal."""
    table = [COLUMNS, *(row.cells() for row in in_order(rows))]
    widths = [max(len(line[i]) for line in table) for i in range(len(COLUMNS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]


def as_markdown(rows: Iterable[Row]) -> str:
    """The table alone."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for row in in_order(rows):
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row.cells()) + " |")
    return "\n".join(lines)


def machine() -> list[str]:
    """What it was measured on, in general words: no name of a host, no path."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    told = [f"{cores} cores ({_cpu()})"]
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        told.append(f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB of memory")
    told += [f"{platform.system()} on {platform.machine()}", f"Python {platform.python_version()}"]
    return told


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", text, flags=re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def versions() -> list[str]:
    """Each package with its version, or that it is missing."""
    told = []
    for name in PACKAGES:
        try:
            told.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            told.append(f"{name} not installed")
    return told


def write(rows: list[Row], path: Path, *, date: str, took: dict[str, float]) -> None:
    """The whole page, put in place by one rename."""
    verdicts = [row.verdict for row in rows]
    claims = verdicts.count(HOLDS) + verdicts.count(SHORT)
    missing = f", {verdicts.count(BROKEN)} benches did not end" if BROKEN in verdicts else ""
    missing += f", {verdicts.count(SKIPPED)} skipped" if SKIPPED in verdicts else ""
    fall = f"{verdicts.count(SHORT)} of them fall{'s' * (verdicts.count(SHORT) == 1)} short"
    minutes = sum(took.values()) / 60
    page = f"""# Measured

Written by `make bench`; do not edit. {claims} claims, {fall}{missing}.

- when: {date}, {minutes:.0f} minutes in all
- on: {", ".join(machine())}
- with: {", ".join(versions())}

A ratio of times (x) is the median over rounds in which ours and the other ran in turn, on this machine, and its spread
are the quartiles of the rounds: other machines have other ratios. What is counted (reads, passes, messages, bytes,
runs) repeats exactly. A verdict of {COMPARED} stands beside what is there for comparison only.

{as_markdown(rows)}

Minutes by file: {", ".join(f"{name} {seconds / 60:.1f}" for name, seconds in took.items())}.
"""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(page, encoding="utf-8")
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def read(path: Path = KEPT) -> list[Row]:
    """The rows of a kept table; skipped and broken ones left out.

    Raises:
        ValueError: a line that is no row.
    """
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("| ") or line.startswith("| area |"):
            continue
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) != len(COLUMNS):
            raise ValueError(f"{path.name} has a row of {len(cells)} cells: {line[:80]}")
        area, what, measured, target, verdict, _ = cells
        if verdict in (SKIPPED, BROKEN):
            continue
        value, _, unit = measured.partition(" ")
        sign, number = target.split()[:2] if target else (None, None)
        rows.append(Row(area, what, float(value), unit, sign, None if number is None else float(number)))
    return rows

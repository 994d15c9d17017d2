"""The doctor: every rule on one log; findings by severity; what was looked at, and what could not be."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .crash_texts import CrashTextError, crash_findings
from .finding import SEVERITIES, Evidence, Finding
from .log import Log
from .readers import read_log
from .rule import Rule
from .rules import RULES
from .rules_resume import leaves_baseline

__all__ = ["HEALTHY", "NOT_CHECKED", "diagnose"]

#: Names of the two findings that are always about the examination itself.
HEALTHY, NOT_CHECKED = "healthy", "not_checked"

#: Rows below which the curve's own rules have nothing to go by.
FEW_ROWS = 20

#: Findings that are left out where one of these has been found: it says why.
EXPLAINED_BY = {
    "diverged": {"spike_stays", "nan_stays"},
    "clips_every_step": {"norm_follows_scale"},
    "not_learning": {"nan_stays", "spike_stays", "scale_never_moves"},
}

#: What the lines of a traceback behind the rows look like to the rules of a log.
BENT_BY_A_CRASH = {"log_ragged", "log_torn", "log_not_numbers"}

#: Endings of files that only rows are written to.
TABLES = {".csv", ".tsv", ".json", ".jsonl"}

#: Role -> what a reader calls it.
_CALLED = {
    "loss": "loss",
    "val_loss": "validation loss",
    "lr": "learning rate",
    "norm": "gradient norm",
    "clipped": "gradient norm after the clip",
    "scale": "scaling factor",
    "skipped": "skipped",
    "temperature": "GPU temperature",
    "thermal_event": "thermal event",
}


def diagnose(
    rows: Any,
    *,
    baseline: Any = None,
    columns: Mapping[str, str] | None = None,
    rules: Sequence[Rule] = RULES,
) -> list[Finding]:
    """Find what is wrong with a run, from its log alone, or from the text that it ended in.

    Args:
        rows: a path, a pandas frame, a list of dicts or ``StepLog``; see ``read_log``. A text file that is no log, but
            holds a known error message (a traceback, what a run wrote to stderr), is judged by that.
        baseline: the log of the run that this one should repeat step by step, for example before an interruption.
        columns: role -> name of the log's column, where it has an unusual name: ``{"loss": "my_loss"}``. Roles: ``step,
            epoch, loss, val_loss, lr, norm, clipped, scale, skipped, temperature, skip_reason, thermal_event``.
        rules: which to try.

    Returns:
        Findings, errors first, then warnings, then what is good to know; among equals the one that begins first. At the
        end ``healthy`` where there is neither error nor warning, and ``not_checked`` with the rules that lack their
        columns.

    Raises:
        ValueError: the log cannot be read, or holds nothing that a run is judged by.

    >>> rows = [{"step": s, "loss": float("nan") if s > 6 else 3 - s / 10, "lr": 0.1} for s in range(1, 13)]
    >>> found = diagnose(rows)
    >>> found[0].rule, found[0].severity, found[0].evidence[0].step, found[-1].rule
    ('nan_stays', 'error', 7, 'not_checked')
    """
    try:
        log = read_log(rows, columns)
    except CrashTextError as crash:
        return crash.findings
    findings: list[Finding] = []
    checked: list[str] = []
    lacking: dict[str, list[str]] = {}
    for rule in rules:
        if lacks := rule.lacks(log):
            lacking[rule.name] = lacks
            continue
        checked.append(rule.name)
        findings += rule.look(log)
    if baseline is not None:
        findings += leaves_baseline(log, read_log(baseline, columns))
        checked.append("leaves_baseline")
    if _may_hold_a_crash(log) and (behind := crash_findings(Path(log.source))):
        # The traceback's own lines are no rows with faults.
        findings = [finding for finding in findings if finding.rule not in BENT_BY_A_CRASH] + behind
    errors = {finding.rule for finding in findings if finding.severity == "error"}
    findings = [finding for finding in findings if not errors & EXPLAINED_BY.get(finding.rule, set())]
    findings.sort(key=_rank)
    if all(finding.severity == "info" for finding in findings):
        findings.append(_healthy(log, checked))
    if lacking:
        findings.append(_not_checked(lacking))
    return findings


def _may_hold_a_crash(log: Log) -> bool:
    """Whether a traceback may stand behind the rows: some lines are no rows, or all output went into one file."""
    path = Path(log.source)
    return path.is_file() and (bool(log.faults.keys() & {"ragged", "torn"}) or path.suffix not in TABLES)


def _rank(finding: Finding) -> tuple[int, float]:
    """By severity; among equals by the step at which they begin: the first may explain those after it."""
    begins = finding.evidence[0].step if finding.evidence else None
    return SEVERITIES.index(finding.severity), math.inf if begins is None else begins


def _healthy(log: Log, checked: Sequence[str]) -> Finding:
    count = len(log.series.get("loss", next(iter(log.series.values()))))
    values: dict[str, float | int | str | None] = {"rows": log.lines}
    for role in ("loss", "lr", "norm", "scale"):
        if role in log.series:
            values[f"last {_CALLED[role]}"] = float(log.series[role].values[-1])
    few = count < FEW_ROWS
    return Finding(
        f"nothing found in {count} step{'s' * (count != 1)}" + (", too few to say much" if few else ""),
        HEALTHY,
        "info",
        (Evidence(int(log.steps[-1]), values),),
        f"looked for: {', '.join(checked)}",
        "log more steps" if few else "nothing to do; what a log cannot show, the probes can",
    )


def _not_checked(lacking: Mapping[str, Sequence[str]]) -> Finding:
    """One finding for all rules that could not look, by what they lack."""
    by_need: dict[str, list[str]] = {}
    for name, needs in lacking.items():
        for need in needs:
            ways = [" and ".join(_CALLED[role] for role in way.split("+")) for way in need.split("|")]
            by_need.setdefault(" or ".join(ways), []).append(name)
    told = "; ".join(f"{need} (for {', '.join(names)})" for need, names in by_need.items())
    role = re.split(r"[|+]", next(iter(lacking.values()))[0])[0]
    return Finding(
        f"{len(lacking)} rule{'s' * (len(lacking) != 1)} could not look",
        NOT_CHECKED,
        "info",
        (),
        f"the log has no {told}",
        f"log them, or name their columns: --columns {role}=NAME",
    )

"""``safetrain diagnose``: what is wrong with the runs whose logs are named. No torch: the answer comes at once."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .columns import ROLES
from .finding import Finding

__all__ = ["add_diagnose_parser", "run_diagnose", "to_plain"]

#: Endings of the pictures that can be written.
PICTURES = (".png", ".pdf", ".svg", ".jpg", ".webp")


def add_diagnose_parser(verbs: Any) -> None:
    """Add the verb and its flags to the command line's."""
    verb = verbs.add_parser(
        "diagnose",
        help="say what is wrong with a run, from its log",
        description="Name symptom, evidence, cause, fix and lesson for what a run's log shows: a CSV (ours, "
        "Lightning's, any with a header), JSON lines, the rows that a run of ours has printed, Hugging Face's "
        "trainer_state.json, a folder of TensorBoard events, a folder with one of them, or the text of a crash: a "
        "traceback, what a run wrote to stderr. Exit status 1 for a finding of severity error.",
        allow_abbrev=False,
    )
    verb.add_argument("log", nargs="*", type=Path, metavar="LOG", help="a log, or a folder with one")
    verb.add_argument(
        "--baseline", type=Path, metavar="LOG", help="the run that LOG should repeat: names the first step that differs"
    )
    verb.add_argument(
        "--columns",
        nargs="+",
        default=[],
        metavar="ROLE=NAME",
        help=f"what an unusual column holds, for example loss=my_loss; roles: {', '.join(ROLES)}",
    )
    verb.add_argument("--json", action="store_true", help="print the findings as JSON")
    verb.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves with the evidence marked (matplotlib)")


def to_plain(finding: Finding) -> dict[str, Any]:
    """A finding as plain values for JSON; numbers that JSON does not know (NaN, infinity) as text.

    >>> from .finding import Evidence
    >>> found = Finding("loss is NaN", "nan_stays", "error", (Evidence(8, {"loss": float("nan")}),), "a", "b")
    >>> to_plain(found)["evidence"]
    [{'step': 8, 'values': {'loss': 'nan'}}]
    """

    def plain(value: float | int | str | None) -> float | int | str | None:
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    return {
        "rule": finding.rule,
        "severity": finding.severity,
        "symptom": finding.symptom,
        "evidence": [
            {"step": evidence.step, "values": {name: plain(value) for name, value in evidence.values.items()}}
            for evidence in finding.evidence
        ],
        "cause": finding.cause,
        "fix": finding.fix,
        "lesson": finding.lesson,
    }


def _columns(words: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for word in words:
        role, equals, name = word.partition("=")
        if not equals or not name:
            raise ValueError(f"--columns {word} must be ROLE=NAME, for example loss=my_loss")
        pairs[role] = name
    return pairs


def run_diagnose(args: argparse.Namespace) -> tuple[str, int]:
    """What to print, and the exit status: 1 where a finding is an error.

    Raises:
        ValueError: a log that cannot be used; an option that cannot be carried out.

    >>> import tempfile
    >>> parser = argparse.ArgumentParser()
    >>> add_diagnose_parser(parser.add_subparsers())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     log = Path(folder, "log.csv")
    ...     _ = log.write_text("step,loss\\n" + "".join(f"{s},{'nan' if s > 6 else 9 - s}\\n" for s in range(1, 12)))
    ...     text, status = run_diagnose(parser.parse_args(["diagnose", str(log)]))
    >>> print(text.splitlines()[1], status)
    ERROR loss is NaN from step 7 on 1
    """
    from .crash_texts import CrashTextError
    from .doctor import diagnose  # NumPy, only once it is needed
    from .readers import read_log

    # `--columns loss=my_loss LOG`: the option takes all words that follow it.
    logs = [*args.log, *(Path(word) for word in args.columns if "=" not in word and Path(word).exists())]
    columns = _columns([word for word in args.columns if Path(word) not in logs])
    if not logs:
        raise ValueError("name a LOG: a file, or a folder with one")
    if args.plot is not None and len(logs) > 1:
        raise ValueError(f"--plot draws one run, and {len(logs)} logs are named; name one")
    if args.plot is not None and args.plot.suffix.lower() not in PICTURES:
        raise ValueError(f"--plot {args.plot} must end in one of {', '.join(PICTURES)}, for example run.png")
    baseline = read_log(args.baseline, columns) if args.baseline is not None else None
    told: dict[str, list[Finding]] = {}
    crashes: list[str] = []
    drawn = False
    for path in logs:
        try:
            log = read_log(path, columns)
        except CrashTextError as crash:
            told[str(path)] = crash.findings
            crashes.append(str(path))
            continue
        told[str(path)] = diagnose(log, baseline=baseline)
        if args.plot is not None:
            from .plot import save_plot

            save_plot(log, told[str(path)], args.plot, baseline)
            drawn = True
    status = int(any(finding.severity == "error" for found in told.values() for finding in found))
    text = _as_json(told) if args.json else _as_text(told)
    if args.plot is not None and not args.json:
        text += f"\n\npicture: {args.plot if drawn else 'none, since the text of a crash has no curves'}"
    if baseline is not None and crashes and not args.json:
        text += f"\n\nnot compared with {args.baseline}: {', '.join(crashes)}; the text of a crash has no rows"
    return text, status


def _as_json(told: Mapping[str, Sequence[Finding]]) -> str:
    return json.dumps({path: [to_plain(finding) for finding in found] for path, found in told.items()}, indent=2)


def _as_text(told: Mapping[str, Sequence[Finding]]) -> str:
    blocks = []
    for path, found in told.items():
        counts = {name: sum(finding.severity == name for finding in found) for name in ("error", "warning")}
        head = ", ".join(f"{n} {name}{'s' * (n != 1)}" for name, n in counts.items() if n) or "healthy"
        blocks.append("\n".join([f"{path}: {head}", *map(str, found)]))
    return "\n\n".join(blocks)

"""Which figures the README may quote: those of ``tests/benchmarks/RESULTS.md``, by the phrase that quotes them.

Every number in the README's prose (code, generated blocks and the table of lessons left out), in digits or as a word
before "times" or a unit, must stand in one of three kinds of phrases:

- ``FIGURES``: measured; each slot names its row, and has its value, rounded as the README writes it, or its target;
- ``CONFIGURED``: a default of the config; each slot names the field;
- ``PLAIN``: no measurement at all; each with the reason why it is none.

A phrase is compared without line breaks. ``make readme`` writes the present values into the slots of ``FIGURES``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from results import HOLDS, Row

from safetrain_core.config import TrainConfig

README = Path(__file__).parents[1] / "README.md"

#: Phrase with slots -> the row of each, as "area: what". ``{}`` is what was measured; ``{target}`` is the row's target,
#: and the row has to hold; several rows may stand behind one, by "; ".
FIGURES = {
    "it found at least {} of 20 of each symptom, and gave {} error in {} healthy runs": (
        "doctor: found least often of all symptoms",
        "doctor: healthy runs with an error",
        "doctor: healthy runs examined",
    ),
    "within {target} % of the count": (
        "memory: predicted against counted peak bytes, flash, largest error; "
        "memory: predicted against counted peak bytes, math, largest error",
    ),
    "its state is {} MiB, AdamW's {}.": (
        "low rank: state of GaLore, rank 64",
        "low rank: state of AdamW, 8 x 512 x 1024",
    ),
    "an update costs about {} times fused AdamW's": ("low rank: GaLore update / fused AdamW's, between bases",),
    "`make setup` installs all, about {} GB with a CPU build of torch": (
        "kit: size of all that make setup installs, with a CPU build of torch",
    ),
    "keeps {} % of the activations of 16 layers between forward and backward, and peaks at {} %": (
        "memory: full: bytes kept / none, math, 16 layers, seq 128",
        "memory: full: peak / none (1/16 is the floor)",
    ),
}

#: Phrase with slots -> the config's field behind each.
CONFIGURED = {
    "temperature every {} s": ("gpu_temp_poll_interval_seconds",),
    "Above {} C the run saves a checkpoint and waits; below {} C it goes on": (
        "gpu_temp_pause_threshold_c",
        "gpu_temp_resume_threshold_c",
    ),
    "Above {} C, or when the sensor is lost": ("gpu_temp_critical_threshold_c",),
}

#: Phrase -> why it is no measurement.
PLAIN = {
    "With Python 3.11 or newer": "the oldest Python supported; a test compares it with pyproject.toml",
    "Exit status: 0 done, 1 the run failed, a checkpoint is broken, nothing fits, a finding is an error or there is no "
    "GPU to watch, 2 a mistake in the arguments or a checkpoint of something "
    "else (nothing was changed), 75 too hot, "
    "130 and 143 interrupted": "exit statuses, which the tests of the command compare",
    "skips above 5 %": "where a rule of the doctor begins to speak",
    "`nan_check_interval` is above 1": "a value of a field",
    "stops with status 75": "an exit status",
    "(GaLore, arXiv:2403.03507)": "a paper's number",
    "for eight 512 x 1024 weights at rank 64": "what was measured, not how much",
    "a function of a module on 4 ranks": "the example's own argument",
    "16-bit parts": "a width in bits",
    "the loss scale halves only": "what the scaler does: a factor of 2",
    "Loss over 20 steps": "what the picture shows",
    "exits with 0 only if": "an exit status",
    "`browser`, 165 MB": "the size of an optional package of others, which nothing here changes",
    "steps that stand twice": "a symptom",
    "count a few samples twice": "what padding does",
}

_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_UNITS = r"times|fold|per ?cent|%|seconds?|minutes?|hours?|[kMGT]i?B|x\b"
#: A number in digits that is no part of a name (FP16, sha256, FSDP2), or in words where something is measured.
NUMBER = re.compile(
    rf"(?<![A-Za-z_\d.])\d[\d,]*(?:\.\d+)?|\b(?:{'|'.join(_WORDS)}|twenty|hundred|thousand)[ -](?:{_UNITS})"
    r"|\b(?:twice|thrice|half|halves|halved|halving|doubles?d?|quarter of|third of|tenfold)\b",
    flags=re.IGNORECASE,
)
SLOT = re.compile(r"\{(target)?\}")
IN_SLOT = rf"\d[\d,]*(?:\.\d+)?|{'|'.join(_WORDS)}"


def prose(text: str) -> str:
    """The README without code, generated blocks, the table of lessons, comments and the addresses of links."""
    text = re.sub(r"^```.*?^```", " ", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!-- (.+?): made by.*?end of \1 -->", " ", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", " ", text, flags=re.DOTALL)
    text = re.sub(r"^\|[^\n]*\| minutes \|\n(?:\|.*\n)+", " ", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return re.sub(r"\s+", " ", text)


def _pattern(phrase: str) -> re.Pattern[str]:
    """``phrase`` in a text with any line breaks, a group for each slot."""
    parts = [r"\s+".join(map(re.escape, part.split(" "))) for part in SLOT.split(phrase)[::2]]
    return re.compile(f"({IN_SLOT})".join(parts), flags=re.IGNORECASE)


def as_number(written: str) -> tuple[float, int]:
    """What a slot says, and to how many decimals.

    >>> as_number("1.40"), as_number("Six"), as_number("2,000")
    ((1.4, 2), (6.0, 0), (2000.0, 0))
    """
    if written.lower() in _WORDS:
        return float(_WORDS.index(written.lower())), 0
    plain = written.replace(",", "")
    return float(plain), len(plain.partition(".")[2])


def as_written(value: float, like: str) -> str:
    """``value`` in the manner of ``like``: as many decimals, or a word.

    >>> as_written(5.03, "six"), as_written(1.357, "1.4"), as_written(31.7, "no")
    ('five', '1.4', '32')
    """
    whole = round(value)
    if like.lower() in _WORDS and whole < len(_WORDS) and (whole > 0 or like.lower() == "no"):
        return _WORDS[whole]
    return f"{value:.{as_number(like)[1]}f}"


def _expected(slot: str, row: Row, written: str) -> str:
    if slot != "target" or row.target is None:
        return as_written(row.value, written)
    if row.verdict != HOLDS:
        return f"nothing: {row.area}: {row.what} {row.verdict}"
    return as_written(row.target, written)


def _slots(phrase: str) -> list[str]:
    return [slot or "" for slot in SLOT.findall(phrase)]


def rows_behind(named: str, rows: Mapping[str, Row]) -> list[Row]:
    missing = [name for name in named.split("; ") if name not in rows]
    if missing:
        raise ValueError(
            f"RESULTS.md has no row {missing[0]!r}; run make bench, or name another row in tests/quoted.py"
        )
    return [rows[name] for name in named.split("; ")]


def by_name(rows: Iterable[Row]) -> dict[str, Row]:
    """Rows as ``FIGURES`` names them."""
    return {f"{row.area}: {row.what}": row for row in rows}


def wrong(text: str, rows: Iterable[Row]) -> list[str]:
    """What is wrong with the figures of a README, each with what to do; nothing where all is well."""
    told, covered, text = [], [], prose(text)
    named, defaults = by_name(rows), TrainConfig()

    def look(phrase: str, expected: Callable[[int, str], list[str]]) -> None:
        found = list(_pattern(phrase).finditer(text))
        if not found:
            told.append(
                f"the README does not say {phrase!r} any more: take it out of tests/quoted.py, or mend it there"
            )
        for match in found:
            covered.append(match.span())
            for number, written in enumerate(match.groups()):
                told.extend(
                    f"the README says {written!r} in {match[0]!r}, and it should be {value}: make readme"
                    for value in expected(number, written)
                    if value != written.lower()
                )

    for phrase, names in FIGURES.items():
        slots = _slots(phrase)
        look(phrase, lambda i, w, s=slots, n=names: [_expected(s[i], row, w) for row in rows_behind(n[i], named)])
    for phrase, fields in CONFIGURED.items():
        look(phrase, lambda i, w, f=fields: [as_written(getattr(defaults, f[i]), w)])
    for phrase in PLAIN:
        look(phrase, lambda i, w: [])
    for match in NUMBER.finditer(text):
        if any(start <= match.start() and match.end() <= end for start, end in covered):
            continue
        around = text[max(0, match.start() - 40) : match.end() + 30]
        if _in_code(text, match.start()):
            continue
        told.append(
            f"no row of RESULTS.md stands behind {match[0]!r} in {around!r}: measure it in tests/benchmarks and name "
            "its row in FIGURES of tests/quoted.py; or, if it is no measurement, say why in PLAIN there"
        )
    return told


def _in_code(text: str, at: int) -> bool:
    """Inside a code span with a letter in it: a name or a command. A bare number in backticks is a number."""
    spans = (match for match in re.finditer(r"`[^`]*`", text) if match.start() < at < match.end())
    return any(re.search("[A-Za-z]", span[0]) for span in spans)


def with_present_figures(text: str, rows: Iterable[Row]) -> str:
    """A README with the measured values of ``rows`` in the slots of ``FIGURES``."""
    named = by_name(rows)
    for phrase, names in FIGURES.items():
        slots = _slots(phrase)

        def renewed(match: re.Match[str], slots: list[str] = slots, names: tuple[str, ...] = names) -> str:
            whole, start = match[0], match.start()
            for i in reversed(range(len(slots))):
                value = _expected(slots[i], rows_behind(names[i], named)[0], match[i + 1])
                whole = whole[: match.start(i + 1) - start] + value + whole[match.end(i + 1) - start :]
            return whole

        text = _pattern(phrase).sub(renewed, text)
    return text

"""The log itself, and what the card did: torn or repeated rows, thermal pauses."""

from __future__ import annotations

import re

import numpy as np

from .finding import Evidence, Finding
from .log import Log, Series
from .rule import rule

__all__ = ["log_is_whole", "thermal_pauses"]

#: From this temperature on a card slows itself down, or soon will, C.
HOT_C = 85.0
#: Readings above it that count.
HOT_READINGS = 3

#: Fault of the log -> what is seen, cause, fix.
_FAULTS = {
    "backwards": (
        "the steps go backwards {n} times",
        "a run was resumed from an earlier checkpoint, or started again, and wrote on into the old log",
        "drop the rows after the checkpoint's step when a run resumes (SafeTrainer's log does), and give a new run a "
        "new file; judged here are the rows that were written last",
    ),
    "twice": (
        "{n} steps stand twice",
        "several processes (ranks) write one log, or a step is logged twice",
        "let only rank 0 write; judged here is the last row of each step",
    ),
    "torn": (
        "the last line is cut off",
        "the run was killed while it wrote",
        "trim that line before writing on; flush a whole row at a time",
    ),
    "header_twice": (
        "the header stands {n} times more inside the log",
        "a run that was started again opened the log to append, and wrote its header",
        "write the header only into an empty file",
    ),
    "ragged": (
        "{n} rows have more or fewer cells than the header",
        "the columns changed while the log went on, or several processes wrote into one file",
        "begin a new file when the columns change; one writer; those rows were left out here",
    ),
    "not_numbers": (
        "{n} cells are no number where one belongs",
        "a text, a tensor's repr or a unit was logged",
        "log plain numbers (loss.item()); those cells were taken as missing",
    ),
}


@rule()
def log_is_whole(log: Log) -> list[Finding]:
    """Each step once, rising, every row whole."""
    found = []
    for kind, where in log.faults.items():
        seen, cause, fix = _FAULTS[kind]
        number = f"{len(where)}{' or more' if len(where) >= 100 else ''}"
        found.append(
            Finding(seen.format(n=number), f"log_{kind}", "warning", tuple(where), cause, fix, "03_checkpoint_resume")
        )
    return found


@rule("thermal_event|temperature")
def thermal_pauses(log: Log) -> list[Finding]:
    """The guard held the run, or the card is so hot that it slows down by itself."""
    events = log.texts.get("thermal_event", {})
    pauses = {row: text for row, text in events.items() if "pause" in text.lower()}
    waited = sum(float(s) for text in events.values() for s in re.findall(r"after ([\d.]+) s", text))
    ended = {row: text for row, text in events.items() if re.search("abort|critical|lost", text.lower())}
    nothing = Series(np.empty(0), np.empty(0), np.empty(0, dtype=np.int64))
    heat = log.series.get("temperature", nothing).finite()
    hot = heat.where(heat.values >= HOT_C)
    if not pauses and not ended and len(hot) < HOT_READINGS:
        return []
    if ended and all(re.search("unknown|sensor", text.lower()) for text in ended.values()):
        where = tuple(Evidence(int(log.steps[row]), {"event": text}) for row, text in ended.items())
        return [
            Finding(
                "the thermal guard ended the run: it could not see the card's temperature any more",
                "sensor_lost",
                "error",
                where,
                "readings came without a number, and a card that cannot be seen may be cooking",
                "look at nvidia-smi and the driver's log; then resume from the checkpoint that it saved",
                "06_thermal_guard",
            )
        ]
    if pauses or ended:
        evidence = [Evidence(int(log.steps[row]), {"event": text}) for row, text in {**ended, **pauses}.items()]
        times, count = (f"{len(pauses)} {word}{'s' * (len(pauses) != 1)}" for word in ("time", "pause"))
        seen = f"the thermal guard paused the run {times}, {waited:.1f} s in all"
        if ended:
            seen = f"the thermal guard ended the run, after {count}"
    else:
        hottest = np.argsort(-hot.values, kind="stable")[:3].tolist()
        evidence = [Evidence(int(hot.steps[i]), {"temperature C": float(hot.values[i])}) for i in hottest]
        seen = f"{len(hot)} readings at or above {HOT_C:g} C"
    return [
        Finding(
            seen,
            "thermal_pauses",
            "error" if ended else "warning",
            tuple(evidence),
            "the card's cooling does not carry this load: air flow, dust, a neighbour, or the power limit",
            "better air flow or a lower power limit; `safetrain watch` shows when it happens; the guard's pauses cost "
            "time, not results",
            "06_thermal_guard",
        )
    ]

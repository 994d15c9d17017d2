"""What a run that has ended with an error says of itself: known messages in a traceback or in what it wrote to stderr.

No torch: the text is all there is. One finding for each fault that it names, with the line quoted.
"""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path
from typing import NamedTuple

from .crash_failures import CRASH_FAILURES
from .finding import Evidence, Finding
from .known import found
from .load_failures import LOAD_FAILURES
from .memory_failures import MEMORY_FAILURES

__all__ = ["CRASHES", "CrashTextError", "crash_findings", "encoding_of"]

#: A quoted line is cut here.
QUOTED = 160
#: Lines kept of a traceback, to see where memory ran out.
TRACE_LINES = 400
#: What one rank's fall does to all others: left out where the text names the fall itself.
CONSEQUENCES = {"collective_timeout", "rank_fell"}


class Crash(NamedTuple):
    """A message: the rule that it means, how it is known, and the symptom to tell."""

    rule: str
    pattern: str
    symptom: str


#: In the order in which they are told. Memory has its own names by where it ran out: see ``_named``.
CRASHES = (
    Crash(
        "out_of_memory",
        r"\b(CUDA|HIP|XPU|MPS)\b.* out of memory|OutOfMemoryError|DefaultCPUAllocator: can't allocate memory",
        "memory ran out",
    ),
    Crash("unscale_twice", r"unscale_\(\) has already been called", "a gradient was to be unscaled twice"),
    Crash("no_inf_checks", r"No inf checks were recorded", "the scaler was stepped without a gradient"),
    Crash("graph_used_twice", r"backward through the graph a second time", "a graph was to be gone through twice"),
    Crash(
        "recompute_differs",
        r"different number of tensors was saved during the original|Recomputed values for the following tensors",
        "a recomputed layer did not repeat its forward pass",
    ),
    Crash("world_size_mismatch", r"world_size mismatch", "the checkpoint is of another number of ranks"),
    Crash(
        "sha256_mismatch", r"sha256 mismatch on|is altered or torn", "a file of the checkpoint is not what was saved"
    ),
    Crash("shard_file_missing", r"shard file missing", "a file of the checkpoint is missing"),
    Crash("unknown_schema", r"unknown schema", "the checkpoint has a layout that is not known here"),
    Crash(
        "torn_file",
        r"PytorchStreamReader failed|The file might be corrupted|EOFError: Ran out of input|has no sha256 at its end",
        "the checkpoint is torn",
    ),
    Crash("not_readable", r"Weights only load failed", "the checkpoint cannot be read as plain tensors"),
    Crash(
        "other_model",
        r"size mismatch for |(Missing|Unexpected) key\(s\) in state_dict|does not fit the (model|optimizer)",
        "the checkpoint does not fit the model",
    ),
    Crash("disk_full", r"No space left on device", "the disk is full"),
    Crash("thermal_abort", r"\bThermalAbort\b|let it cool, look at fans", "the run was stopped for its temperature"),
    Crash("retries_used", r"\bTrainingFailed\b|\d retries used;", "the run gave up after too many bad steps"),
    Crash(
        "collective_timeout",
        r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for|had not ended after timeout_s",
        "ranks waited for one that never came",
    ),
    Crash(
        "rank_fell",
        r"rank \d+ was killed|exitcode\s*: -9\b|Connection closed by peer",
        "a rank ended without a word of its own",
    ),
)

#: Where memory ran out, by what stands in the traceback; the innermost frame counts, so the last match.
_PLACES = (
    ("weights_do_not_fit", re.compile(r"torch/optim/|optimizer\.step\("), "in the optimizer's step"),
    ("weights_do_not_fit", re.compile(r"\bin _apply$|\bin convert$"), "while the model was moved to the device"),
    ("does_not_fit", re.compile(r"\brun_backward\b|\.backward\("), "in the backward pass"),
    ("does_not_fit", re.compile(r"\bin forward$|\bin _call_impl$"), "in the forward pass"),
)
_ANY = re.compile("|".join(f"(?:{crash.pattern})" for crash in CRASHES))
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_FAULTS = {**LOAD_FAILURES, **MEMORY_FAILURES, **CRASH_FAILURES}


class CrashTextError(ValueError):
    """A file that is no log, but the text of a crash; ``findings`` says of which.

    Args:
        path: the file. findings: at least one.
    """

    def __init__(self, path: Path, findings: list[Finding]) -> None:
        super().__init__(
            f"{path} is no log but the text of a crash ({findings[0].symptom}); diagnose({str(path)!r}) says more"
        )
        self.findings = findings


def encoding_of(start: bytes) -> str:
    """How a text that begins like this is encoded: UTF-16, as PowerShell redirects, or UTF-8 with or without a mark.

    >>> encoding_of("step".encode("utf-16")), encoding_of(b"step")
    ('utf-16', 'utf-8-sig')
    """
    return "utf-16" if start[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"


def crash_findings(path: Path) -> list[Finding]:
    """What a text file tells of the crash that it ends in; nothing where it has no known message.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     text = Path(folder, "crash.log")
    ...     _ = text.write_text("Traceback (most recent call last):\\n  ...\\nOSError: No space left on device\\n")
    ...     print(*crash_findings(text), sep="\\n")
    ERROR the disk is full
      evidence  line 3, text OSError: No space left on device
      cause     a save found no room; a file that is written in place is now torn, and the one before it is gone
      fix       free some, keep fewer (rotate_checkpoints); atomic_save leaves the old file whole
      lesson    03_checkpoint_resume
    """
    with path.open("rb") as file:
        start = file.read(4096)
    encoding = encoding_of(start)
    if b"\0" in start.rstrip(b"\0") and encoding != "utf-16":
        return []
    places: dict[str, list[Evidence]] = {}
    told: dict[str, tuple[int, str]] = {}
    trace: deque[str] = deque(maxlen=TRACE_LINES)
    with path.open(encoding=encoding, errors="replace") as lines:
        for number, raw in enumerate(lines, start=1):
            line = raw.rstrip()
            if "\x1b" in line:
                line = _COLOURS.sub("", line)
            if "Traceback (most recent call last)" in line:
                trace.clear()
            trace.append(line)
            if not _ANY.search(line):
                continue
            for at, crash in enumerate(CRASHES):
                if re.search(crash.pattern, line):
                    rule, symptom = _named(crash, trace)
                    told.setdefault(rule, (at, symptom))
                    places.setdefault(rule, []).append(Evidence(None, {"line": number, "text": line.strip()[:QUOTED]}))
                    break
    if told.keys() - CONSEQUENCES:
        told = {rule: where for rule, where in told.items() if rule not in CONSEQUENCES}
    if told.keys() & MEMORY_FAILURES.keys():
        told.pop("out_of_memory", None)  # said again without its place
    in_order = sorted(told, key=lambda rule: told[rule][0])
    return [found(rule, told[rule][1], *places[rule][:3], among=_FAULTS) for rule in in_order]


def _named(crash: Crash, trace: deque[str]) -> tuple[str, str]:
    """Rule and symptom of a message; for memory by where it ran out, the innermost known frame."""
    if crash.rule != "out_of_memory":
        return crash.rule, crash.symptom
    for line in reversed(trace):
        for rule, frame, where in _PLACES:
            if frame.search(line):
                return rule, f"{crash.symptom} {where}"
    return crash.rule, crash.symptom

"""The doctor's word at the end of a broken run, printed so that the page is the same on every computer."""

from __future__ import annotations

import re
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .report import claim, say

if TYPE_CHECKING:
    from safetrain_core import Finding

#: A number; a name, a step or a sum that has one in it is none.
_NUMBER = re.compile(r"(?<![\w.~-])-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?(?![\w]|\.\w)")
#: The folders before a file's name.
_FOLDERS = re.compile(r"(?<![\w.])/(?:[^/\s]+/)+(?=[^/\s])")
#: What a save has given at random: the sum of a file, the nonce in its name.
_RANDOM = re.compile(r"\b[0-9a-f]{12}(?=\.\.\.|\.bin)")


def as_log(**columns: Sequence[Any]) -> list[dict[str, Any]]:
    """Columns as the rows of a log, with steps from 1.

    >>> as_log(loss=[3.5, 3.2], grad_norm=[1.0, 0.9])[1]
    {'step': 2, 'loss': 3.2, 'grad_norm': 0.9}
    """
    rows = zip(*columns.values(), strict=True)
    return [
        {"step": step, **dict(zip(columns, row, strict=True))}
        for step, row in enumerate(rows, start=1)
    ]


def diagnose_text(text: str) -> list[Finding]:
    """What the doctor reads in the text that a run has ended in, as in ``safetrain diagnose crash.log``.

    >>> diagnose_text("OSError: [Errno 28] No space left on device")[0].rule
    'disk_full'
    """
    from safetrain_core import diagnose

    with tempfile.TemporaryDirectory() as folder:
        crash = Path(folder, "crash.log")
        crash.write_text(text, encoding="utf-8")
        return diagnose(crash)


def told(finding: Finding) -> str:
    """A finding as the doctor tells it: measured numbers marked with ``~``, file names in place of whole paths.

    >>> from safetrain_core import Evidence, Finding
    >>> seen = Evidence(30, {"loss": 0.125, "norm": 11719.03, "scale": 65536.0, "bytes": 700})
    >>> print(told(Finding("the loss rose 3.52 times in 700 bytes of /tmp/a/b.pt", "spike_stays", "error", (seen,),
    ...     "one batch", "clip at 1.0", "01_clipping_amp")))
    ERROR the loss rose ~3.52 times in ~700 bytes of b.pt
      evidence  step 30: loss ~0.125, norm ~11719, scale 65536, bytes ~700
      cause     one batch
      fix       clip at 1.0
      lesson    01_clipping_amp
    """
    measured = {
        f"{value:{how}}"
        for evidence in finding.evidence
        for name, value in evidence.values.items()
        for how in (("", ",") if isinstance(value, int) else (".3g", ".4g", ".6g"))
        if isinstance(value, int | float)
        and (
            "bytes" in name
            or name == "expected"
            or (isinstance(value, float) and not value.is_integer())
        )
    }
    shown = _RANDOM.sub("<random>", _FOLDERS.sub("", str(finding)))

    def marked(line: str) -> str:
        # Advice has numbers of its own: clip at 1.0.
        advice = line.startswith(("  cause", "  fix"))
        return _NUMBER.sub(
            lambda m: (
                "~" * (m[0] in measured or (not advice and bool({".", "e"} & set(m[0]))))
                + m[0]
            ),
            line,
        )

    return "\n".join(_wrapped(marked(line)) for line in shown.splitlines())


def _wrapped(line: str) -> str:
    """A long line in lines that fit a notebook's width, broken where it would be if each varying number had 8 digits.

    >>> long = "  evidence  " + ", ".join(f"{name} bytes ~{2**power}" for name, power in
    ...     {"weight": 10, "gradient": 30, "optimizer state": 20, "activation": 20}.items())
    >>> print(_wrapped(long))
      evidence  weight bytes ~1024, gradient bytes ~1073741824, optimizer state bytes ~1048576,
                activation bytes ~1048576
    """
    indent, words = " " * 12, line.split(" ")
    even = re.sub(r"~-?[\d,.]+(?<![,.])(?:e[+-]?\d+)?", "~" + "9" * 8, line)
    rows = textwrap.wrap(
        even, 92, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    told = []
    for i, row in enumerate(rows):
        count = len(row.removeprefix(indent if i else "").split(" "))
        told.append((indent if i else "") + " ".join(words[:count]))
        words = words[count:]
    return "\n".join(told)


def doctor(found: Sequence[Finding], rule: str) -> None:
    """Print what the doctor says first of a broken run, and claim that it names the fault ``rule``.

    Args:
        found: what ``diagnose``, a probe, or ``verify_checkpoints(...).findings`` gave.
        rule: the name of the rule that should have found it.
    """
    first = found[0] if found else None
    if first is None:
        say("The doctor finds nothing.")
    else:
        print(told(first))
    claim(first is not None and first.rule == rule, f"the doctor names it: {rule}")

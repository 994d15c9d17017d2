"""The doctor's word at the end of a broken run, printed so that the page is the same on every computer."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .report import claim, say

if TYPE_CHECKING:
    from safetrain_core import Finding

#: A number with a point or an exponent was measured; a step, a count or a threshold is whole.
_MEASURED = re.compile(r"(?<![\w.~-])-?\d+(?:\.\d+(?:e[+-]?\d+)?|e[+-]?\d+)")


def told(finding: Finding) -> str:
    """A finding as the doctor tells it, measured numbers marked with ``~``.

    >>> from safetrain_core import Evidence, Finding
    >>> print(told(Finding("the loss rose 3.52 times", "spike_stays", "error", (Evidence(30, {"loss": 0.125}),),
    ...     "one batch", "clip")))
    ERROR the loss rose ~3.52 times
      evidence  step 30: loss ~0.125
      cause     one batch
      fix       clip
    """
    lines = _MEASURED.sub(lambda match: f"~{match[0]}", str(finding)).splitlines()
    return "\n".join(line if "~" in line else _wrapped(line) for line in lines)


def _wrapped(line: str) -> str:
    """A long line in lines that fit a notebook's width; where a number varies, so would the place of a break."""
    indent = " " * 12
    return textwrap.fill(
        line, 92, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


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

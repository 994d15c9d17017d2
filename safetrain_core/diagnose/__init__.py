"""What went wrong: symptom, evidence, cause, fix and lesson, from a log, a step function or a checkpoint folder.

The room has the name of its main function, and importing it puts the room where the function would be: so the room can
be called, and is the function.

>>> import safetrain_core
>>> safetrain_core.diagnose([{"step": s, "loss": 5 - s / 10} for s in range(1, 41)])[0].rule
'healthy'
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .doctor import diagnose as diagnose
    from .finding import Finding


class _Room(ModuleType):
    """This module, callable as ``doctor.diagnose``."""

    def __call__(self, rows: Any, *, baseline: Any = None, columns: Mapping[str, str] | None = None) -> list[Finding]:
        """Find what is wrong with a run, from its log alone; see ``safetrain_core.diagnose.doctor.diagnose``."""
        from .doctor import diagnose as diagnose

        return diagnose(rows, baseline=baseline, columns=columns)


def __getattr__(name: str) -> Any:
    if name == "diagnose":
        return sys.modules[__name__]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


sys.modules[__name__].__class__ = _Room

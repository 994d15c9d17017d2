"""The rows that a run has printed, as a log: `STEP step=  7 lr=0.010000 ...`, among whatever else it printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

__all__ = ["HAS_ROWS", "printed_rows"]

#: A file whose beginning matches this holds printed rows.
HAS_ROWS = re.compile(rb"^(?:STEP|SKIP) step= *\d", re.MULTILINE)

_CELL = re.compile(r"(\w+)= *(\S+)")


def printed_rows(path: Path, encoding: str = "utf-8") -> list[dict[str, Any]]:
    """The STEP and SKIP rows of a text, each as a dict; `-` stands for what is unknown.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     text = Path(folder, "run.log")
    ...     _ = text.write_text("on cpu\\nSKIP step=  3 lr=0.100000 loss=0.5 scale=- reason=non_finite_grad\\n")
    ...     printed_rows(text)
    [{'step': '3', 'lr': '0.100000', 'loss': '0.5', 'skip_reason': 'non_finite_grad', 'skipped': 1}]
    """
    rows = []
    with path.open(encoding=encoding, errors="replace") as lines:
        for line in lines:
            if line.startswith(("STEP step=", "SKIP step=")):
                cells = {name: value for name, value in _CELL.findall(line) if value != "-"}
                if "reason" in cells:
                    cells["skip_reason"] = cells.pop("reason")
                rows.append({**cells, "skipped": int(line.startswith("SKIP"))})
    return rows

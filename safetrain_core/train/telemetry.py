"""The CSV log of a run: one header, one row per attempted step, on disk before the next step begins."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..records import BASE_COLUMNS

__all__ = ["CsvLog"]


class CsvLog:
    """A CSV file that a spreadsheet or pandas opens as it is; each row is flushed when written.

    Args:
        path: the file; missing folders are made.
        columns: its header, in order.

    Raises:
        ValueError: the file is there already, or cannot be written; a row has a column that the header lacks.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with CsvLog(folder + "/metrics.csv", ["step", "loss"]) as log:
    ...         log.write({"step": 1, "loss": None})
    ...     print(Path(folder, "metrics.csv").read_text().split())
    ['step,loss', '1,']
    """

    def __init__(self, path: str | Path, columns: Sequence[str] = BASE_COLUMNS) -> None:
        self.path, self.columns = Path(path), tuple(columns)
        try:
            if self.path.exists():
                raise ValueError(f"csv log {self.path} is there already; move it away or name another")
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("x", encoding="utf-8", newline="")
        except OSError as error:
            raise ValueError(f"csv log {self.path} cannot be written: {error.strerror}; name another") from error
        self._put(dict(zip(self.columns, self.columns, strict=True)))

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row; a missing column or None is an empty cell, never 0."""
        unknown = set(row) - set(self.columns)
        if unknown:
            raise ValueError(f"csv log {self.path} has no column {sorted(unknown)[0]}; it has {list(self.columns)}")
        self._put(row)

    def _put(self, row: Mapping[str, Any]) -> None:
        # One write per row: a reader that looks at the file meanwhile never sees half a row of ours.
        line = io.StringIO()
        values = ("" if (v := row.get(c)) is None else int(v) if isinstance(v, bool) else v for c in self.columns)
        csv.writer(line, lineterminator="\n").writerow(values)
        self._file.write(line.getvalue())
        self._file.flush()

    def __enter__(self) -> CsvLog:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

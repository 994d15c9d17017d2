"""A recorded trace as a source: the CSV that ``safetrain watch --csv`` writes, a run's own log, or one made by hand."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

from ..records import GPU_COLUMNS
from .reading import GpuReading, as_reading

__all__ = ["RecordedTrace", "TraceRow"]

TEMPERATURE, SECONDS = GPU_COLUMNS[0], "seconds"


class TraceRow(NamedTuple):
    """A reading of a trace, and when it was taken: seconds from its beginning, None where it does not tell."""

    seconds: float | None
    reading: GpuReading


class RecordedTrace:
    """Readings from a CSV file, one for each ``read()``; after the end, the last one again.

    Args:
        path: a file with a column ``gpu_temperature_c``, and where it has them ``seconds``, ``gpu_power_w``,
            ``gpu_utilization_pct``, ``gpu_memory_used_mib``. An empty cell is an unknown. In a run's own log (a file
            with a column ``step``) rows without a reading lie between two readings, and are passed over.

    Raises:
        ValueError: the file cannot be read, lacks the column, holds no reading, or has a cell that is no number.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "trace.csv")
    ...     _ = path.write_text("seconds,gpu_temperature_c\\n0,70\\n5,\\n10,86\\n")
    ...     trace = RecordedTrace(path)
    >>> [trace.read().temperature_c for _ in range(4)]
    [70.0, None, 86.0, 86.0]
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open(encoding="utf-8-sig", newline="") as file:
                self.rows = self._rows(csv.DictReader(file))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"trace {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
        if not self.rows:
            raise ValueError(f"trace {path} holds no reading; it needs rows with a {TEMPERATURE}")
        self._next = 0

    def _rows(self, table: csv.DictReader[str]) -> list[TraceRow]:
        columns = table.fieldnames or []
        if TEMPERATURE not in columns:
            raise ValueError(f"trace {self.path} has no column {TEMPERATURE}; it has {', '.join(columns) or 'none'}")
        rows = []
        for cells in table:
            where = f"trace {self.path}, line {table.line_num}"
            values = {name: _number(cells.get(name), where, name) for name in (SECONDS, *GPU_COLUMNS)}
            if "step" in columns and all(values[name] is None for name in GPU_COLUMNS):
                continue
            celsius, watts, share, mib = (values[name] for name in GPU_COLUMNS)
            rows.append(TraceRow(values[SECONDS], as_reading(GpuReading(celsius, watts, share, mib))))
        return rows

    def read(self) -> GpuReading:
        """The next reading."""
        row = self.rows[min(self._next, len(self.rows) - 1)]
        self._next += 1
        return row.reading


def _number(text: str | None, where: str, column: str) -> float | None:
    if text is None or not text.strip():
        return None
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{where}: {column}={text!r} is no number; leave it empty where it is unknown") from None

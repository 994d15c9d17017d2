"""Tables as text: CSV with any usual separator, read in one pass, a million rows in seconds."""

from __future__ import annotations

import csv
import itertools
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .columns import NUMBERS, TEXTS, assign
from .finding import Evidence
from .log import Floats, Log, make_log

__all__ = ["Cells", "read_csv", "usable"]

#: Rows taken at a time: more are slower, because their cells no longer fit the processor's caches.
CHUNK = 250
SEPARATORS = ",;\t|"
#: Bytes at the end in which the last line is looked for.
TAIL_BYTES = 65536
#: Characters of a header at most: the csv module takes no longer cell.
LONGEST = 131_072
#: How many faults of one kind are kept with their place.
PLACES_KEPT = 100

_TRUE = {"true": 1.0, "yes": 1.0, "false": 0.0, "no": 0.0}
_NOTHING = {"", "none", "null", "-", "na", "n/a", "<na>"}


class Cells:
    """Columns that are being read: numbers with what is missing, texts, and the cells that are no number."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        self.columns = dict(columns)
        self.count = 0
        self.faults: dict[str, list[Evidence]] = {}
        self._values: dict[str, array[float]] = {role: array("d") for role in columns if role in NUMBERS}
        self._missing: dict[str, array[int]] = {role: array("q") for role in self._values}
        self._texts: dict[str, dict[int, str]] = {role: {} for role in columns if role in TEXTS}

    def fault(self, kind: str, step: int | None, **values: float | int | str) -> None:
        """Note something that is wrong with the log itself."""
        kept = self.faults.setdefault(kind, [])
        if len(kept) < PLACES_KEPT:
            kept.append(Evidence(step, values))

    def extend(self, chunk: Mapping[str, Sequence[Any]], rows: int) -> None:
        """Append ``rows`` rows: role -> cells, as text or as numbers."""
        for role, values in self._values.items():
            cells = chunk[role]
            try:
                values.extend(map(float, cells))
            except (ValueError, TypeError):
                del values[self.count :]
                self._with_gaps(role, values, cells)
        for role, told in self._texts.items():
            found = [(row, text) for row, text in enumerate(chunk[role], start=self.count) if text]
            told.update((row, str(text)) for row, text in found if text != "-")
        self.count += rows

    def _with_gaps(self, role: str, values: array[float], cells: Sequence[Any]) -> None:
        """Append cells that are not all numbers: empty ones fast, since most columns have some, others one by one."""
        empty = [row for row, cell in enumerate(cells, start=self.count) if cell == ""]
        try:
            values.extend([float("nan")] * len(cells) if len(empty) == len(cells) else map(float, _filled(cells)))
        except (ValueError, TypeError):
            del values[self.count :]
            values.extend(self._number(role, row, cell) for row, cell in enumerate(cells, start=self.count))
        else:
            self._missing[role].extend(empty)

    def _number(self, role: str, row: int, cell: Any) -> float:
        try:
            return float(cell)
        except (ValueError, TypeError):
            word = "" if cell is None else str(cell).strip().lower()
            if word in _TRUE:
                return _TRUE[word]
            if word not in _NOTHING:
                self.fault("not_numbers", None, row=row + 1, column=self.columns[role], cell=str(cell)[:40])
            self._missing[role].append(row)
            return float("nan")

    def log(self, source: str) -> Log:
        """All of it."""
        numbers: dict[str, tuple[Floats, Any]] = {}
        for role, values in self._values.items():
            there = np.ones(self.count, dtype=bool)
            there[self._missing[role]] = False
            numbers[role] = (np.frombuffer(values, dtype=np.float64) if self.count else np.empty(0), there)
        return usable(make_log(numbers, self._texts, self.count, self.columns, source, self.faults))


def _filled(cells: Sequence[Any]) -> list[Any]:
    return ["nan" if cell == "" else cell for cell in cells]


def usable(log: Log) -> Log:
    """``log`` itself.

    Raises:
        ValueError: it has no row, or nothing in it that a run is judged by.
    """
    if log.lines == 0 and (ragged := log.faults.get("ragged")):
        first = ragged[0].values
        lack = f": the first has {first['cells']} cells, the header {first['columns']}" if "cells" in first else ""
        raise ValueError(f"{log.source} holds no whole row{lack}")
    if log.lines == 0:
        raise ValueError(f"{log.source} holds no row; give it a log with at least one step")
    measured = [role for role in log.series if role not in ("epoch", "skipped", "temperature")]
    if not measured:
        known = ", ".join(f"{role} in {column}" for role, column in log.columns.items()) or "none"
        raise ValueError(
            f"{log.source} does not look like a training log: no numbers for a loss, a learning rate, a gradient norm "
            f"or a scaling factor (columns known: {known}); name them, for example --columns loss=my_loss"
        )
    return log


def read_csv(path: Path, wanted: Mapping[str, str] | None = None, encoding: str = "utf-8-sig") -> Log:
    """Read a table whose first line names the columns; separated by comma, semicolon, tab or bar.

    Raises:
        ValueError: it is empty, has no header, or holds nothing that a run is judged by.
    """
    with path.open(encoding=encoding, errors="replace", newline="") as file:
        first = file.readline(LONGEST)
        while first and not first.strip():
            first = file.readline(LONGEST)
        if len(first) == LONGEST:
            raise ValueError(f"{path} is no table: its first line has {LONGEST} characters or more")
        if not first:
            raise ValueError(f"{path} is empty; give it a log with a header and at least one row")
        separator = max(SEPARATORS, key=first.count)
        names = [name.strip() for name in next(csv.reader([first], delimiter=separator))]
        if all(_is_number(name) or not name for name in names):
            raise ValueError(f"{path} has no header: its first line holds only numbers; put the columns' names there")
        columns = assign(names, wanted)
        place = {role: names.index(column) for role, column in columns.items()}
        cells = Cells(columns)
        rows = csv.reader(file, delimiter=separator)
        try:
            _take_in(cells, rows, names, place, comma=separator != ",")
        except csv.Error as error:
            raise ValueError(f"{path} is no table that can be read: {error} in line {rows.line_num + 1}") from error
    cut = _cut_line(path) if encoding != "utf-16" else ""
    if cut and len(next(csv.reader([cut], delimiter=separator), [])) < len(names):
        if len(cells.faults.get("ragged", ())) == 1:  # that line, which has its own name
            del cells.faults["ragged"]
        cells.fault("torn", None, line=rows.line_num + 1, text=cut.strip()[:40])
    return cells.log(str(path))


def _cut_line(path: Path) -> str:
    """The last line of a file, where no line end closes it; else nothing."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return file.read().decode("utf-8", "replace").replace("\r", "\n").rpartition("\n")[2]


def _take_in(
    cells: Cells, rows: Iterator[list[str]], names: list[str], place: Mapping[str, int], *, comma: bool
) -> None:
    """Whole rows into ``cells``; others are noted and left out. ``comma``: it may be the decimal point."""
    width = len(names)
    while chunk := list(itertools.islice(rows, CHUNK)):
        if set(map(len, chunk)) != {width} or any(row[0] == names[0] for row in chunk):
            chunk = [row for row in chunk if _whole(row, names, cells)]
        turned: Sequence[Sequence[str]] = list(zip(*chunk, strict=True)) or [()] * width
        taken: dict[str, Sequence[str]] = {role: turned[at] for role, at in place.items()}
        if comma:
            taken = {role: [cell.replace(",", ".") for cell in column] for role, column in taken.items()}
        cells.extend(taken, len(chunk))


def _whole(row: list[str], names: list[str], cells: Cells) -> bool:
    if not row:
        return False
    if [cell.strip() for cell in row] == names:
        cells.fault("header_twice", None, after_row=cells.count)
        return False
    if len(row) != len(names):
        cells.fault("ragged", None, cells=len(row), columns=len(names), text=",".join(row)[:40])
        return False
    return True


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True

"""From what people have to a ``Log``: files of several trainers, a frame, rows in memory."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import type_of
from .columns import assign
from .crash_texts import CrashTextError, crash_findings, encoding_of
from .log import Log
from .printed import HAS_ROWS, printed_rows
from .search import DEEP, files_in
from .table import Cells, read_csv

__all__ = ["find_log", "read_frame", "read_json", "read_log", "read_rows"]

#: Files that hold a run's log, the likeliest first, as they are looked for in a folder.
KNOWN_FILES = ("metrics.csv", "trainer_state.json", "*.jsonl", "events.out.tfevents.*", "*.csv")

#: Empty losses at the end of a frame from which on they are taken for NaN.
FRAME_NANS = 3


def read_log(source: Any, columns: Mapping[str, str] | None = None) -> Log:
    """Read a run's log.

    Args:
        source: a file or folder: CSV (ours, Lightning's ``metrics.csv``, any with a header), JSON lines, the rows that
            a run of ours has printed, Hugging Face's ``trainer_state.json``, a folder of TensorBoard events (needs the
            package ``tensorboard``); or a pandas frame, a list of dicts or of ``StepLog``; a ``Log`` is given back.
        columns: role -> name of the column, for names that are not recognised, for example ``{"loss": "my_loss"}``.

    Raises:
        ValueError: it does not exist, cannot be read, or holds nothing that a run is judged by. ``CrashTextError``, a
            kind of it, where it is the text of a crash: ``diagnose`` says of which.

    >>> read_log([{"step": 1, "train/loss": 2.5}, {"step": 2, "train/loss": 2.25}]).series["loss"].values.tolist()
    [2.5, 2.25]
    """
    if isinstance(source, Log):
        return source
    if isinstance(source, str | os.PathLike):
        return _read_path(Path(source), columns)
    if hasattr(source, "columns") and hasattr(source, "to_dict"):
        return read_frame(source, columns)
    if isinstance(source, Iterable):
        return read_rows(source, columns)
    raise ValueError(f"{type_of(source)} is no log; give a path, a frame, or a list of dicts")


def find_log(folder: Path) -> Path:
    """The log in ``folder`` or a few levels below it; for Hugging Face that of the newest checkpoint.

    Raises:
        ValueError: there is none, or several that are as likely.
    """
    files = list(files_in(folder))
    for pattern in KNOWN_FILES:
        found = sorted((p for p in files if p.match(pattern)), key=lambda p: (len(p.parts), _numbers(p)))
        if not found:
            continue
        if pattern == "trainer_state.json":
            return max(found, key=_numbers)
        if "tfevents" in pattern:
            return found[0].parent
        level = [path for path in found if len(path.parts) == len(found[0].parts)]
        if len(level) > 1:
            names = ", ".join(str(path.relative_to(folder)) for path in level[:4])
            raise ValueError(f"{folder} holds several logs ({names}); name one of them")
        return found[0]
    raise ValueError(
        f"{folder} holds no log ({', '.join(KNOWN_FILES)}), nor do the folders in it, {DEEP} levels deep; name a file"
    )


def _numbers(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.parent.name)]


def _read_path(path: Path, columns: Mapping[str, str] | None) -> Log:
    if not path.exists():
        raise ValueError(f"{path} does not exist; name a log, or a folder with one")
    if path.is_dir():
        path = find_log(path)
    if path.is_dir() or "tfevents" in path.name:
        from .events import read_events

        return read_events(path, columns)
    try:
        with path.open("rb") as file:
            start = file.read(4096)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; name another log") from error
    try:
        encoding = encoding_of(start)
        if encoding == "utf-16":
            start = start[: len(start) // 2 * 2].decode(encoding, "replace").encode()
        if b"\0" in start.rstrip(b"\0"):  # at the end: blocks that a power cut has left unwritten
            raise ValueError(f"{path} holds bytes, not text; give a CSV, JSON lines or a trainer_state.json")
        if HAS_ROWS.search(start):
            return read_rows(printed_rows(path, encoding), columns, source=str(path))
        if start.lstrip()[:1] in (b"{", b"["):
            return read_json(path, columns, encoding)
        return read_csv(path, columns, encoding)
    except ValueError as error:
        if findings := crash_findings(path):
            raise CrashTextError(path, findings) from error
        raise


def read_json(path: Path, columns: Mapping[str, str] | None = None, encoding: str = "utf-8") -> Log:
    """JSON lines, a list of rows, or Hugging Face's ``trainer_state.json`` (its ``log_history``)."""
    text = path.read_text(encoding=encoding, errors="replace")
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        return _read_lines(path, text, columns)
    if isinstance(whole, dict):
        whole = whole["log_history"] if isinstance(whole.get("log_history"), list) else [whole]
        # The summary at the end has a mean of the whole run, which is no point of the curve.
        whole = [row for row in whole if not (isinstance(row, dict) and "train_runtime" in row)]
    return read_rows(whole, columns, source=str(path))


def _read_lines(path: Path, text: str, columns: Mapping[str, str] | None) -> Log:
    rows, broken = [], []
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    for number, line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            broken.append((number, line))
            continue
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} is neither JSON nor JSON lines (line {lines[0][0]}: {lines[0][1][:40]!r})")
    cells = _rows_to_cells(rows, columns, str(path))
    for number, line in broken:
        kind = "torn" if number == lines[-1][0] and not text.endswith("\n") else "ragged"
        cells.fault(kind, None, line=number, text=line[:40])
    return cells.log(str(path))


def read_rows(rows: Iterable[Any], columns: Mapping[str, str] | None = None, source: str = "the log") -> Log:
    """A list of dicts (nested ones by ``/``), or of ``StepLog``."""
    return _rows_to_cells(rows, columns, source).log(source)


def _rows_to_cells(rows: Iterable[Any], columns: Mapping[str, str] | None, source: str) -> Cells:
    flat = []
    for number, row in enumerate(rows, start=1):
        if dataclasses.is_dataclass(row) and not isinstance(row, type):
            row = {item.name: getattr(row, item.name) for item in dataclasses.fields(row)}
        if not isinstance(row, Mapping):
            raise ValueError(f"row {number} of {source} is {type_of(row)}, not a dict of columns")
        flat.append(_flat(row) if any(isinstance(value, Mapping) for value in row.values()) else row)
    found = assign(dict.fromkeys(str(name) for row in flat for name in row), columns)
    cells = Cells(found)
    cells.extend({role: [row.get(column) for row in flat] for role, column in found.items()}, len(flat))
    return cells


def _flat(row: Mapping[Any, Any], before: str = "") -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            made |= _flat(value, f"{before}{name}/")
        else:
            made[f"{before}{name}"] = value
    return made


def read_frame(frame: Any, columns: Mapping[str, str] | None = None) -> Log:
    """A pandas frame, or what looks like one. It cannot tell a NaN that was logged from a cell that was not.

    Taken as logged: the NaN of a training loss from some row to the end, three at least, rows of a validation left out.
    Every other NaN is a missing value.
    """
    found = assign([str(name) for name in frame.columns], columns)
    taken = {role: [_plain(value) for value in frame[column]] for role, column in found.items()}
    if "loss" in taken:
        validation = taken.get("val_loss", [None] * len(frame))
        trailing = []
        for row in reversed(range(len(frame))):
            if taken["loss"][row] is not None:
                break
            if validation[row] is None:
                trailing.append(row)
        for row in trailing if len(trailing) >= FRAME_NANS else ():
            taken["loss"][row] = float("nan")
    cells = Cells(found)
    cells.extend(taken, len(frame))
    return cells.log("the frame")


def _plain(value: Any) -> Any:
    """A cell as a number or a text; None where it holds nothing."""
    if value is None or value != value or type(value).__name__ in ("NAType", "NaTType"):
        return None
    return value.item() if hasattr(value, "item") else value

"""The CSV log of a run: one header, one row per attempted step, on disk before the next step begins."""

from __future__ import annotations

import csv
import errno
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from ..records import BASE_COLUMNS
from .lock import lock, unlock

__all__ = ["CsvLog", "refuse_log"]


class CsvLog:
    """A CSV file that a spreadsheet or pandas opens as it is; each row is flushed when written.

    Args:
        path: the file; missing folders are made. A log that is there already, of a run that this one does not
            continue or with other columns, is set aside as ``NAME.1.csv``, ``NAME.2.csv``, ...
        columns: its header, in order.
        rotate: False = never set a log aside; a log that is in the way is an error that names the columns.
        resume_after: continue the log of a run that is resumed from this step: a torn last line is trimmed, and rows
            after that step are dropped, so that no step stands twice.

    Raises:
        ValueError: the file cannot be written, another process writes it, or it is in the way and ``rotate`` is off; a
            row has a column that the header lacks.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "metrics.csv")
    ...     with CsvLog(path, ["step", "loss"]) as log:
    ...         for step in (1, 2, 3):
    ...             log.write({"step": step, "loss": None if step == 2 else 0.5})
    ...     with CsvLog(path, ["step", "loss"], resume_after=2) as log:
    ...         log.write({"step": 3, "loss": 0.25})
    ...     print(path.read_text().split())
    ['step,loss', '1,0.5', '2,', '3,0.25']
    """

    def __init__(
        self,
        path: str | Path,
        columns: Sequence[str] = BASE_COLUMNS,
        *,
        rotate: bool = True,
        resume_after: int | None = None,
    ) -> None:
        self.path, self.columns = Path(path), tuple(columns)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._open(rotate, resume_after)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        if self._file.tell() == 0:
            self._put(dict(zip(self.columns, self.columns, strict=True)))
        self._last: tuple[int, Mapping[str, Any]] | None = None

    def _open(self, rotate: bool, resume_after: int | None) -> IO[str]:
        file = self.path.open("a+", encoding="utf-8", errors="surrogateescape", newline="")
        try:
            lock(file, f"csv log {self.path} is being written by another process; name another")
            file.seek(0)
            header = file.readline()
            if not header:
                return file
            if not _in_the_way(self.path, header, self.columns, rotate=rotate, continues=resume_after is not None):
                end = self._end_of(file, len(header.encode(errors="surrogateescape")), resume_after or 0)
                file.truncate(end)
                file.seek(0, io.SEEK_END)
                return file
            self._set_aside()
        except BaseException:
            file.close()
            raise
        file.close()
        return self._open(rotate, resume_after)

    def _end_of(self, file: IO[str], end: int, last_step: int) -> int:
        """Byte offset behind the last whole row whose step is at most ``last_step``; steps only rise."""
        for line in file:
            cells = next(csv.reader([line]), [])
            if not line.endswith("\n") or len(cells) != len(self.columns) or not cells[0].isdigit():
                break
            if int(cells[0]) > last_step:
                break
            end += len(line.encode(errors="surrogateescape"))
        return end

    def _set_aside(self) -> None:
        number = 1
        while (aside := self.path.with_name(f"{self.path.stem}.{number}{self.path.suffix}")).exists():
            number += 1
        self.path.rename(aside)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row; a missing column or None is an empty cell, never 0."""
        self._last = os.fstat(self._file.fileno()).st_size, self._checked(row)
        self._put(row)

    def amend(self, cells: Mapping[str, Any]) -> bool:
        """Put ``cells`` into the last row written, once more on disk; False where this log has written none."""
        if self._last is None:
            return False
        start, row = self._last
        whole = self._checked({**row, **cells})
        self._file.truncate(start)
        self._last = start, whole
        self._put(whole)
        return True

    def _checked(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        unknown = set(row) - set(self.columns)
        if unknown:
            raise ValueError(f"csv log {self.path} has no column {sorted(unknown)[0]}; it has {list(self.columns)}")
        return row

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
        unlock(self._file)  # a DataLoader's worker processes have inherited it
        self._file.close()


def refuse_log(path: str | Path, columns: Sequence[str], *, rotate: bool = True, continues: bool) -> None:
    """``ValueError`` where ``CsvLog`` would raise one, before anything is changed; nothing is written.

    Args:
        continues: the log of a run that is resumed is to be continued, if its columns are the same.

    >>> refuse_log(".", ["step", "loss"], continues=False)
    Traceback (most recent call last):
    ...
    ValueError: csv log . cannot be written: Is a directory; name another
    """
    where = Path(path)
    try:
        if not where.exists():
            above = next(folder for folder in where.absolute().parents if folder.exists())
            if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
                number = errno.EACCES if above.is_dir() else errno.ENOTDIR
                raise OSError(number, os.strerror(number))
            return
        with where.open("r+", encoding="utf-8", errors="surrogateescape", newline="") as file:
            lock(file, f"csv log {where} is being written by another process; name another")
            header = file.readline()
            if header:
                _in_the_way(where, header, tuple(columns), rotate=rotate, continues=continues)
    except OSError as error:
        raise _unwritable(where, error) from error


def _unwritable(path: Path, error: OSError) -> ValueError:
    return ValueError(f"csv log {path} cannot be written: {error.strerror}; name another")


def _in_the_way(path: Path, header: str, columns: tuple[str, ...], *, rotate: bool, continues: bool) -> bool:
    """Whether a file that begins with ``header`` is to be set aside; ``ValueError`` where that must not be."""
    there = tuple(next(csv.reader([header]), []))
    if continues and header.endswith("\n") and there == columns:
        return False
    if there[:1] != ("step",):
        raise ValueError(f"csv log {path} holds something that is no log; name another file")
    if not rotate:
        gone, new = [c for c in there if c not in columns], [c for c in columns if c not in there]
        what = "holds a run already"
        if there != columns:
            what = f"has other columns (only there: {gone}, only now: {new})"
        raise ValueError(f"csv log {path} {what}; move it away, or let csv_rotate_on_schema_change set it aside")
    return True

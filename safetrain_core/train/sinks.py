"""Where the rows of a run go: its CSV log, and sinks beside it, all with the same cells."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from ..config import TrainConfig
from ..distributed import is_main
from .csv_log import CsvLog

__all__ = ["RowLog", "Sink", "open_rows"]


class Sink(Protocol):
    """Takes in the rows of a run as the CSV log does; ``adapters/tensorboard.py`` has one.

    A row is a mapping from column to value, with ``step``; None is unknown. ``amend`` adds cells to the last row.
    """

    def begin(self, resume_after: int | None) -> None:
        """A run begins; one that is resumed from a step writes the rows after it once more."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Take in one row."""

    def amend(self, cells: Mapping[str, Any]) -> None:
        """Take in more cells of the last row written, or another value of some."""

    def close(self) -> None:
        """The run has ended, well or not."""


class RowLog:
    """A CSV log, or none, and sinks beside it: what is written goes to each.

    >>> class Shown:
    ...     def write(self, row):
    ...         print(row)
    >>> RowLog(None, [Shown()]).write({"step": 1, "loss": 0.5})
    {'step': 1, 'loss': 0.5}
    """

    def __init__(self, csv: CsvLog | None, sinks: Sequence[Sink] = ()) -> None:
        self._targets: list[CsvLog | Sink] = [*([csv] if csv is not None else []), *sinks]
        self._written = False

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row."""
        self._written = True
        for target in self._targets:
            target.write(row)

    def amend(self, cells: Mapping[str, Any]) -> bool:
        """Put ``cells`` into the last row written; False where this log has written none."""
        if self._written:
            for target in self._targets:
                target.amend(cells)
        return self._written


@contextlib.contextmanager
def open_rows(
    config: TrainConfig, columns: Sequence[str], sinks: Sequence[Sink] = (), *, resume_after: int | None = None
) -> Iterator[RowLog | None]:
    """The log of a run while entered; None where nothing is asked for, and on all ranks but the main one.

    Args:
        config: names the CSV file, and says what becomes of one that is in the way. columns: its header.
        resume_after: the step that the run is resumed from; None = a fresh run.

    Raises:
        ValueError: the CSV cannot be written, or is in the way; see ``CsvLog``.
    """
    if not is_main() or (config.csv_log_path is None and not sinks):
        yield None
        return
    with contextlib.ExitStack() as stack:
        csv = None
        if config.csv_log_path is not None:
            rotate = config.csv_rotate_on_schema_change
            csv = stack.enter_context(CsvLog(config.csv_log_path, columns, rotate=rotate, resume_after=resume_after))
        for sink in sinks:
            stack.callback(sink.close)
            sink.begin(resume_after)
        yield RowLog(csv, sinks)

"""TensorBoard as a sink: the rows of the CSV log as scalars, by ``torch.utils.tensorboard``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["TensorBoardSink"]

#: Seconds after which events are on disk at the latest.
FLUSH_S = 10


class TensorBoardSink:
    """Writes each row of a run as scalars, a tag for each column; what is unknown is left out.

    Give it to ``SafeTrainer(..., sinks=[...])``, or to the callbacks beside this module. ``safetrain diagnose FOLDER``
    reads what it wrote, as it reads the CSV; TensorBoard keeps 32-bit floats.

    Args:
        folder: where the event files go. A run that is resumed hides the steps that it repeats, and a fresh one all of
            an earlier run in this folder, so that no step stands twice: TensorBoard calls it purging.

    Raises:
        ValueError: the package ``tensorboard`` is not installed.

    >>> import tempfile
    >>> from safetrain_core import read_log
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sink = TensorBoardSink(folder)
    ...     sink.begin(resume_after=None)
    ...     for step in (1, 2, 3):
    ...         sink.write({"step": step, "loss": 1 / step, "gradient_norm": None, "skipped": step == 2})
    ...     sink.close()
    ...     log = read_log(folder)
    >>> log.series["loss"].values.round(2).tolist(), log.series["skipped"].values.tolist()
    ([1.0, 0.5, 0.33], [0.0, 1.0, 0.0])
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError(
                "TensorBoardSink needs the package tensorboard, which is not installed; "
                "pip install 'safetrain-core[tensorboard]'"
            ) from None
        self.folder = Path(folder)
        self._make_writer = SummaryWriter
        self._writer: Any = None
        self._step = 0
        self._told: dict[str, Any] = {}

    def begin(self, resume_after: int | None) -> None:
        """Open an event file; events of earlier ones from the next step on are hidden."""
        self.close()
        self._writer = self._make_writer(str(self.folder), purge_step=(resume_after or 0) + 1, flush_secs=FLUSH_S)

    def write(self, row: Mapping[str, Any]) -> None:
        """Write one row at its ``step``; numbers as scalars, words as text."""
        self._step, self._told = int(row["step"]), {}
        self.amend({column: value for column, value in row.items() if column != "step"})

    def amend(self, cells: Mapping[str, Any]) -> None:
        """Write cells at the step of the last row."""
        for column, value in cells.items():
            if value is None or value == "" or self._told.get(column) == value:
                continue
            self._told[column] = value
            if isinstance(value, str):
                self._writer.add_text(column, value, self._step)
            else:
                self._writer.add_scalar(column, float(value), self._step)

    def close(self) -> None:
        """Flush and close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

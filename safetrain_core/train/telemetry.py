"""The CSV log of a run: one header, one row per attempted step, on disk before the next step begins."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from torch import Tensor, nn

from ..records import BASE_COLUMNS, BLOCK_COLUMN, StepLog
from ..step.verdict import GradientDetail
from .lock import lock, unlock

__all__ = ["Attempt", "CsvLog", "block_columns", "block_norms", "blocks_of", "gradient_cells", "row_cells"]


class Attempt(NamedTuple):
    """What the log tells of an attempt besides its row; ``start`` is its (epoch, batch_in_epoch)."""

    start: tuple[int, int]
    samples: int
    seconds: float
    cells: dict[str, Any]


def row_cells(row: StepLog, attempt: Attempt, updates: int, retries: int, val_loss: float | None) -> dict[str, Any]:
    """A row of the log by its columns.

    >>> row = StepLog(7, 0.1, 2.0, 1.0, 0.5, None)
    >>> cells = row_cells(row, Attempt((0, 6), 32, 0.25, {"gradient_rms": 0.1}), updates=7, retries=0, val_loss=None)
    >>> cells["gradient_norm"], cells["samples_per_s"], cells["gradient_rms"]
    (2.0, 128.0, 0.1)
    """
    return {
        "step": row.step,
        "updates": updates,
        "epoch": attempt.start[0],
        "loss": row.loss,
        "learning_rate": row.lr,
        "gradient_norm": row.pre_clip,
        "gradient_norm_clipped": row.post_clip,
        "scaler_scale": row.scale,
        "skipped": row.skipped,
        "skip_reason": row.skip_reason,
        "retries": retries,
        "effective_batch_size": attempt.samples,
        "step_time_ms": round(1000 * attempt.seconds, 3),
        "samples_per_s": round(attempt.samples / attempt.seconds, 3),
        "val_loss": val_loss,
        **attempt.cells,
    }


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
            raise ValueError(f"csv log {self.path} cannot be written: {error.strerror}; name another") from error
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
            there = next(csv.reader([header]), [])
            if resume_after is not None and header.endswith("\n") and tuple(there) == self.columns:
                file.truncate(self._end_of(file, len(header.encode(errors="surrogateescape")), resume_after))
                file.seek(0, io.SEEK_END)
                return file
            if there[:1] != ["step"]:
                raise ValueError(f"csv log {self.path} holds something that is no log; name another file")
            if not rotate:
                raise ValueError(self._in_the_way(tuple(there)))
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

    def _in_the_way(self, there: tuple[str, ...]) -> str:
        gone, new = [c for c in there if c not in self.columns], [c for c in self.columns if c not in there]
        what = "holds a run already"
        if there != self.columns:
            what = f"has other columns (only there: {gone}, only now: {new})"
        return f"csv log {self.path} {what}; move it away, or let csv_rotate_on_schema_change set it aside"

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


def blocks_of(model: nn.Module, given: Mapping[str, Any] | None = None) -> dict[str, list[Tensor]]:
    """Block name -> its trainable weights: the model's top-level blocks, numbered layers apart.

    A weight that several blocks share belongs to the first, so that the blocks' norms add up to the whole norm.

    Args:
        given: names -> modules or lists of parameters, instead of the model's own.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> {name: len(weights) for name, weights in blocks_of(model).items()}
    {'0': 2, '2': 2}
    """
    if given is None:
        given = dict(_top_blocks(model))
    made: dict[str, list[Tensor]] = {}
    taken: set[int] = set()
    for name, block in given.items():
        made[name] = [p for p in _parameters(block) if p.requires_grad and id(p) not in taken]
        taken |= {id(p) for p in made[name]}
    return {name: weights for name, weights in made.items() if weights}


def _top_blocks(model: nn.Module) -> Iterator[tuple[str, Any]]:
    inner = getattr(model, "module", getattr(model, "_orig_mod", None))
    if isinstance(inner, nn.Module):  # wrapped by DistributedDataParallel or torch.compile
        yield from _top_blocks(inner)
        return
    for name, weight in model.named_parameters(recurse=False):
        yield name, [weight]
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            yield from ((f"{name}.{part}", layer) for part, layer in child.named_children())
        else:
            yield name, child


def _parameters(block: nn.Module | Iterable[Tensor]) -> list[Tensor]:
    return list(block.parameters() if isinstance(block, nn.Module) else block)


def block_columns(blocks: Iterable[str]) -> list[str]:
    """The CSV columns of these blocks.

    >>> block_columns(["tokens", "blocks.0"])
    ['grad_norm_tokens', 'grad_norm_blocks.0']
    """
    return [BLOCK_COLUMN + name for name in blocks]


def block_norms(blocks: Mapping[str, list[Tensor]], norm_of: Mapping[Tensor, float]) -> dict[str, float]:
    """Column -> the block's gradient norm, out of the norms of its gradients: no second walk over them.

    >>> a, b = nn.Parameter(), nn.Parameter()
    >>> block_norms({"head": [a, b]}, {a: 3.0, b: 4.0})
    {'grad_norm_head': 5.0}
    """
    return {
        BLOCK_COLUMN + name: sum(norm_of[w] ** 2 for w in weights if w in norm_of) ** 0.5
        for name, weights in blocks.items()
    }


def gradient_cells(
    detail: GradientDetail | None, blocks: Mapping[str, list[Tensor]], *, statistics: bool
) -> dict[str, float]:
    """The cells of a row about its gradients; none for a step whose gradients were not finite.

    >>> weight = nn.Parameter()
    >>> gradient_cells(GradientDetail({weight: 3.0}, 2.5, 0.5), {"head": [weight]}, statistics=True)
    {'gradient_max_abs': 2.5, 'gradient_rms': 0.5, 'grad_norm_head': 3.0}
    """
    if detail is None:
        return {}
    cells = {"gradient_max_abs": detail.max_abs, "gradient_rms": detail.rms} if statistics else {}
    return {**cells, **block_norms(blocks, detail.norm_of)}

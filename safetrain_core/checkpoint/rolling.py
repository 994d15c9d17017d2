"""The checkpoints of one run in one folder: which is newest, which is best, which go, and when the next is due."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import re
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from .atomic import StrPath, atomic_save, atomic_write_json, sync_folder, verify
from .plain import ordinary, plain

__all__ = ["Checkpoints", "detached_copy", "step_in"]

log = logging.getLogger(__name__)

NAME = re.compile(r"step_(\d{8,})\.pt")

#: File -> validation loss of the best checkpoints.
BEST = "best.json"


class Checkpoints:
    """Files ``step_00000800.pt``, by attempt, in ``folder``.

    Args:
        keep_last: newest ones kept. keep_best: those of lowest validation loss kept besides; NaN is never best.
        every_updates, every_seconds: when ``due``; None = never by that measure.
        async_save: ``save`` copies the state and returns; it is written beside training. The next save waits for it,
            ``check()`` raises its error, ``wait()`` ends it.

    Raises:
        ValueError: ``keep_last`` below 1, ``keep_best`` below 0.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     kept = Checkpoints(folder, keep_last=2, keep_best=1)
    ...     for step, val_loss in ((1, math.nan), (2, 0.4), (3, 0.5), (4, 0.6), (5, None)):
    ...         _ = kept.save({"schema": "ckpt.v1", "step": step}, step, val_loss=val_loss)
    ...     [path.name for path in kept.all()], kept.best().name, kept.latest().name
    (['step_00000002.pt', 'step_00000004.pt', 'step_00000005.pt'], 'step_00000002.pt', 'step_00000005.pt')
    """

    def __init__(
        self,
        folder: StrPath,
        keep_last: int = 5,
        keep_best: int = 1,
        every_updates: int | None = None,
        every_seconds: float | None = None,
        *,
        async_save: bool = False,
    ) -> None:
        if keep_last < 1 or keep_best < 0:
            raise ValueError(f"keep_last={keep_last} must be at least 1 and keep_best={keep_best} at least 0")
        self.folder = Path(folder)
        self.keep_last, self.keep_best = keep_last, keep_best
        self.every_updates, self.every_seconds = every_updates, every_seconds
        self._saved_at_update, self._saved_at_time = 0, time.monotonic()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if async_save else None
        self._writing: Future[Path] | None = None
        self._swept = False

    def set_aside_after(self, step: int) -> list[Path]:
        """A run goes on from ``step``: what is of later steps is another branch's, and gets the ending ``.abandoned``.

        What an earlier run has set aside stays: the next is ``.abandoned2``.
        """
        later = [path for path in self._list() if step_in(path.name) > step]
        for path in later:
            names = (f"{path.name}.abandoned{n if n > 1 else ''}" for n in itertools.count(1))
            path.rename(next(free for free in map(path.with_name, names) if not os.path.lexists(free)))
        if later:
            sync_folder(self.folder)
        return later

    def due(self, updates: int) -> bool:
        """Whether a multiple of ``every_updates`` was passed, or ``every_seconds`` went by, since the last save."""
        return self._passed(updates) or (updates > self._saved_at_update and self.late())

    def _passed(self, updates: int) -> bool:
        every, before = self.every_updates, self._saved_at_update
        return every is not None and updates // every > before // every

    def late(self) -> bool:
        """Whether ``every_seconds`` went by since the last save."""
        return self.every_seconds is not None and time.monotonic() - self._saved_at_time >= self.every_seconds

    def began_at(self, updates: int) -> None:
        """A resumed run counts from here."""
        self._saved_at_update = updates

    def save(self, payload: dict[str, Any], step: int, *, updates: int = 0, val_loss: float | None = None) -> Path:
        """Save, note it among the best if it is, and only then delete what is neither new nor best.

        Raises:
            ValueError, OSError: see ``atomic_save``; older files are as they were.
        """
        if step < 0:
            raise ValueError(f"step={step} must be at least 0")
        path = self.folder / f"step_{step:08d}{self.suffix}"
        self.wait()
        if self._pool is None:
            self._write(payload, path, val_loss)
        else:
            self._writing = self._pool.submit(self._write, detached_copy(plain(payload)), path, val_loss)
        self._saved_at_update, self._saved_at_time = updates, time.monotonic()
        return path

    def _write(self, payload: dict[str, Any], path: Path, val_loss: float | None) -> Path:
        if not self._swept:
            self._sweep()
        self._store(payload, path)
        self._keep(path, val_loss)
        return path

    def _keep(self, path: Path, val_loss: float | None) -> None:
        """Note what was written among the best if it is, then rotate."""
        best = self._best()
        if self.keep_best and val_loss is not None and math.isfinite(val_loss):
            ranked = sorted({**best, path.name: val_loss}.items(), key=lambda entry: (entry[1], entry[0]))
            best = dict(ranked[: self.keep_best])
            atomic_write_json(best, self.folder / BEST)
        self._rotate(path, set(best))

    def _sweep(self) -> None:
        """Remove the temporaries that killed runs have left; once, since one run at a time writes a folder."""
        self._swept = True
        for pattern in (".step_*.pt.*.tmp", f".{BEST}.*.tmp"):
            for left in self.folder.glob(pattern):
                left.unlink(missing_ok=True)

    def _rotate(self, written: Path, best: set[str]) -> None:
        held = self._rotating()
        keep = {path.name for path in held[-self.keep_last :]} | best | {written.name}
        gone = [path for path in held if path.name not in keep]
        for path in gone:
            self._remove(path)
        if gone:
            sync_folder(self.folder)

    #: Ending of a checkpoint's name.
    suffix = ".pt"

    def _store(self, payload: dict[str, Any], path: Path) -> None:
        atomic_save(payload, path)

    def _remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def _verify(self, path: Path) -> None:
        verify(path)

    def would_be_best(self, val_loss: float) -> bool:
        """Whether a checkpoint with this validation loss would be among the best; NaN never is."""
        if not self.keep_best or not math.isfinite(val_loss):
            return False
        best = self._best()
        return len(best) < self.keep_best or val_loss < max(best.values())

    def check(self) -> None:
        """Raise the error of an asynchronous save that has failed meanwhile."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the save that is being written; raises its error."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def all(self) -> list[Path]:
        """The files, oldest first by number, whether they verify or not."""
        return self._list()

    def _list(self) -> list[Path]:
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        return [self.folder / name for name in sorted(filter(self._is_name, names), key=step_in)]

    def _rotating(self) -> list[Path]:
        return self._list()

    def _is_name(self, name: str) -> bool:
        return bool(NAME.fullmatch(name))

    def latest(self) -> Path | None:
        """The newest file that verifies; a torn one is passed over, and named in the log. None where there is none."""
        for path in reversed(self.all()):
            try:
                self._verify(path)
            except CheckpointError as error:
                log.warning("passed over: %s", error)
            else:
                return path
        return None

    def best(self) -> Path | None:
        """The file of lowest validation loss that verifies; None where there is none."""
        for name in sorted(self._best(), key=lambda name: self._best()[name]):
            try:
                self._verify(self.folder / name)
            except CheckpointError as error:
                log.warning("passed over: %s", error)
            else:
                return self.folder / name
        return None

    def _best(self) -> dict[str, float]:
        try:
            told = json.loads((self.folder / BEST).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        entries = told.items() if isinstance(told, dict) else ()
        sound = {n: v for n, v in entries if isinstance(v, int | float) and math.isfinite(v) and self._is_name(n)}
        return {name: loss for name, loss in sound.items() if (self.folder / name).exists()}


def step_in(name: str) -> int:
    """The number in ``step_00000800.pt`` or ``step_00000800``.

    >>> step_in("step_00000800.pt")
    800
    """
    return int(name.split("_")[1].split(".")[0])


def detached_copy(value: Any, _seen: dict[Any, torch.Tensor] | None = None) -> Any:
    """A copy on the CPU that training cannot move; tensors that are the same stay the same (tied weights).

    >>> weight = torch.ones(1)
    >>> copied = detached_copy({"a": weight, "b": [weight]})
    >>> weight += 1
    >>> copied["a"], copied["b"][0] is copied["a"]
    (tensor([1.]), True)
    """
    seen = {} if _seen is None else _seen
    if isinstance(value, torch.Tensor):
        if not ordinary(value):
            return value.detach() if value.is_meta else value.detach().to("cpu", copy=True)
        place = (value.untyped_storage().data_ptr(), value.storage_offset(), value.dtype, value.shape, value.stride())
        if place not in seen or value.numel() == 0:
            seen[place] = value.detach().to("cpu", copy=True)
        return seen[place]
    if isinstance(value, dict):
        copied = {k: detached_copy(v, seen) for k, v in value.items()}
        if hasattr(value, "_metadata"):  # the versions of a model's modules, which their load_state_dict asks for
            copied = OrderedDict(copied)
            copied._metadata = dict(value._metadata)  # type: ignore[attr-defined]
        return copied
    if isinstance(value, list | tuple):
        return type(value)(detached_copy(v, seen) for v in value)
    return value

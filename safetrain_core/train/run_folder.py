"""The folder of one run of ``safetrain train``: claimed, or refused, and emptied of an older run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..checkpoint.folders import remove_checkpoint
from .lock import folder_lock

__all__ = ["RUN_FILES", "claimed", "remove_old_run"]

#: What a run leaves in its folder. A folder that has one of these holds a run.
RUN_FILES = ("config.yaml", "metrics.csv", "final.pt", "best.json", "bad_windows.jsonl")


@contextlib.contextmanager
def claimed(out: Path, *, may_hold_a_run: bool) -> Iterator[None]:
    """Hold the folder ``out``, made where it is not there; of a run that is refused no new folder is left behind.

    Args:
        may_hold_a_run: it is to be continued, or replaced.

    Raises:
        ValueError: it holds a run, is in use, or cannot be written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     out = Path(folder, "runs", "a")
    ...     with contextlib.suppress(ValueError), claimed(out, may_hold_a_run=False):
    ...         raise ValueError("no such corpus")
    ...     os.listdir(folder)
    []
    """
    try:
        held = [path.name for pattern in (*RUN_FILES, "step_*") for path in out.glob(pattern)]
        new = [folder for folder in (out, *out.parents) if not folder.exists()]
    except OSError as error:
        raise ValueError(f"--out {out} cannot be used: {error.strerror}; name another folder") from error
    if held and not may_hold_a_run:
        raise ValueError(
            f"--out {out} holds a run already ({held[0]}); add --resume to continue it, --overwrite to replace it, "
            "or name another"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / f".safetrain-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written: {error.strerror}; name another folder") from error
    with folder_lock(out, f"--out {out} is in use by another run; name another folder, or wait for it"):
        try:
            yield
        finally:  # while it is locked, so that nobody else has begun here
            _take_back(new)


def _take_back(new: Sequence[Path]) -> None:
    """Remove the folders that were made, innermost first, where nothing but the lock is in them."""
    with contextlib.suppress(OSError):
        if new and os.listdir(new[0]) == [".lock"]:
            (new[0] / ".lock").unlink()
            for folder in new:
                folder.rmdir()


def remove_old_run(out: Path) -> None:
    """Remove what a run has left in ``out``; what is not a run's stays."""
    for path in [*(out / name for name in RUN_FILES), *out.glob("step_*.pt")]:
        path.unlink(missing_ok=True)
    for path in out.glob("step_*"):
        if path.is_dir() and not path.is_symlink():
            remove_checkpoint(path)

"""The processes of lesson 03 that are killed, or that go on where one was killed.

``python -m support.checkpoint_worker save HOW FOLDER`` saves once, and stops half-way through its second save until it
is killed. ``python -m support.checkpoint_worker train SPEC`` trains, and kills itself where SPEC says so. Neither prints
anything: what they found is in files.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import IO, Any

import torch
from safetrain_core import atomic_save
from safetrain_core.checkpoint import atomic

from . import checkpoint_resume as lab


class Pausing:
    """A file that stops half-way through its large piece, leaves a note of that, and waits to be killed."""

    def __init__(self, file: IO[bytes], note: Path) -> None:
        self._file, self._note = file, note

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(view) > lab.SAVED_NUMBERS:
            self._file.write(view[: len(view) // 2])
            self._file.flush()
            self._note.touch()
            time.sleep(120)
        return self._file.write(view)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Pausing:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.close()


def save(how: str, folder: Path) -> None:
    """Save step 1 whole, then step 2 as far as its middle."""
    path, note = folder / "last.pt", folder / "half"
    if how == "naive":
        torch.save(lab.small_payload(1), path)
        with open(path, "wb") as file:
            torch.save(lab.small_payload(2), Pausing(file, note))  # type: ignore[arg-type]
    elif how == "atomic":
        atomic_save(lab.small_payload(1), path)
        opened = open

        def pausing(target: Any, mode: str, **options: Any) -> Any:
            file = opened(target, mode, **options)
            return file if "r" in mode else Pausing(file, note)

        atomic.open = pausing  # type: ignore[attr-defined]
        atomic_save(lab.small_payload(2), path)
    else:
        raise ValueError(f"no way to save is called {how}")


def train(spec: dict[str, Any]) -> None:
    """Train from the newest checkpoint in the folder; note each row; die before the step after ``kill_after``."""

    def die(step: int, model: torch.nn.Module) -> None:
        if step - 1 == spec["kill_after"]:
            os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))

    with open(spec["rows"], "w", buffering=1, encoding="utf-8") as file:
        trainer = lab.trainer(
            spec["seed"],
            spec["total_steps"],
            spec["folder"],
            note=lambda row: file.write(json.dumps(row) + "\n"),
            before_step=die,
        )
        trainer.resume()
        trainer.fit()


if __name__ == "__main__":
    if sys.argv[1] == "save":
        save(sys.argv[2], Path(sys.argv[3]))
    else:
        train(json.loads(sys.argv[2]))

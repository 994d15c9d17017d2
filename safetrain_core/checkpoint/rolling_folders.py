"""The rolling checkpoints of several ranks: folders of verified DCP, kept as the files of one process are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..distributed import is_main, mains
from .dcp import save_dcp
from .dcp_files import verify_dcp
from .folders import FOLDER_NAME, all_checkpoints, cut_saves, remove_checkpoint, step_folders, step_of
from .rolling import Checkpoints

__all__ = ["FolderCheckpoints"]

#: Keys of a payload that are each rank's own.
OWN = ("rng", "loader", "buffers")


class FolderCheckpoints(Checkpoints):
    """Folders ``step_00000800``, in a place that all ranks see. Every rank makes one, and calls the same methods.

    Files are written by all ranks; the list of the best, and rotation, are rank 0's. What the ranks ask of the folder
    is answered alike on each. There is no ``async_save``.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     kept = FolderCheckpoints(folder, keep_last=2)
    ...     for step in (1, 2, 3):
    ...         _ = kept.save({"weight": torch.ones(2), "rng": None}, step)
    ...     [path.name for path in kept.all()], kept.latest().name
    (['step_00000002', 'step_00000003'], 'step_00000003')
    """

    suffix = ""

    def __init__(self, *args: Any, async_save: bool = False, **kwargs: Any) -> None:
        if async_save:
            raise ValueError("async_save=true is for one process; with several ranks, leave it at false")
        super().__init__(*args, **kwargs)

    def due(self, updates: int) -> bool:
        """By updates alone: the ranks' clocks differ. ``late()`` says when to ask for one, for all ranks together."""
        return self._passed(updates)

    def all(self) -> list[Path]:
        """The folders, oldest first by number, whether they verify or have a manifest or not; as rank 0 sees them."""
        return list(mains(self._list() if is_main() else None))

    def _list(self) -> list[Path]:
        return step_folders(self.folder)

    def _rotating(self) -> list[Path]:
        return all_checkpoints(self.folder)

    def set_aside_after(self, step: int) -> list[Path]:
        """As for files; done by rank 0."""
        return list(mains(super().set_aside_after(step) if is_main() else None))

    def _store(self, payload: dict[str, Any], path: Path) -> None:
        shared = {key: value for key, value in payload.items() if key not in OWN}
        save_dcp(shared, path, step=step_of(path), own={key: payload[key] for key in OWN if key in payload})

    def _keep(self, path: Path, val_loss: float | None) -> None:
        if is_main():
            super()._keep(path, val_loss)
        mains(None)  # no rank goes on while rank 0 still tidies up

    def _sweep(self) -> None:
        super()._sweep()
        for folder in cut_saves(self.folder) if is_main() else ():
            remove_checkpoint(folder)

    def _verify(self, path: Path) -> None:
        verify_dcp(path)

    def _remove(self, path: Path) -> None:
        remove_checkpoint(path)

    def _is_name(self, name: str) -> bool:
        return bool(FOLDER_NAME.fullmatch(name))

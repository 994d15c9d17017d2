"""What a run's folder holds of checkpoints, of either kind: files of one process, folders of several ranks."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ..checkpoint.folders import FOLDER_NAME, step_folders, unfinished
from ..checkpoint.manifest import MANIFEST
from ..checkpoint.rolling import Checkpoints, step_in
from ..checkpoint.rolling_folders import FolderCheckpoints
from ..distributed import is_main, mains
from ..errors import CheckpointError

__all__ = ["Held"]

log = logging.getLogger(__name__)


class Held:
    """The checkpoints where ``ours`` are kept, and those that a run on another number of ranks has left there.

    Every rank makes one, and calls the same methods; all are told what rank 0 sees.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     held = Held(Checkpoints(folder))
    ...     _ = Checkpoints(folder).save({"schema": "ckpt.v1"}, 3)
    ...     Path(folder, "step_00000010").mkdir()
    ...     [path.name for path in held.all()], held.chosen(None).name
    (['step_00000003.pt', 'step_00000010'], 'step_00000003.pt')
    """

    def __init__(self, ours: Checkpoints) -> None:
        self._ours = ours
        self._other = (Checkpoints if isinstance(ours, FolderCheckpoints) else FolderCheckpoints)(ours.folder)

    def all(self) -> list[Path]:
        """All of them, oldest first, whole or not."""
        return sorted([*self._ours.all(), *mains(self._other.all() if is_main() else None)], key=_step)

    def chosen(self, path: str | Path | None) -> Path | None:
        """The checkpoint to resume from: ``path``, or the newest that verifies; None where there is none.

        Raises:
            ValueError: ``path`` is no checkpoint. CheckpointError: there are some, and none is whole.
        """
        if path is None:
            found = [self._ours.latest(), mains(self._other.latest() if is_main() else None)]
            newest = max((one for one in found if one is not None), key=_step, default=None)
            if newest is None:
                self._make_way()
            return newest
        named = Path(path)
        if not (named.is_file() or named.is_dir()):
            raise ValueError(f"there is no checkpoint {named}; name a step_*.pt, or a folder step_*")
        if named.is_dir() and not FOLDER_NAME.fullmatch(named.name) and not os.path.lexists(named / MANIFEST):
            inside = sorted([*Checkpoints(named).all(), *step_folders(named)], key=_step)
            told = f"the newest in it is {inside[-1]}" if inside else "and holds none"
            raise ValueError(f"{named} is a folder and no checkpoint, {told}; name a step_*.pt, or a folder step_*")
        return named

    def _make_way(self) -> None:
        """For a fresh start, as nothing can be resumed: it takes no place that a run may have left its work in.

        One folder without a manifest is the first save of a run, cut short: it is set aside.
        """
        held, folder = self.all(), self._ours.folder
        if held and held != mains(unfinished(folder) if is_main() else None)[:1]:
            raise CheckpointError(
                f"none of the {len(held)} checkpoints in {folder} is whole; move them away to start fresh, or "
                f"see what is wrong by safetrain verify {folder}"
            )
        if held:
            log.warning("set aside: %s has no manifest, its save was never finished", held[0])
            self.set_aside_after(-1)

    def set_aside_after(self, step: int) -> None:
        """A run goes on from ``step``: what is of later steps is another branch's, see ``Checkpoints``."""
        self._ours.set_aside_after(step)
        mains(self._other.set_aside_after(step) if is_main() else None)


def _step(path: Path) -> int:
    return step_in(path.name)

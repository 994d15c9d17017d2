"""What the trainer keeps on disk: rolling and best checkpoints, the list of bad windows, and the way back to them."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.atomic import atomic_write_text
from ..checkpoint.fit import check_fit
from ..checkpoint.folder import FolderSource, shard_payload
from ..checkpoint.plain import plain
from ..checkpoint.rolling import Checkpoints
from ..checkpoint.rolling_folders import FolderCheckpoints
from ..checkpoint.single import load_payload, read_checkpoint, run_payload
from ..config import TrainConfig
from ..distributed import SAVE, is_main, world_size
from ..errors import CheckpointDoesNotFit, CheckpointError
from ..records import TrainState
from ..step.amp import AmpTrainState
from .cursor import Cursor
from .held import Held
from .result import FitResult
from .retries import Retries

__all__ = ["Keeper"]

#: Settings that make a run what it is; a resume with others goes on, with a warning.
SAME_RUN = (
    "batch_size",
    "gradient_accumulation_steps",
    "loss_weighting",
    "weight_decay",
    "use_amp",
    "amp_dtype",
    "grad_clip_max_norm",
    "inf_post_clip_threshold",
    "nan_check_interval",
    "loss_jump_factor",
    "loss_jump_window",
    "galore_update_interval",
    "galore_scale",
    "seed",
)

log = logging.getLogger(__name__)

#: Windows that made the loss jump, a JSON object per line; they are left out when the run passes them again.
BAD_WINDOWS = "bad_windows.jsonl"


class Keeper:
    """Saves and loads the parts of one trainer in ``folder``; see ``SafeTrainer``."""

    def __init__(
        self,
        folder: str | Path,
        config: TrainConfig,
        amp: AmpTrainState,
        cursor: Cursor,
        retries: Retries,
        result: FitResult,
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        if os.path.lexists(folder) and not os.path.isdir(folder):
            raise ValueError(
                f"checkpoint_dir {folder} is no folder (a file, or a link that leads nowhere); name another"
            )
        self.config, self.amp, self.cursor, self.retries, self.result = config, amp, cursor, retries, result
        # What several ranks hold in parts, or one process as DTensors, does not fit into one file.
        self.in_folders = world_size() > 1 or any(hasattr(p, "to_local") for p in amp.model.parameters())
        kind = FolderCheckpoints if self.in_folders else Checkpoints
        self.checkpoints: Checkpoints = kind(
            folder,
            keep_last=config.max_rolling_checkpoints,
            keep_best=config.num_best_checkpoints,
            every_updates=config.checkpoint_every_n_steps,
            every_seconds=config.checkpoint_every_seconds,
            async_save=config.async_save,
        )
        self._held = Held(self.checkpoints)
        self.identity: dict[str, Any] = plain(dict(identity or {}), "identity")
        self.validation_due = False
        self._saved_step: int | None = None
        self._bad: set[tuple[int, int]] = set()

    # --- saving -----------------------------------------------------------------------------------------------

    def save_if_due(self, val_loss: float | None) -> None:
        """A rolling checkpoint where one is due, or a best one; an error of an asynchronous save is raised here."""
        self.checkpoints.check()
        best = val_loss is not None and self.checkpoints.would_be_best(val_loss)
        if best or self.checkpoints.due(self.amp.counters.updates):
            self.save(val_loss)

    def save(self, val_loss: float | None = None) -> None:
        """Save now, unless this very step is saved already."""
        step = self.amp.counters.step
        if step == self._saved_step and val_loss is None:
            return
        amp = self.amp
        payload = run_payload(
            amp.model,
            amp.optimizer,
            amp.scheduler,
            amp.counters,
            scaler=amp.scaler,
            loader=self.cursor,
            config=self.config,
        )
        if self.in_folders:  # BatchNorm's statistics, say, are each rank's own
            payload["buffers"] = {name: buffer.detach() for name, buffer in amp.model.named_buffers()}
        payload["trainer"] = {
            "skips": amp.skip_count,
            "good_in_a_row": self.retries.good_in_a_row,
            "first_loss": self.result.first_loss,
            "last_loss": self.result.last_loss,
            "val_loss": self.result.val_loss,
            "validation_due": self.validation_due,
            "identity": self.identity,
        }
        self.checkpoints.save(payload, step, updates=amp.counters.updates, val_loss=val_loss)
        self._saved_step = step

    def requests(self) -> int:
        """Several ranks save by the clock of one: it asks them to, for ``distributed.agree``."""
        return SAVE if world_size() > 1 and is_main() and self.checkpoints.late() else 0

    def newest_good(self) -> str | None:
        """Path of the newest checkpoint that verifies."""
        self.checkpoints.wait()
        latest = self.checkpoints.latest()
        return None if latest is None else str(latest)

    # --- going back -------------------------------------------------------------------------------------------

    def begin_fresh(self) -> None:
        """``ValueError`` where the folder holds checkpoints: they are another run's, which this one would mix with."""
        held = self._held.all()
        if held:
            raise ValueError(
                f"{self.checkpoints.folder} holds checkpoints of a run already ({held[-1].name}); resume() it, "
                "empty the folder, or name another"
            )

    def resume(self, path: str | Path | None) -> Path | None:
        """Load ``path``, or the newest checkpoint that verifies; None where there is none to load.

        Raises:
            CheckpointError: it cannot be trusted or does not fit, or there are some and none can be trusted; everything
                is as before. ValueError: there is no such file.
        """
        found = self._held.chosen(path)
        if found is None:
            return None
        bad = self._read_bad_windows()
        payload = self._load(found)
        self.amp.counters.load_dict(payload["state"])
        told = payload.get("trainer") or {}
        self.amp.skip_count = told.get("skips", 0)
        self.retries.good_in_a_row = told.get("good_in_a_row", 0)
        self.validation_due = told.get("validation_due", False)
        for name in ("first_loss", "last_loss", "val_loss"):
            setattr(self.result, name, told.get(name))
        self._settle_config(payload["config"] or {})
        self._held.set_aside_after(self.amp.counters.step)
        self.checkpoints.began_at(self.amp.counters.updates)
        self._saved_step = self.amp.counters.step
        self._bad = bad
        return found

    def _load(self, path: Path) -> dict[str, Any]:
        amp = self.amp
        source = FolderSource(path, amp.model, amp.optimizer) if path.is_dir() else None
        payload = read_checkpoint(path) if source is None else source.payload
        check_fit(payload, path, amp.model, amp.optimizer, amp.scheduler)
        TrainState.from_dict(payload["state"])
        if payload["loader"] is None and source is None:
            raise CheckpointError(f"{path} holds no data position; it was not saved by a trainer")
        was = (payload.get("trainer") or {}).get("identity")
        for name, value in self.identity.items():
            if was is not None and was.get(name) != value:
                raise CheckpointDoesNotFit(f"{path} is of another run: its {name} is {was.get(name)}, here {value}")
        if source is not None:
            source.fill()
        elif self.in_folders:
            shard_payload(payload, amp.model, amp.optimizer)
        if payload["loader"] is None:  # the same samples are behind, in another number of batches per rank
            payload["loader"] = self.cursor.fresh_position()
            ranks = 1 if source is None else source.saved_on
            behind = payload["state"]["batch_in_epoch"] * ranks // world_size()
            payload["state"] = {**payload["state"], "batch_in_epoch": behind}
        load_payload(payload, amp.model, amp.optimizer, amp.scheduler, scaler=amp.scaler, loader=self.cursor)
        amp.scaling.forget()
        for name, buffer in amp.model.named_buffers():
            if name in payload.get("buffers", {}):
                buffer.copy_(payload["buffers"][name])
        return payload

    def _settle_config(self, saved: dict[str, Any]) -> None:
        """The checkpoint's learning rate stands, unless another was asked for by name; other changes are warned of."""
        asked, was = self.config.learning_rate, saved.get("learning_rate", self.config.learning_rate)
        if "learning_rate" not in self.config.model_fields_set:
            self.config = self.config.model_copy(update={"learning_rate": was})
        elif asked != was:
            log.warning("learning rate %g asked for; it replaces the checkpoint's %g", asked, was)
            for group in self.amp.optimizer.param_groups:
                for key in ("lr", "initial_lr"):
                    group[key] *= asked / was
            if self.amp.scheduler is not None:
                self.amp.scheduler.base_lrs = [lr * asked / was for lr in self.amp.scheduler.base_lrs]
        now = self.config.model_dump()
        different = [name for name in SAME_RUN if name in saved and saved[name] != now[name]]
        changed = [f"{name} {saved[name]} -> {now[name]}" for name in different]
        if changed:
            warnings.warn(
                f"resumed with other settings than it was saved with ({', '.join(changed)}): it is not the same run",
                stacklevel=4,
            )

    def roll_back(self, start: tuple[int, int]) -> bool:
        """After a loss jump in the window at ``start``: note it as bad, and go back to the newest checkpoint.

        Attempts and retries stay. False where there is no checkpoint to go back to.
        """
        self.checkpoints.wait()
        path = self.checkpoints.latest()
        if path is None:
            return False
        self._bad.add(start)
        lines = [json.dumps({"epoch": epoch, "batch_in_epoch": batch}) for epoch, batch in sorted(self._bad)]
        if is_main():
            atomic_write_text("\n".join(lines) + "\n", self.checkpoints.folder / BAD_WINDOWS)
        counters = self.amp.counters
        step, retries = counters.step, counters.retries
        counters.load_dict({**self._load(path)["state"], "step": step, "retries": retries})
        self.save()  # attempts and retries outlive a kill, too
        return True

    def is_bad(self, start: tuple[int, int]) -> bool:
        """Whether the window that starts at (epoch, batch_in_epoch) is to be left out."""
        return start in self._bad

    def _read_bad_windows(self) -> set[tuple[int, int]]:
        path = self.checkpoints.folder / BAD_WINDOWS
        if not path.exists():
            return set()
        try:
            told = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
            return {(entry["epoch"], entry["batch_in_epoch"]) for entry in told}
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged ({error}); mend it or move it away") from error

"""The 14 symptoms of lesson 00, each produced for real in a fraction of a second and given to the doctor."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import symptom_folders, symptom_late_nan, symptom_probes, symptom_runs
from .index import SYMPTOMS
from .symptom_page import Shown, page_of

__all__ = ["CASES", "Case", "break_it", "pressed"]


@dataclass(frozen=True)
class Case:
    """A symptom: its number in the tables, what is done, the rule by which the doctor should name it, and how."""

    number: int
    did: str
    rule: str
    produce: Callable[[int, bool], Shown]

    @property
    def seen(self) -> str:
        """What its row in the table says is seen."""
        return SYMPTOMS[self.number - 1].seen.replace("`", "")

    @property
    def lessons(self) -> set[str]:
        """The lessons that its row names."""
        symptom = SYMPTOMS[self.number - 1]
        return {symptom.lesson, symptom.also} - {""}


CASES = (
    Case(1, "one batch in other units, no clip", "spike_stays", symptom_runs.spike),
    Case(2, "float16, scaled by hand, unguarded", "nan_stays", symptom_runs.overflow),
    Case(3, "skips go past scaler.update()", "scale_never_moves", symptom_runs.stuck_factor),
    Case(4, "the clip before unscale_", "norm_follows_scale", symptom_runs.scaled_clip),
    Case(5, "values of 100,000 in float16", "skip_rate", symptom_runs.past_float16),
    Case(6, "16 losses, none divided", "loss_not_divided", symptom_probes.undivided),
    Case(7, "random states not saved", "resume_without_rng", symptom_probes.forgotten_rng),
    Case(8, "16 layers keep everything", "does_not_fit", symptom_probes.activations_pile_up),
    Case(9, "saved on 4 ranks, loaded on 2", "world_size_mismatch", symptom_folders.other_ranks),
    Case(10, "a save cut off over the old files", "sha256_mismatch", symptom_folders.cut_save),
    Case(11, "a copy without one file", "shard_file_missing", symptom_folders.lost_shard),
    Case(12, "a file of another program", "unknown_schema", symptom_folders.other_schema),
    Case(13, "manifest there, last bytes not", "partial_shard", symptom_late_nan.partial_shard),
    Case(14, "24 saves, none removed", "no_rotation", symptom_folders.never_rotated),
)  # fmt: skip


def break_it(number: int, seed: int = 0, *, mended: bool = False) -> Shown:
    """Produce symptom ``number`` (from 1) for real, and let the doctor look at it; random states stay as they were.

    Args:
        mended: run the same thing without the fault.

    >>> break_it(9).first.rule
    'world_size_mismatch'
    """
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of some of the faults, too
        return CASES[number - 1].produce(seed, mended)


def pressed(action: str, number: int, seed: int = 0) -> str:
    """What the page shows when ``break`` or ``mend`` is pressed for a symptom: HTML.

    >>> "world_size mismatch" in pressed("break", 9), "Nothing found" in pressed("mend", 9)
    (True, True)
    """
    case = CASES[number - 1]
    shown = break_it(number, seed, mended=action == "mend")
    title = f"{number}. {case.seen}" if action == "break" else f"{number}. mended"
    return page_of(shown, title, inspect.getsource(case.produce))

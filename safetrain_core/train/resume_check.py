"""The proof that a run resumes: continue it from a checkpoint, and compare with the run that was never interrupted."""

from __future__ import annotations

import dataclasses
import shutil

from ..checkpoint.folders import FOLDER_NAME
from ..checkpoint.rolling import NAME
from .worker import Job, Report, train

__all__ = ["CHECK_FOLDER", "checkpoint_to_check", "clear", "resumed", "verdict"]

#: Where the continued run leaves what it leaves.
CHECK_FOLDER = "resume_check"


def checkpoint_to_check(job: Job, report: Report) -> int:
    """The step of the newest checkpoint before the run's end.

    Raises:
        ValueError: there is none.
    """
    names = [path.name for path in job.out.glob("step_*")]
    names = [name for name in names if NAME.fullmatch(name) or FOLDER_NAME.fullmatch(name)]
    steps = [int(name.split("_")[1].removesuffix(".pt")) for name in names]
    before = [step for step in steps if step < report.result.state.step and step in report.digests]
    if not before:
        raise ValueError(
            f"--verify-resume needs a checkpoint before the run's end (step {report.result.state.step}); lower "
            "--checkpoint-every-n-steps"
        )
    return max(before)


def resumed(job: Job, step: int) -> Report:
    """Continue ``job`` from its checkpoint of ``step`` in a folder of its own, with weights that begin elsewhere."""
    place = job.out / CHECK_FOLDER
    path = next(p for p in job.out.glob(f"step_{step:08d}*") if p.suffix in ("", ".pt"))
    config = job.config.model_copy(update={"csv_log_path": None})
    seed = job.config.seed + 1
    again = dataclasses.replace(job, config=config, out=place, resume=str(path), quiet=True, init_seed=seed)
    return train(again)


def clear(job: Job) -> None:
    """Remove what an earlier check has left."""
    shutil.rmtree(job.out / CHECK_FOLDER, ignore_errors=True)


def verdict(first: list[Report], second: list[Report], step: int) -> tuple[bool, str]:
    """Whether the continued run is the same run, rank by rank, and that in words.

    Args:
        first, second: each rank's report, uninterrupted and continued. step: the checkpoint between.
    """
    whole = [a.digests[step] == b.digests.get(step) for a, b in zip(first, second, strict=True)]
    if not all(whole):
        lost = [str(number) for number, equal in enumerate(whole) if not equal]
        return False, f"RESUME NOT VERIFIED: the state of rank {', '.join(lost)} reloaded from step {step} differs"
    for a, b in zip(first, second, strict=True):
        losses = {row.step: row.loss for row in a.result.rows if row.step > step}
        again = {row.step: row.loss for row in b.result.rows}
        for number, loss in losses.items():
            if again.get(number) != loss and not (loss != loss and again.get(number) != again.get(number)):
                return False, f"RESUME NOT VERIFIED: step {number} has loss {again.get(number)}, uninterrupted {loss}"
    end = first[0].result.state.step
    if [a.digests[end] for a in first] != [b.digests.get(end) for b in second]:
        return False, f"RESUME NOT VERIFIED: losses are equal, the final state at step {end} is not"
    shards = f"{len(first)} of {len(first)} shards" if len(first) > 1 else "the state"
    return True, (
        f"RESUME VERIFIED: from step {step} to {end} the losses are equal, {shards} reloaded byte-equal, and so is the "
        "final state"
    )

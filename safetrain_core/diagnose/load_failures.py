"""What can be wrong with a folder of checkpoints: severity, cause, fix and lesson of each, once."""

from __future__ import annotations

from .known import Fault

__all__ = ["LOAD_FAILURES"]

SINGLE, SHARDED = "03_checkpoint_resume", "04_sharded_resume"

#: Rule -> the fault, for ``known.found``.
LOAD_FAILURES = {
    # the six failures of a load
    "world_size_mismatch": Fault(
        "error",
        "each rank's file holds one of as many pieces as there were ranks, and another number of ranks is to load them",
        "resume on as many ranks as it was saved on, or reshard() it on purpose; save_dcp's folders load on any number",
        SHARDED,
    ),
    "sha256_mismatch": Fault(
        "error",
        "the file is not the one that was saved: a disk or a copy has altered it, or it is another checkpoint's",
        "resume from an older checkpoint; copy it again where it was copied; look at the disk",
        SHARDED,
    ),
    "shard_file_missing": Fault(
        "error",
        "the manifest names a file that is not there: it was deleted, or left out when the folder was copied",
        "put it back from where the folder was copied, else resume from an older checkpoint; move whole folders",
        SHARDED,
    ),
    "unknown_schema": Fault(
        "error",
        "it was written by another program, or by a newer version than this one, whose payload this one cannot read",
        "upgrade safetrain, or load it with what wrote it; a migration is a function in checkpoint/single.py",
        SINGLE,
    ),
    "partial_shard": Fault(
        "error",
        "the machine stopped before a rank's file was flushed, while the manifest was there already: unverified, its "
        "rest is loaded as zeros, and the loss goes to NaN some hundred steps later",
        "resume from an older checkpoint; write a temporary, fsync, rename, manifest last: save_shard and save_dcp do",
        SHARDED,
    ),
    "no_rotation": Fault(
        "warning",
        "old checkpoints are never removed, so the disk fills in the middle of the run",
        "rotate_checkpoints(folder, keep_last=5) after each save, or Checkpoints(keep_last=...), as SafeTrainer does",
        SHARDED,
    ),
    # files
    "torn_file": Fault(
        "error",
        "the file ends before its sha256: the save was cut, or the copy, or the disk was full",
        "resume from an older checkpoint; write with atomic_save or save_checkpoint, which are whole or not there",
        SINGLE,
    ),
    "altered_file": Fault(
        "error",
        "its bytes are not those that were written: a disk or a copy has altered them",
        "resume from an older checkpoint; copy it again where it was copied; look at the disk",
        SINGLE,
    ),
    "not_ours": Fault(
        "error",
        "torch.save alone has written it: there is no sha256 in it, so nobody can tell whether it is what was saved",
        "load it with what wrote it; save_checkpoint writes files that can be verified",
        SINGLE,
    ),
    "not_readable": Fault(
        "error",
        "it holds objects that are made by running code from the file, which weights_only=True refuses",
        "do not load it unless you trust who wrote it; save plain types and tensors",
        SINGLE,
    ),
    "damaged_manifest": Fault(
        "error",
        "manifest.json is not what a save has written: edited, cut, or of another program",
        "resume from an older checkpoint; do not edit manifests, reshard() writes new ones",
        SHARDED,
    ),
    "refused_file": Fault(
        "error",
        "a file of the checkpoint is a link, a device, or cannot be read",
        "put the file itself there, readable; links are never followed",
        SHARDED,
    ),
    "missing": Fault("error", "there is no such file", "name another", SINGLE),
    # the folder
    "nothing_to_resume": Fault(
        "error",
        "no checkpoint in this folder is whole",
        "move them away to start anew; a copy elsewhere may still be whole",
        SINGLE,
    ),
    "cut_save": Fault(
        "info",
        "the save was ended before its manifest was written; it never was a checkpoint, and no older one is lost by it",
        "nothing: the next run that saves here removes it; until then it takes up room",
        SHARDED,
    ),
    "stale_temporaries": Fault(
        "warning",
        "saves that were killed have left what they had written so far",
        "delete them while no run is saving here; the next run that saves here removes those that it knows",
        SINGLE,
    ),
    "abandoned": Fault(
        "info",
        "a run went on from an older checkpoint, and set the later ones of the branch that it left aside",
        "delete them when you are sure that nobody goes back there",
        SINGLE,
    ),
    "disk_full": Fault(
        "warning",
        "a save writes the new checkpoint before it removes the oldest, so both need room",
        "free some, keep fewer (max_rolling_checkpoints), or save elsewhere",
        SINGLE,
    ),
    "resumes_elsewhere": Fault(
        "info",
        "random states and data position are each rank's own; they begin anew on another number of ranks",
        "resume on as many ranks as it was saved on, for the same run bit for bit",
        SHARDED,
    ),
}

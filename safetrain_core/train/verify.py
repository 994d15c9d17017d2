"""``safetrain verify``: the checkup of a folder of checkpoints, as lines or as JSON."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..checkpoint.inspection import Inspected
    from .checkup import Checkup

__all__ = ["add_verify_parser", "run_verify"]


def add_verify_parser(verbs: Any) -> None:
    """Add the verb and its flags to the command line's. Imports nothing heavy: help comes at once."""
    verb = verbs.add_parser(
        "verify",
        help="say whether checkpoints are whole, and what is wrong where they are not",
        description="Say what a checkpoint file or folder is, whether it is whole, and its step, schema and size; or "
        "all of a folder's, with cause and fix of what is wrong, what a resume would take, and what it would do again. "
        "Exit status 1 where one is not whole, or cannot be loaded on --world-size ranks.",
        allow_abbrev=False,
    )
    verb.add_argument("path", type=Path, help="a checkpoint (a file or a folder), or a folder with some")
    verb.add_argument("--world-size", type=int, metavar="N", help="also say whether N ranks can load them")
    verb.add_argument("--json", action="store_true", help="print all of it as JSON")


def run_verify(args: argparse.Namespace) -> tuple[str, int]:
    """What to print, and the exit status."""
    from .checkup import verify_checkpoints

    told = verify_checkpoints(args.path, args.world_size)
    if args.json:
        import json

        return json.dumps(told.to_json(), indent=1, default=str, allow_nan=False), told.status
    return report(told), told.status


def report(told: Checkup) -> str:
    """A line per checkpoint; the findings; what a resume would take, and what it would do again; the room left."""
    lines = [f"whole  {one.path}: {one.about}" if one.whole else _broken(one) for one in told.checkpoints]
    lines += [
        f"cut    {folder}: a save that was never finished; it is no checkpoint, and nothing else is lost"
        for folder in told.cut
    ]
    single = [one.path for one in told.checkpoints] == [told.path]
    said = ("cut_save", "nothing_to_resume") if single else ("cut_save",)  # the lines above say it all
    shown = [finding for finding in told.findings if finding.rule not in said]
    lines += [line for finding in shown for line in ("", str(finding))] + ([""] if shown else [])
    if single:
        return "\n".join(lines).rstrip()
    lines.append(f"latest {told.latest.path.name if told.latest is not None else '-'}: " + _resume(told))
    room = (
        f"room for {told.free_bytes // told.next_save_bytes:,} more"
        if told.next_save_bytes
        else "size of a save unknown"
    )
    lines.append(f"disk   {told.size_bytes:,} bytes here, {told.free_bytes:,} free: {room}")
    return "\n".join(lines)


def _broken(one: Inspected) -> str:
    """A line that names the faults; its findings tell the rest."""
    kinds = dict.fromkeys(fault.kind.replace("_", " ") for fault in one.faults)
    return f"BROKEN {one.path}: {', '.join(kinds)}"


def _resume(told: Checkup) -> str:
    if told.refused:
        return "a resume is refused until they are moved away"
    begins = "a resume begins anew"
    if told.latest is not None:
        begins = "a resume goes on from " + (f"step {told.latest.step}" if told.latest.step is not None else "there")
    if told.lost is None:
        return begins
    facts = [f"{told.lost.steps:,} steps"]
    facts += [f"{told.lost.updates:,} updates"] if told.lost.updates is not None else []
    facts += [f"{told.lost.minutes:.1f} minutes"] if told.lost.minutes else []
    return f"{begins}, and does {', '.join(facts)} again" if told.lost.steps else f"{begins}; nothing is lost"

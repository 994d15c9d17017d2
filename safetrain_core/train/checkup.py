"""A folder of checkpoints, looked through: what is whole, what is wrong and why, what a resume would take and lose."""

from __future__ import annotations

import contextlib
import csv
import math
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.atomic import StrPath
from ..checkpoint.folders import FOLDER_NAME, TEMPORARY, unfinished
from ..checkpoint.inspection import Fault, Inspected, files_more, look_at
from ..checkpoint.listing import checkpoints_in, leftovers_in
from ..checkpoint.rolling import NAME, step_in
from ..config import TrainConfig
from ..diagnose.finding import SEVERITIES, Evidence, Finding
from ..diagnose.known import found
from ..diagnose.load_failures import LOAD_FAILURES

__all__ = ["Checkup", "Lost", "verify_checkpoints"]

#: Faults with which nobody knows what a checkpoint consists of.
UNREAD = {"damaged_manifest", "unknown_schema"}
#: More checkpoints than this in a folder whose config.yaml does not say how many are kept: nothing rotates them.
MANY = 20
#: Without room for this many saves more, fewer checkpoints than that are too many, too.
ROOM = 5


@dataclass(frozen=True, slots=True)
class Lost:
    """What a resume from the newest whole checkpoint does again; what metrics.csv does not tell is None."""

    steps: int
    updates: int | None = None
    minutes: float | None = None


@dataclass(frozen=True, slots=True)
class Checkup:
    """What ``verify_checkpoints`` found.

    Args:
        checkpoints: each, in order of name. cut: folders of unfinished saves. leftovers: temporaries of killed saves.
        latest: what a resume would take. lost: what it would do again; None where nothing tells how far the run was.
        size_bytes: of all of these. free_bytes: on the disk. next_save_bytes: what the next save is expected to take.
        findings: worst first.

    >>> told = Checkup(Path("runs"), (), (), (), None, None, 0, 10**9, 0, ())
    >>> told.status, told.to_json()["free_bytes"]
    (0, 1000000000)
    """

    path: Path
    checkpoints: tuple[Inspected, ...]
    cut: tuple[Path, ...]
    leftovers: tuple[Path, ...]
    latest: Inspected | None
    lost: Lost | None
    size_bytes: int
    free_bytes: int
    next_save_bytes: int
    findings: tuple[Finding, ...]

    @property
    def status(self) -> int:
        """The exit status: 1 for a broken checkpoint or another error, else 0."""
        return int(any(finding.severity == "error" for finding in self.findings))

    @property
    def refused(self) -> bool:
        """Whether a resume is refused: work may lie here, and nothing of it is whole."""
        return self.latest is None and (any(_is_rolling(one.path) for one in self.checkpoints) or len(self.cut) > 1)

    def to_json(self) -> dict[str, Any]:
        """As plain types."""
        return {
            "path": str(self.path),
            "checkpoints": [
                {**asdict(one), "path": str(one.path), "whole": one.whole, "faults": [asdict(f) for f in one.faults]}
                for one in self.checkpoints
            ],
            "cut": list(map(str, self.cut)),
            "leftovers": list(map(str, self.leftovers)),
            "latest": None if self.latest is None else str(self.latest.path),
            "resume_refused": self.refused,
            "lost": None if self.lost is None else asdict(self.lost),
            "size_bytes": self.size_bytes,
            "free_bytes": self.free_bytes,
            "next_save_bytes": self.next_save_bytes,
            "findings": [asdict(finding) for finding in self.findings],
        }


def verify_checkpoints(path: StrPath, world_size: int | None = None, *, free_bytes: int | None = None) -> Checkup:
    """Look through a checkpoint, or a folder of some; nothing is loaded into anything, and nothing is changed.

    Args:
        world_size: how many ranks are to load them; None = do not judge that.
        free_bytes: room on the disk; None = ask it.

    Raises:
        ValueError: there is no such path, it holds no checkpoint, or ``world_size`` is below 1.

    >>> import tempfile, torch
    >>> from safetrain_core import atomic_save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in (10, 20):
    ...         payload = {"schema": "ckpt.v1", "state": {"step": step, "updates": step}}
    ...         _ = atomic_save(payload, f"{folder}/step_{step:08d}.pt")
    ...     _ = Path(folder, "step_00000020.pt").write_bytes(b"half of it")
    ...     told = verify_checkpoints(folder)
    >>> told.latest.step, told.lost.steps, told.status, told.findings[0].rule
    (10, 10, 1, 'torn_file')
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path} does not exist; name a checkpoint or a folder with some")
    if world_size is not None and world_size < 1:
        raise ValueError(f"world_size={world_size} must be at least 1")
    cut = tuple(unfinished(path))
    listed = checkpoints_in(path)
    if not listed and not cut:
        raise ValueError(f"{path} holds no checkpoint (*.pt, or folders step_*); name another folder")
    checkpoints = tuple(look_at(file) for file in listed)
    # A manifest that cannot be read names nothing: its shards are no leftovers, whatever their names.
    unread = {one.path for one in checkpoints if any(fault.kind in UNREAD for fault in one.faults)}
    leftovers = tuple(p for p in leftovers_in(path) if p.parent not in unread or TEMPORARY.fullmatch(p.name))
    single = listed == [path]
    rolling = [one for one in checkpoints if single or _is_rolling(one.path)]
    latest = max((one for one in rolling if one.whole), key=_order, default=None)
    lost = None if single else _lost(path, rolling, latest)
    next_save = max((one.size_bytes for one in rolling if one.whole), default=0)
    free = shutil.disk_usage(path).free if free_bytes is None else free_bytes
    aside = () if single else tuple(sorted(path.glob("step_*.abandoned*")))
    findings = [finding for one in checkpoints for finding in _broken(one)]
    if world_size is not None:
        findings += [finding for one in checkpoints if one.whole for finding in _on_ranks(one, world_size)]
    if latest is None and (rolling or len(cut) > 1):
        findings.append(
            _found("nothing_to_resume", f"none of {len(rolling) + len(cut)} checkpoints in {path} is whole")
        )
    for rule, words, left in (
        ("cut_save", "saves were never finished", cut),
        ("stale_temporaries", "files are left of killed saves", leftovers),
        ("abandoned", "checkpoints of another branch were set aside", aside),
    ):
        if left:
            told = Evidence(None, {"first": left[0].name, "bytes": _bytes(left)})
            findings.append(_found(rule, f"{len(left)} {words} in {path}", told))
    if not single:
        findings += _room(path, rolling, next_save, free)
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    size = sum(one.size_bytes for one in checkpoints) + _bytes([*cut, *leftovers, *aside])
    return Checkup(path, checkpoints, cut, leftovers, latest, lost, size, free, next_save, tuple(findings))


def _found(rule: str, symptom: str, *evidence: Evidence) -> Finding:
    return found(rule, symptom, *evidence, among=LOAD_FAILURES)


def _is_rolling(path: Path) -> bool:
    return bool(NAME.fullmatch(path.name) or FOLDER_NAME.fullmatch(path.name))


def _order(one: Inspected) -> int:
    return step_in(one.path.name) if _is_rolling(one.path) else -1


def _broken(one: Inspected) -> list[Finding]:
    """A finding per kind of fault of one checkpoint, with each file as evidence."""
    kinds: dict[str, list[Fault]] = {}
    for fault in one.faults:
        kinds.setdefault(fault.kind, []).append(fault)
    made = []
    for kind, faults in kinds.items():
        more = f" (and {files_more(len(faults) - 1)})" if len(faults) > 1 else ""
        evidence = (
            {"rank": f.rank, "bytes": f.size_bytes, "expected": f.expected_bytes, "whose": one.path.name}
            for f in faults
        )
        shown = ({key: value for key, value in values.items() if value is not None} for values in evidence)
        told = faults[0].told if one.path.name in faults[0].told else f"{one.path}: {faults[0].told}"
        made.append(_found(kind, told + more, *(Evidence(None, values) for values in shown)))
    return made


def _on_ranks(one: Inspected, world_size: int) -> list[Finding]:
    if one.world_size is None or one.world_size == world_size:
        return []
    told = Evidence(one.step, {"saved on ranks": one.world_size, "to load on": world_size})
    if one.sharded:
        symptom = f"world_size mismatch: {one.path} was saved on {one.world_size} ranks, {world_size} are to load it"
        return [_found("world_size_mismatch", symptom, told)]
    return [_found("resumes_elsewhere", f"{one.path} resumes on {world_size} ranks, not bit for bit", told)]


def _lost(path: Path, rolling: list[Inspected], latest: Inspected | None) -> Lost | None:
    """By metrics.csv; else by the number of the newest checkpoint, whole or not."""
    at = 0 if latest is None else _order(latest)
    newest = max(map(_order, rolling), default=0)
    rows = list(_rows(path / "metrics.csv"))
    reached = max((step for step, *_ in rows), default=0)
    if reached < newest or not rows:  # no log, or another run's
        return Lost(newest - at) if newest > at else None
    after = [row for row in rows if row[0] > at]
    before = [updates for step, updates, _ in rows if step <= at and updates is not None]
    known = [updates for _, updates, _ in after if updates is not None]
    updates = (max(known) - max(before, default=0)) if known else (0 if not after else None)
    times = [milliseconds for *_, milliseconds in after if milliseconds is not None]
    minutes = sum(times) / 60_000 if times else (0.0 if not after else None)
    return Lost(max(0, reached - at), updates, minutes)


def _rows(log: Path) -> Iterable[tuple[int, int | None, float | None]]:
    """Step, updates and milliseconds of each row of our log; a row that is torn or not ours is passed over."""

    def number(text: Any) -> float | None:
        with contextlib.suppress(TypeError, ValueError):
            return float(text) if math.isfinite(float(text)) else None
        return None

    with contextlib.suppress(OSError, csv.Error, UnicodeDecodeError), open(log, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            step, updates = number(row.get("step")), number(row.get("updates"))
            if step is not None:
                yield int(step), None if updates is None else int(updates), number(row.get("step_time_ms"))


def _room(path: Path, rolling: list[Inspected], next_save: int, free: int) -> list[Finding]:
    """Whether the disk takes the next save, and whether anything rotates."""
    count, saves = len(rolling), free // next_save if next_save else None
    limit = _kept(path)
    told = Evidence(None, {"checkpoints": count, "bytes": sum(one.size_bytes for one in rolling), "free bytes": free})
    made = []
    if saves == 0:
        symptom = f"the next save takes about {next_save:,} bytes, and {free:,} are free"
        made.append(_found("disk_full", symptom, told))
    if limit is not None and count > limit:
        made.append(_found("no_rotation", f"{count} checkpoints in {path}, and its config keeps {limit}", told))
    elif limit is None and (count > MANY or (saves is not None and saves < ROOM < count)):
        more = "" if saves is None else f", and room for {saves} more"
        made.append(_found("no_rotation", f"{count} checkpoints in {path}{more}", told))
    return made


def _kept(path: Path) -> int | None:
    """How many checkpoints the run's config.yaml lets stand; None where there is none."""
    import yaml

    told: Any = None
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
        told = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
    if not isinstance(told, dict):
        return None
    fields = ("max_rolling_checkpoints", "num_best_checkpoints")
    values = [told.get(name, TrainConfig.model_fields[name].default) for name in fields]
    return sum(values) if all(type(value) is int for value in values) else None


def _bytes(paths: Iterable[Path]) -> int:
    files = (file for path in paths for file in (path.rglob("*") if path.is_dir() else [path]))
    return sum(file.lstat().st_size for file in files if file.is_file())

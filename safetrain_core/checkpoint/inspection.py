"""What a checkpoint is, whether it is whole, and what is wrong with it, without loading it: for ``safetrain verify``.

A load stops at the first thing that is wrong; here every file of a checkpoint is looked at, and each fault named.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from .atomic import StrPath, verify
from .dcp_files import DCP_SCHEMA, DcpManifest, SummedFile, check_file, read_index
from .manifest import MANIFEST, SHARD_SCHEMA, ShardManifest, read_json
from .sharded_read import AT_ONCE
from .single import check_schema

__all__ = ["Fault", "Inspected", "files_more", "inspect", "look_at"]

#: The last 22 bytes of a zip archive without a comment begin so: of what torch.save alone has written.
ARCHIVE_END = b"PK\x05\x06"

#: Bytes at the end of a shard that are all 0 where it was never flushed; a whole archive ends in its directory.
TAIL = 64


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that keeps a checkpoint from being loaded.

    Args:
        kind: ``missing``, ``torn_file``, ``altered_file``, ``not_ours``, ``not_readable``, ``refused_file``,
            ``unknown_schema``, ``damaged_manifest``, ``shard_file_missing``, ``partial_shard`` or ``sha256_mismatch``.
        told: what a load says. rank: whose file it is. size_bytes, expected_bytes: of the file, where that tells.
    """

    kind: str
    told: str
    rank: int | None = None
    size_bytes: int | None = None
    expected_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Inspected:
    """A checkpoint, a file or a folder; what is unknown is None.

    Args:
        about: what it is, in words, or the first fault. faults: all of them. sharded: whether it is flat shards, which
            load on as many ranks only.
    """

    path: Path
    about: str
    faults: tuple[Fault, ...] = ()
    schema: str | None = None
    step: int | None = None
    updates: int | None = None
    world_size: int | None = None
    size_bytes: int = 0
    sharded: bool = False

    @property
    def whole(self) -> bool:
        """Whether nothing is wrong with it."""
        return not self.faults


def files_more(count: int) -> str:
    """How many more files a fault is found in.

    >>> files_more(1), files_more(2)
    ('1 more file', '2 more files')
    """
    return f"{count} more file{'s' * (count != 1)}"


def inspect(path: StrPath) -> tuple[str, bool]:
    """What a file or a checkpoint folder is, in words, and whether it is whole: by its sums, then by what is in it.

    >>> inspect("no-such.pt")
    ('no-such.pt is missing; nothing can be loaded from it', False)
    """
    found = look_at(path)
    return found.about, found.whole


def look_at(path: StrPath) -> Inspected:
    """All that can be said of a checkpoint without loading it; every file is summed.

    >>> look_at("no-such.pt").faults[0].kind
    'missing'
    """
    where = Path(path)
    return _folder(where) if where.is_dir() else _file(where)


def _file(path: Path) -> Inspected:
    size = os.path.getsize(path) if path.exists() else 0

    def broken(kind: str, told: str, **facts: Any) -> Inspected:
        return Inspected(path, told, (Fault(kind, told, size_bytes=size),), size_bytes=size, **facts)

    try:
        verify(path)
        payload = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except CheckpointError as error:
        return broken(_kind_of_file(path, str(error)), str(error))
    except Exception as error:  # noqa: BLE001  whatever makes torch refuse a file that is whole
        told = f"whole, but cannot be read without running code from it ({type(error).__name__})"
        return broken("not_readable", told)
    schema = payload.get("schema") if isinstance(payload, dict) else None
    if schema is None:
        return Inspected(path, f"weights alone, {len(payload)} tensors, {size:,} bytes", size_bytes=size)
    try:
        check_schema(schema, path)
    except CheckpointError as error:
        return broken("unknown_schema", str(error), schema=str(schema))
    state = payload.get("state") or {}
    step, updates = state.get("step"), state.get("updates")
    about = f"checkpoint {schema}, step {step}, {updates} updates, {size:,} bytes"
    return Inspected(path, about, (), schema, step, updates, 1, size)


def _kind_of_file(path: Path, told: str) -> str:
    if not path.exists():
        return "missing"
    if "no sha256 at its end" not in told:
        return "altered_file" if "altered or torn" in told else "refused_file"
    with open(path, "rb") as file:
        file.seek(-min(len(ARCHIVE_END) + 18, path.stat().st_size), os.SEEK_END)
        return "not_ours" if file.read().startswith(ARCHIVE_END) else "torn_file"


def _folder(folder: Path) -> Inspected:
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    manifest: DcpManifest | ShardManifest
    try:
        told = read_json(folder)
        if isinstance(told, dict) and told.get("schema") == DCP_SCHEMA:
            manifest = DcpManifest.from_json(told, folder / MANIFEST)
        else:
            manifest = ShardManifest.from_json(told, folder / MANIFEST)
    except CheckpointError as error:
        kind = "unknown_schema" if "unknown schema" in str(error) else "damaged_manifest"
        return Inspected(folder, str(error), (Fault(kind, str(error)),), size_bytes=size)
    faults, count = _faults_of_folder(folder, manifest)
    about = f"checkpoint {manifest.schema} of {manifest.world_size} ranks, step {manifest.step}, {count} files"
    if faults:
        about = faults[0].told + (f"; {files_more(len(faults) - 1)}" if len(faults) > 1 else "")
    else:
        about += f", {sum(file.size_bytes for file in _files_of(manifest)):,} bytes"
    sharded = isinstance(manifest, ShardManifest)
    return Inspected(
        folder, about, faults, manifest.schema, manifest.step, None, manifest.world_size, size, sharded=sharded
    )


def _files_of(manifest: DcpManifest | ShardManifest) -> list[SummedFile]:
    if isinstance(manifest, DcpManifest):
        return [*manifest.files, *manifest.ranks]
    return [SummedFile(shard.path, shard.sha256, shard.size_bytes) for shard in manifest.shards]


def _faults_of_folder(folder: Path, manifest: DcpManifest | ShardManifest) -> tuple[tuple[Fault, ...], int]:
    files = _files_of(manifest)
    shared = len(manifest.files) if isinstance(manifest, DcpManifest) else 0
    part = folder / manifest.part if isinstance(manifest, DcpManifest) else folder
    if part.is_symlink() and part != folder:
        return (Fault("refused_file", f"{part} is a link; it is refused unopened"),), len(files)

    def look(number: int) -> Fault | None:
        file, rank = files[number], number - shared
        if rank < 0:
            return _fault_of(file, part, file.path, None)
        found = _fault_of(file, folder, f"rank {rank}", rank)
        return found or (_fault_inside(folder / file.path, rank, manifest.step) if part == folder else None)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        faults = [fault for fault in pool.map(look, range(len(files))) if fault is not None]
    if isinstance(manifest, DcpManifest) and not faults:
        try:
            read_index(part, manifest)
        except CheckpointError as error:
            faults.append(Fault("not_readable", str(error)))
    return tuple(faults), len(files)


def _fault_of(file: SummedFile, folder: Path, whose: str, rank: int | None) -> Fault | None:
    """What is wrong with one file that the manifest names."""
    try:
        check_file(file, folder, whose)
    except CheckpointError as error:
        told = str(error)
        if "shard file missing" in told:
            return Fault("shard_file_missing", told, rank, None, file.size_bytes)
        if "sha256 mismatch" not in told:
            return Fault("refused_file", told, rank)
        size = (folder / file.path).stat().st_size
        partial = size < file.size_bytes or _ends_in_nothing(folder / file.path)
        return Fault("partial_shard" if partial else "sha256_mismatch", told, rank, size, file.size_bytes)
    return None


def _ends_in_nothing(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-min(TAIL, path.stat().st_size), os.SEEK_END)
        return not any(file.read())


def _fault_inside(path: Path, rank: int, step: int) -> Fault | None:
    """What is wrong with a flat shard whose sum is right: a manifest and its shards can be made to fit by anyone."""
    try:
        payload = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # noqa: BLE001  whatever makes torch refuse a file that is whole
        told = f"{path} is whole but cannot be read without running code from it ({type(error).__name__})"
        return Fault("not_readable", told, rank)
    schema, *belongs = (payload.get(key) if isinstance(payload, dict) else None for key in ("schema", "rank", "step"))
    if schema != SHARD_SCHEMA:
        return Fault("unknown_schema", f"unknown schema {str(schema)[:60]!r} in {path} of rank {rank}", rank)
    if belongs != [rank, step]:
        return Fault("sha256_mismatch", f"{path} is the shard of rank {belongs[0]} at step {belongs[1]}", rank)
    return None

"""The files of a verified DCP checkpoint: the manifest over them, their sums, and DCP's own index, read safely."""

from __future__ import annotations

import os
import pathlib
import pickle
import re
import stat
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..distributed import everyones, rank, world_size
from ..errors import CheckpointDoesNotFit, CheckpointError
from .atomic import StrPath
from .checks import checked_fields, checked_sha256, count, listed, seconds
from .manifest import MANIFEST, PART_FOLDER, SHARD_NAME, read_json
from .summed import sum_of

__all__ = ["DCP_SCHEMA", "DcpManifest", "SummedFile", "check_file", "on_all", "read_index", "verify_dcp"]

DCP_SCHEMA = "ckpt.dcp.v1"

#: DCP's own names: its index, and the tensors of a rank.
PART_NAME = re.compile(r"\.metadata|__\d{1,9}_\d{1,9}\.distcp")


@dataclass(frozen=True, slots=True)
class SummedFile:
    """A file by its bare name, its sha256 in 64 hexadecimal digits, and its size."""

    path: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class DcpManifest:
    """What a verified DCP checkpoint consists of.

    Args:
        part: name of the folder with DCP's files. files: those. ranks: each rank's own file, in order of rank.
    """

    schema: str
    world_size: int
    step: int
    wall_clock_seconds: float
    part: str
    files: tuple[SummedFile, ...]
    ranks: tuple[SummedFile, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain types."""
        return {**asdict(self), "files": [asdict(f) for f in self.files], "ranks": [asdict(f) for f in self.ranks]}

    @classmethod
    def from_json(cls, told: Any, where: StrPath) -> DcpManifest:
        """The manifest that ``told`` holds, or ``CheckpointError`` with what is wrong in it."""
        fields = checked_fields(
            told, DCP_SCHEMA, ("world_size", "step", "wall_clock_seconds", "part", "files", "ranks"), where
        )
        part = fields["part"]
        if not isinstance(part, str) or not PART_FOLDER.fullmatch(part):
            raise CheckpointError(
                f"{where}: part {str(part)[:60]!r} is not the name of a folder of ours; it is refused"
            )
        files = _files(fields["files"], "files", PART_NAME, where)
        ranks = _files(fields["ranks"], "ranks", SHARD_NAME, where)
        ranks_told = count(fields["world_size"], "world_size", where, least=1)
        numbers = [int(SHARD_NAME.fullmatch(file.path)[1]) for file in ranks]  # type: ignore[index]
        if len(numbers) != ranks_told or numbers != list(range(ranks_told)):  # in this order: a size may be absurd
            raise CheckpointError(
                f"{where} names the files of ranks {numbers[:9]} for world_size={ranks_told}; damaged"
            )
        if ".metadata" not in {file.path for file in files}:
            raise CheckpointError(f"{where} does not name DCP's index, .metadata; it is damaged")
        step, when = count(fields["step"], "step", where), seconds(fields["wall_clock_seconds"], where)
        return cls(DCP_SCHEMA, ranks_told, step, when, part, files, ranks)


def _files(value: Any, name: str, pattern: re.Pattern[str], where: StrPath) -> tuple[SummedFile, ...]:
    made = []
    for entry in listed(value, name, where):
        if not isinstance(entry, dict) or set(entry) != {"path", "sha256", "size_bytes"}:
            raise CheckpointError(f"{where}: an entry of {name} must have path, sha256, size_bytes; it is damaged")
        path = entry["path"]
        if not isinstance(path, str) or not pattern.fullmatch(path):
            raise CheckpointError(
                f"{where}: {str(path)[:60]!r} in {name} is no file name of this kind; refused unopened"
            )
        whose = f"{name} {path}"
        made.append(
            SummedFile(path, checked_sha256(entry["sha256"], whose, where), count(entry["size_bytes"], whose, where))
        )
    if len({file.path for file in made}) != len(made):
        raise CheckpointError(f"{where}: {name} names a file twice; it is damaged")
    return tuple(made)


def on_all(work: Callable[[], Any], folder: Path) -> list[Any]:
    """What ``work`` returns on each rank; where it fails on one, the same CheckpointError on every rank."""
    value, error, kind = None, None, CheckpointError
    try:
        value = work()
    except (OSError, CheckpointError) as failure:
        error = str(failure)
        kind = CheckpointDoesNotFit if isinstance(failure, CheckpointDoesNotFit) else CheckpointError
    told = everyones((value, error, kind))
    for number, (_, failed, as_what) in enumerate(told):
        if failed is not None:
            on = f" (on rank {number})" if len(told) > 1 else ""
            raise as_what(failed + on)
    return [value for value, *_ in told]


def verify_dcp(src_dir: StrPath) -> DcpManifest:
    """The manifest, once every file that it names was found whole; each rank sums its share. Nothing is unpickled.

    Raises:
        CheckpointError: ``sha256 mismatch``, ``shard file missing``, ...; the same on every rank.
    """
    folder = Path(src_dir)

    def verify_share() -> DcpManifest:
        manifest = DcpManifest.from_json(read_json(folder), folder / MANIFEST)
        if (folder / manifest.part).is_symlink():
            raise CheckpointError(f"{folder / manifest.part} is a link; it is refused unopened")
        for file in manifest.files[rank() :: world_size()]:
            check_file(file, folder / manifest.part, file.path)
        for number in range(rank(), manifest.world_size, world_size()):
            check_file(manifest.ranks[number], folder, f"rank {number}")
        return manifest

    return on_all(verify_share, folder)[0]


def check_file(file: SummedFile, folder: Path, whose: str) -> None:
    """``CheckpointError`` where a file is missing, a link, of another size or of another sum than it should be."""
    path = folder / file.path
    try:
        about = os.lstat(path)
        if not stat.S_ISREG(about.st_mode):
            raise CheckpointError(f"{path} is no regular file (a link?); it is refused unopened")
        if about.st_size != file.size_bytes:
            raise CheckpointError(
                f"sha256 mismatch on {whose}: {path} has {about.st_size} bytes of {file.size_bytes}; it is torn, take "
                "an older checkpoint"
            )
        with open(path, "rb") as opened:
            found = sum_of(opened, file.size_bytes)
    except FileNotFoundError:
        raise CheckpointError(f"shard file missing: {path}; take an older checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if found != file.sha256:
        raise CheckpointError(
            f"sha256 mismatch on {whose}: {path} has {found[:12]}..., the manifest {file.sha256[:12]}...; it is "
            "altered, take an older checkpoint"
        )


class _IndexUnpickler(pickle.Unpickler):
    """Reads DCP's index, and no pickle that asks for anything else."""

    def find_class(self, module: str, name: str) -> Any:
        named = getattr(torch, name, None) if module == "torch" else None
        if isinstance(named, torch.dtype) or named is torch.Size:
            return named
        if (module, name) == ("torch.serialization", "_get_layout"):
            return super().find_class(module, name)
        if module == "torch.distributed.checkpoint.metadata" and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        if (module, name) == ("torch.distributed.checkpoint.filesystem", "_StorageInfo"):
            return super().find_class(module, name)
        if module.startswith("pathlib") and name in ("PosixPath", "WindowsPath"):
            return pathlib.PurePosixPath  # where it was saved; nothing is read from there
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def read_index(part: Path, manifest: DcpManifest) -> Any:
    """DCP's own index, read by an unpickler of few classes; ``CheckpointError`` for another pickle or path."""
    path = part / ".metadata"
    try:
        with open(path, "rb") as file:
            index = _IndexUnpickler(file).load()
        names = {info.relative_path for info in index.storage_data.values()}
        tensors = all(hasattr(entry, "chunks") for entry in index.state_dict_metadata.values())
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read without running code from it ({str(error)[:80]}); it is refused, nothing was run"
        ) from error
    if not tensors:
        raise CheckpointError(f"{path} holds objects, not tensors alone: they would be unpickled; it is refused")
    if strange := names - {file.path for file in manifest.files}:
        raise CheckpointError(f"{path} points at {str(min(strange))[:60]!r}, which the manifest does not name; refused")
    if getattr(index, "storage_meta", None) is None:
        from torch.distributed.checkpoint.metadata import StorageMeta

        index.storage_meta = StorageMeta()
    return index

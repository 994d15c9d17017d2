"""What a checkpoint is and whether it is whole, without loading it: for ``safetrain verify``."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from ..errors import CheckpointError
from .atomic import StrPath, verify
from .dcp_files import DCP_SCHEMA, DcpManifest, verify_dcp
from .folders import FOLDER_NAME
from .manifest import MANIFEST, ShardManifest, read_json
from .sharded_read import verify_sharded

__all__ = ["checkpoints_in", "inspect", "unfinished_in"]


def inspect(path: StrPath) -> tuple[str, bool]:
    """What a file or a checkpoint folder is, in words, and whether it is whole: by its sums, then by what is in it.

    >>> inspect("no-such.pt")
    ('no-such.pt is missing; nothing can be loaded from it', False)
    """
    if Path(path).is_dir():
        return _inspect_folder(Path(path))
    try:
        verify(path)
        payload = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except CheckpointError as error:
        return str(error), False
    except Exception as error:  # noqa: BLE001  whatever makes torch refuse a file that is whole
        return f"whole, but cannot be read without running code from it ({type(error).__name__})", False
    size = f"{os.path.getsize(path):,} bytes"
    schema = payload.get("schema") if isinstance(payload, dict) else None
    if schema is None:
        return f"weights alone, {len(payload)} tensors, {size}", True
    state = payload.get("state") or {}
    return f"checkpoint {schema}, step {state.get('step')}, {state.get('updates')} updates, {size}", True


def _inspect_folder(folder: Path) -> tuple[str, bool]:
    try:
        told = read_json(folder)
        manifest: DcpManifest | ShardManifest
        if isinstance(told, dict) and told.get("schema") == DCP_SCHEMA:
            manifest = verify_dcp(folder)
            sizes = [file.size_bytes for file in (*manifest.files, *manifest.ranks)]
        else:
            manifest = verify_sharded(folder)
            sizes = [shard.size_bytes for shard in manifest.shards]
    except CheckpointError as error:
        return str(error), False
    about = f"checkpoint {manifest.schema} of {manifest.world_size} ranks, step {manifest.step}"
    return f"{about}, {len(sizes)} files, {sum(sizes):,} bytes", True


def checkpoints_in(path: Path) -> list[Path]:
    """``path`` itself, where it is a checkpoint; else the checkpoints in it, files and folders, by name.

    >>> checkpoints_in(Path("a.pt"))
    [PosixPath('a.pt')]
    """
    if not path.is_dir() or (path / MANIFEST).exists() or FOLDER_NAME.fullmatch(path.name):
        return [path]
    return sorted([*path.glob("*.pt"), *(folder for folder in _step_folders(path) if (folder / MANIFEST).exists())])


def unfinished_in(path: Path) -> list[Path]:
    """Folders of saves that were cut before their manifest was there: they never were checkpoints.

    >>> unfinished_in(Path("a.pt"))
    []
    """
    return [folder for folder in _step_folders(path) if not (folder / MANIFEST).exists()]


def _step_folders(path: Path) -> list[Path]:
    return sorted(folder for folder in path.glob("step_*") if folder.is_dir() and FOLDER_NAME.fullmatch(folder.name))

"""Verified DCP: ``torch.distributed.checkpoint`` for FSDP2's DTensors, each file summed, and verified before a load.

DCP itself writes each rank's part of every tensor, and reads them back on any number of ranks. Added here: files are
written aside, made durable and summed; a manifest over them is published by one rename; every file is verified before
anything is loaded; names, shapes and dtypes are compared first; and DCP's own index, a pickle, is read by an
unpickler that knows its few classes and nothing else.

::

    step_00000010/
      manifest.json                 names everything below, with sha256 and size
      dcp.<nonce>/                  DCP's files: tensors, and the index .metadata
      rank<r>.<nonce>.bin           what rank r alone has (random states, data position); rank 0's has what all share

torch up to 2.13 syncs ``.metadata`` before its buffer is flushed: every file is synced here once more, once closed.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..distributed import everyones, rank, world_size
from ..errors import CheckpointDoesNotFit, CheckpointError, type_of
from .atomic import StrPath, atomic_open, load_while, sync_folder
from .dcp_files import DCP_SCHEMA, DcpManifest, SummedFile, check_file, on_all, read_index, verify_dcp
from .folders import sweep
from .manifest import publish
from .nested import joined, plain_part, tensors_in
from .plain import plain
from .summed import sum_of, write_summed

__all__ = ["DcpReader", "load_dcp", "save_dcp"]


# --- saving ---------------------------------------------------------------------------------------------------------


def save_dcp(
    state: Mapping[str, Any], dest_dir: StrPath, *, step: int, own: Mapping[str, Any] | None = None
) -> DcpManifest:
    """Save ``state`` from all ranks into the folder ``dest_dir``, which all of them see; every rank calls it.

    Args:
        state: nested dicts of tensors, DTensors and plain values, the same on every rank but for what DTensors hold
            there: ``{"model": model.state_dict(), "optimizer": optimizer.state_dict(), ...}``. Of tensors that
            every rank holds whole, one rank's is saved; of plain values, rank 0's.
        step: the attempt that it was saved after.
        own: plain types and tensors that this rank alone has: random states, a data position.

    Raises:
        ValueError: something that could not be read back; nothing is written. On every rank, naming the first.
        CheckpointError: a rank could not write; a checkpoint that ``dest_dir`` held still loads.

    >>> import tempfile
    >>> model = torch.nn.Linear(2, 1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     manifest = save_dcp({"model": model.state_dict(), "lr": 0.5}, folder, step=3)
    ...     _ = torch.nn.init.zeros_(model.weight)
    ...     _, loaded, own = load_dcp(folder, {"model": model.state_dict(), "lr": None})
    ...     manifest.step, loaded["lr"], bool(model.weight.any())
    (3, 0.5, True)
    """
    folder = Path(dest_dir)
    error: str | None = None
    try:
        if not isinstance(state, Mapping):
            raise ValueError(
                f"state is {type_of(state)}, expected a dict of what is to be saved: "
                '{"model": model.state_dict(), "optimizer": optimizer.state_dict(), ...}'
            )
        tensors, rest = tensors_in(state), plain_part(state)
        payload = {"schema": DCP_SCHEMA, "rank": rank(), "step": step, "own": plain(dict(own or {}), "own")}
        payload["common"] = plain(rest, "state") if rank() == 0 else {}
        if type(step) is not int or step < 0:
            raise ValueError(f"step={step!r} must be an integer of at least 0")
    except ValueError as failure:
        error = str(failure)
    if (refused := next((e for e in everyones(error) if e is not None), None)) is not None:
        raise ValueError(refused)

    def prepare() -> str:
        nonce = secrets.token_hex(6)
        (folder / f"dcp.{nonce}").mkdir(parents=True)
        return nonce

    nonce = on_all(lambda: prepare() if rank() == 0 else "", folder)[0]
    part = folder / f"dcp.{nonce}"
    name = f"rank{rank()}.{nonce}.bin"

    def write() -> SummedFile:
        with atomic_open(folder / name) as file:
            return SummedFile(name, *write_summed(payload, file))

    _dcp(lambda dcp: dcp.save(tensors, storage_writer=_writer(part)), part)
    ranks = on_all(write, folder)
    files = [file for told in on_all(lambda: _sync_and_sum(part), folder) for file in told]

    def publish_it() -> DcpManifest | None:
        if rank() != 0:
            return None
        sync_folder(part)
        sync_folder(folder)
        manifest = DcpManifest(DCP_SCHEMA, world_size(), step, time.time(), part.name, tuple(files), tuple(ranks))
        publish(manifest.to_json(), folder)
        sweep(folder, keep={part.name, *(file.path for file in ranks)})
        return manifest

    manifest = on_all(publish_it, folder)[0]
    if manifest is None:
        raise CheckpointError(f"rank 0 told of no manifest in {folder}; the ranks are out of step")
    return manifest


def _dcp(work: Callable[[Any], Any], part: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is .*single process")  # as it is meant
            work(dcp)
    except CheckpointException as error:  # DCP tells it on every rank
        number, failure = next(iter(error.failures.items()))
        told = f"{part}: {failure[0]} (on rank {number})"
        if "enforce fail" in told:  # torch's zip writer covers what the system said
            free = shutil.disk_usage(part).free
            told = (
                f"rank {number} could not write {part}; is the disk full, or a quota reached? {free:,} bytes are free"
            )
        raise CheckpointError(told) from error


def _writer(part: Path) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    return FileSystemWriter(part, single_file_per_rank=True, sync_files=False)


def _sync_and_sum(part: Path) -> list[SummedFile]:
    """This rank's share of DCP's files, made durable, and summed out of the page cache."""
    made = []
    for name in sorted(os.listdir(part))[rank() :: world_size()]:
        with open(part / name, "r+b" if os.name == "nt" else "rb") as file:
            os.fsync(file.fileno())
            size = os.fstat(file.fileno()).st_size
            made.append(SummedFile(name, sum_of(file, size), size))
    return made


# --- loading --------------------------------------------------------------------------------------------------------


class DcpReader:
    """A verified DCP checkpoint, open to be loaded. Every rank makes one, and each verifies its share of the files.

    Attributes:
        manifest: what it consists of.
        common: the plain values of the saved state, nested as it was.
        own: what this rank alone had; None where the world size is another now.
        shapes: name (``model/norm.weight``) -> shape and dtype of each tensor.

    Raises:
        CheckpointError: missing, damaged, altered, hostile; the same on every rank. Nothing was loaded.
    """

    def __init__(self, src_dir: StrPath) -> None:
        self.folder = Path(src_dir)
        self.manifest = verify_dcp(src_dir)
        self._index = on_all(lambda: read_index(self.part, self.manifest), self.folder)[0]
        self.shapes: dict[str, tuple[torch.Size, torch.dtype]] = {
            name: (entry.size, entry.properties.dtype) for name, entry in self._index.state_dict_metadata.items()
        }
        same_size = self.manifest.world_size == world_size()
        needed = {0, rank()} if same_size else {0}
        told = on_all(lambda: {number: self._rank_file(number) for number in needed}, self.folder)[rank()]
        self.common: dict[str, Any] = told[0]["common"]
        self.own: dict[str, Any] | None = told[rank()]["own"] if same_size else None

    @property
    def part(self) -> Path:
        """The folder with DCP's files."""
        return self.folder / self.manifest.part

    def _rank_file(self, number: int) -> dict[str, Any]:
        file = self.manifest.ranks[number]
        path = self.folder / file.path
        payload = load_while(path, lambda: check_file(file, self.folder, f"rank {number}"))
        if not isinstance(payload, dict) or payload.get("schema") != DCP_SCHEMA or payload.get("rank") != number:
            raise CheckpointError(f"unknown schema in {path}: not rank {number}'s file of a verified DCP checkpoint")
        return payload

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """``CheckpointDoesNotFit`` where names, shapes or dtypes are not those of ``tensors``; nothing is changed."""
        for what, names in (
            ("lacks", tensors.keys() - self.shapes.keys()),
            ("also has", self.shapes.keys() - tensors.keys()),
        ):
            if names:
                raise CheckpointDoesNotFit(f"{self.folder} does not fit: it {what} {min(names)} ({len(names)} in all)")
        for name, tensor in tensors.items():
            shape, dtype = self.shapes[name]
            if (shape, dtype) != (tensor.shape, tensor.dtype):
                raise CheckpointDoesNotFit(
                    f"{self.folder} does not fit: {name} is {dtype} of shape {tuple(shape)} there and {tensor.dtype} "
                    f"of shape {tuple(tensor.shape)} here"
                )

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Load into these tensors, in place, after ``check``; DTensors may be cut for another number of ranks."""
        on_all(lambda: self.check(tensors), self.folder)
        index, part = self._index, self.part

        from torch.distributed.checkpoint.filesystem import FileSystemReader

        class Reader(FileSystemReader):  # type: ignore[misc]
            """DCP's own, with the index that was read already, safely."""

            def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
                return index

        _dcp(lambda dcp: dcp.load(dict(tensors), storage_reader=Reader(part)), part)


def load_dcp(src_dir: StrPath, state: Mapping[str, Any]) -> tuple[DcpManifest, dict[str, Any], dict[str, Any] | None]:
    """Verify, then load into the tensors of ``state``, in place; every rank calls it.

    Args:
        state: nested as it was saved. DTensors may be cut for another number of ranks than at the save.

    Returns:
        The manifest; ``state`` with its plain values as they were saved; this rank's ``own``, None where the world size
        is another now.

    Raises:
        CheckpointError: it cannot be trusted, or does not fit; the tensors are as before. The same on every rank.
        ValueError: ``state`` has two tensors of one name.

    >>> import tempfile
    >>> weight = torch.tensor([1.0, 2.0])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save_dcp({"weight": weight, "lr": 0.5}, folder, step=3, own={"position": 7})
    ...     _ = weight.zero_()
    ...     manifest, state, own = load_dcp(folder, {"weight": weight, "lr": None})
    >>> weight, state["lr"], own, manifest.step
    (tensor([1., 2.]), 0.5, {'position': 7}, 3)
    """
    reader = DcpReader(src_dir)
    reader.fill(tensors_in(state))
    return reader.manifest, joined(state, reader.common), reader.own

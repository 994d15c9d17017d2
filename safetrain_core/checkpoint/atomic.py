"""Writes that are whole or not there: a temporary beside the target, fsync, rename, fsync of the folder.

A checkpoint's sha256 stands behind its zip archive, in the same file and so under the same rename. torch and zipfile
read past it; torch itself checks nothing but the CRC-32 of each entry, and not even that for headers and padding.

Source: Pillai et al. 2014, "All File Systems Are Not Created Equal", OSDI, on what a crash may leave of a rename.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import pathlib
import secrets
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

import torch

from ..errors import CheckpointError
from .plain import plain
from .summed import sum_of, write_summed

__all__ = ["TRAILER", "atomic_save", "atomic_write_bytes", "atomic_write_json", "atomic_write_text", "verify"]

#: Behind the archive: this mark, 64 hexadecimal digits, a newline.
TRAILER = b"\nsafetrain-sha256:"
TRAILER_BYTES = len(TRAILER) + 64 + 1

StrPath = str | os.PathLike[str]


@contextlib.contextmanager
def atomic_open(path: StrPath) -> Iterator[IO[bytes]]:
    """A file to write; it takes the place of ``path`` when the block ends well, and is removed when it does not.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with contextlib.suppress(KeyError), atomic_open(folder + "/a.bin") as file:
    ...         _ = file.write(b"half")
    ...         raise KeyError
    ...     os.listdir(folder)
    []
    """
    target = pathlib.Path(path)
    refuse_no_file(target)
    make_folder(target.parent)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(target)  # a write or a sync that failed: of a full disk, say
        raise
    sync_folder(target.parent)


def refuse_no_file(target: pathlib.Path) -> None:
    """``OSError`` where something is at ``target`` that a rename would destroy, or fail over: a device, a folder."""
    try:
        mode = os.lstat(target).st_mode
    except OSError:  # nothing is there; or the write will tell
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "is a folder; name a file in it", str(target))
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        raise OSError(
            errno.EINVAL, "is a device, a pipe or a socket, which a save would replace; name a file", str(target)
        )


def make_folder(folder: pathlib.Path) -> None:
    """Make ``folder`` and those above it where they are not there, durably: else a crash may lose all that is in it."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


def sync_folder(folder: StrPath) -> None:
    """Make renames and removals in ``folder`` durable. Windows has no such call, and needs none."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def atomic_write_bytes(data: bytes, path: StrPath) -> str:
    """Write ``data`` to ``path`` whole or not at all; returns its sha256.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     digest = atomic_write_bytes(b"abc", folder + "/new/a.bin")
    >>> digest[:8]
    'ba7816bf'
    """
    with atomic_open(path) as file:
        file.write(data)
    return hashlib.sha256(data).hexdigest()


def atomic_write_text(text: str, path: StrPath) -> str:
    """``atomic_write_bytes`` of UTF-8 text.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = atomic_write_text("läuft", folder + "/a.txt")
    ...     print(pathlib.Path(folder, "a.txt").read_text(encoding="utf-8"))
    läuft
    """
    return atomic_write_bytes(text.encode(), path)


def atomic_write_json(value: Any, path: StrPath) -> str:
    """``atomic_write_text`` of JSON with sorted keys; ``ValueError`` or ``TypeError`` before anything is written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = atomic_write_json({"b": 1, "a": None}, folder + "/a.json")
    ...     print(pathlib.Path(folder, "a.json").read_text().split())
    ['{', '"a":', 'null,', '"b":', '1', '}']
    """
    return atomic_write_text(json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n", path)


def atomic_save(payload: Any, path: StrPath) -> str:
    """``torch.save`` that is whole or not there, with its sha256 in the same file. Returns that sha256.

    No second copy of the payload is made. What ``torch.load(weights_only=True)`` could not read back is refused before
    anything is written; NumPy scalars and paths are saved as Python numbers and strings.

    Raises:
        ValueError: the payload holds something that could not be read back; the message says where.
        OSError: the disk is full, the folder cannot be written, ...; an older file at ``path`` is left whole.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     digest = atomic_save({"weight": torch.ones(2), "note": "hello"}, folder + "/a.pt")
    ...     verify(folder + "/a.pt") == digest, torch.load(folder + "/a.pt", weights_only=True)["note"]
    (True, 'hello')
    """
    payload = plain(payload)
    with atomic_open(path) as file:
        digest, _ = write_summed(payload, file)
        file.write(TRAILER + digest.encode() + b"\n")
    return digest


def verify(path: StrPath) -> str:
    """The sha256 of a file that ``atomic_save`` wrote, if the file is whole. Nothing is unpickled.

    Raises:
        CheckpointError: the file is missing, torn, altered by as much as a bit, or not ours.

    >>> verify("no-such.pt")
    Traceback (most recent call last):
    ...
    safetrain_core.errors.CheckpointError: no-such.pt is missing; nothing can be loaded from it
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise CheckpointError(f"{path} cannot be read: it is no file; name a checkpoint")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            end = size - TRAILER_BYTES
            file.seek(max(0, end))
            trailer = file.read()
            if end < 0 or not trailer.startswith(TRAILER) or not trailer.endswith(b"\n"):
                raise CheckpointError(
                    f"{path} has no sha256 at its end: it is torn ({size} bytes) or was not written by safetrain; "
                    "take an older checkpoint"
                )
            told = trailer[len(TRAILER) : -1].decode(errors="replace")
            found = sum_of(file, end)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; nothing can be loaded from it") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if found != told:
        raise CheckpointError(f"{path} is altered or torn: its sha256 is {found[:12]}..., written down {told[:12]}...")
    return found


def load_while(path: StrPath, check: Callable[[], Any]) -> Any:
    """``torch.load(path, weights_only=True)``, tensors on the CPU, beside ``check()``, which says if the file is whole.

    The file is read once, and once more from the page cache. What ``check`` raises goes before torch's own error.

    Raises:
        CheckpointError: the file cannot be read without running code from it; or as ``check`` has it.
    """
    with ThreadPoolExecutor(1) as pool:
        checked = pool.submit(check)
        try:
            payload, failure = torch.load(path, map_location="cpu", weights_only=True), None
        except Exception as error:  # noqa: BLE001  whatever a broken archive makes torch raise
            payload, failure = None, error
        checked.result()
    if failure is not None:
        raise CheckpointError(
            f"{path} is whole but cannot be read without running code from it ({type(failure).__name__}); "
            "it is refused, nothing was executed"
        ) from failure
    return payload

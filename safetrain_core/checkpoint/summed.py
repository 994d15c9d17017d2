"""The sha256 of a file as it is written, and of one that is there; neither takes a second copy of what it holds."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from typing import IO, Any

import torch

__all__ = ["FollowingSum", "sum_of", "write_summed"]

#: Bytes summed at a time behind a writer: small enough to be hashed out of the processor's cache (4 MiB took 5 to 25 %
#: longer).
CHUNK = 1 << 17
#: And of a file that is there: beside a load fewer turns of the interpreter count for more.
VERIFY_CHUNK = 1 << 20


class FollowingSum:
    """The sha256 of a file that is being written, by a thread that reads behind the writer, out of the page cache.

    So the sum is ready about when the data is on the disk, and nothing is hashed that was not written. Reading behind
    takes one chunk of memory, and works for tensors whose memory is gone once they are written (a GPU's).
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.error: OSError | None = None
        self._file, self._sum = file, hashlib.sha256()
        self._more, self._ended = threading.Event(), False
        self._failed: BaseException | None = None
        self._reader = open(file.name, "rb", buffering=0)  # noqa: SIM115  closed by finish()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def write(self, data: Any) -> int:
        """For ``torch.save``: write a chunk, and wake the reader."""
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error  # torch's zip writer covers it by an error of its own
            raise
        finally:
            self._more.set()

    def flush(self) -> None:
        """As a file's."""
        self._file.flush()

    def _follow(self) -> None:
        try:
            self._sum_up()
        except BaseException as error:  # noqa: BLE001  told by finish(), in the thread that saves
            self._failed = error

    def _sum_up(self) -> None:
        chunk = memoryview(bytearray(CHUNK))
        while True:
            ended = self._ended
            while count := self._reader.readinto(chunk):  # type: ignore[attr-defined]
                self._sum.update(chunk[:count])
            if ended:
                return
            self._more.wait()
            self._more.clear()

    def finish(self) -> str:
        """After a flush, and nothing more to come: the sum of all that was written; what kept it from being made."""
        self._ended = True
        self._more.set()
        self._thread.join()
        self._reader.close()
        if self._failed is not None:
            raise self._failed
        return self._sum.hexdigest()


def write_summed(payload: Any, file: IO[bytes]) -> tuple[str, int]:
    """``torch.save`` of a plain payload to an open file, to the disk; its sha256 and its bytes. One copy, one pass."""
    following = FollowingSum(file)
    try:
        torch.save(payload, following)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())  # the long wait; the sum is made meanwhile
    except BaseException as error:
        with contextlib.suppress(BaseException):
            following.finish()
        if isinstance(error, RuntimeError) and following.error is not None:
            raise following.error from None
        raise
    return following.finish(), file.tell()


def sum_of(file: IO[bytes], end: int) -> str:
    """The sha256 of the first ``end`` bytes of an open file, read into one piece of memory again and again."""
    file.seek(0)
    digest, left = hashlib.sha256(), end
    chunk = memoryview(bytearray(min(VERIFY_CHUNK, max(1, end))))
    while left > 0 and (count := file.readinto(chunk[:left])):  # type: ignore[attr-defined]
        digest.update(chunk[:count])
        left -= count
    return digest.hexdigest()

"""Every state that a crash could leave of a save: records its file-system calls, then rebuilds what they allow.

The model: data of a file is certain up to its last fsync; what came after may be kept, lost, or cut in the middle. A
create, rename or removal is certain once its folder was fsynced; until then each may have happened or not, whatever
became of the others. A crash may come after each call.
"""

from __future__ import annotations

import builtins
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetrain_core.checkpoint import atomic

Op = tuple[Any, ...]


class Recorder:
    """Passes each call through, and notes it: ("create", name), ("write", name, bytes), ("fsync", name or None), ..."""

    def __init__(self, folder: Path, monkeypatch: Any) -> None:
        self.folder, self.ops = folder, []
        self._names: dict[int, str | None] = {}
        real = {n: getattr(os, n) for n in ("fsync", "replace", "unlink", "open", "close")}
        real_open = builtins.open

        def opened(target: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            file = real_open(target, mode, *args, **kwargs)
            if "w" in mode or "x" in mode:
                name = os.path.basename(target)
                self._names[file.fileno()] = name
                self.ops.append(("create", name))
                return Traced(file, self)
            return file

        def fsync(handle: int) -> None:
            real["fsync"](handle)
            self.ops.append(("fsync", self._names.get(handle)))

        def replace(source: Any, target: Any) -> None:
            real["replace"](source, target)
            self.ops.append(("rename", os.path.basename(source), os.path.basename(target)))

        def unlink(path: Any, **kwargs: Any) -> None:
            real["unlink"](path, **kwargs)
            self.ops.append(("unlink", os.path.basename(path)))

        def folder_open(path: Any, *args: Any, **kwargs: Any) -> int:
            handle = real["open"](path, *args, **kwargs)
            self._names[handle] = None
            return handle

        monkeypatch.setattr(atomic, "open", opened, raising=False)
        for name, function in (("fsync", fsync), ("replace", replace), ("unlink", unlink), ("open", folder_open)):
            monkeypatch.setattr(os, name, function)
        self.open = opened


class Traced:
    """A file whose writes are noted."""

    def __init__(self, file: Any, recorder: Recorder) -> None:
        self._file, self._recorder = file, recorder
        self._name = recorder._names[file.fileno()]

    def write(self, data: Any) -> int:
        self._recorder.ops.append(("write", self._name, bytes(data)))
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Traced:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)


class Inode:
    def __init__(self, data: bytes = b"") -> None:
        self.written, self.certain = bytearray(data), len(data)

    def variants(self) -> list[bytes]:
        whole, sure = bytes(self.written), self.certain
        return list(dict.fromkeys([whole, whole[:sure], whole[: (sure + len(whole)) // 2]]))


def states(before: dict[str, bytes], ops: list[Op]) -> Iterator[dict[str, bytes]]:
    """Each distinct content that the folder could have after a crash, the end included."""
    seen: set[tuple[tuple[str, bytes], ...]] = set()
    for end in range(len(ops) + 1):
        for state in _after(before, ops[:end]):
            key = tuple(sorted(state.items()))
            if key not in seen:
                seen.add(key)
                yield state


def _after(before: dict[str, bytes], ops: list[Op]) -> Iterator[dict[str, bytes]]:
    certain = {name: Inode(data) for name, data in before.items()}
    now = dict(certain)
    pending: list[tuple[str, str | None, Inode | None]] = []  # (name gone or "", name made, inode)
    for kind, *rest in ops:
        if kind == "create":
            now[rest[0]] = Inode()
            pending.append(("", rest[0], now[rest[0]]))
        elif kind == "write":
            now[rest[0]].written += rest[1]
        elif kind == "fsync" and rest[0] is not None:
            if rest[0] in now:
                now[rest[0]].certain = len(now[rest[0]].written)
        elif kind == "fsync":
            certain, pending = dict(now), []
        elif kind == "rename":
            now[rest[1]] = now.pop(rest[0])
            pending.append((rest[0], rest[1], now[rest[1]]))
        elif kind == "unlink" and rest[0] in now:
            del now[rest[0]]
            pending.append((rest[0], None, None))
    for happened in itertools.product((False, True), repeat=len(pending)):
        entries = dict(certain)
        for done, (gone, made, inode) in zip(happened, pending, strict=True):
            if done:
                entries.pop(gone, None)
                if made is not None and inode is not None:
                    entries[made] = inode
        inodes = list({id(inode): inode for inode in entries.values()}.values())
        for chosen in itertools.product(*(inode.variants() for inode in inodes)):
            content = {id(inode): data for inode, data in zip(inodes, chosen, strict=True)}
            yield {name: content[id(inode)] for name, inode in entries.items()}


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def survives(
    folder: Path, monkeypatch: Any, save: Callable[[Recorder], None], check: Callable[[Path], bool], scratch: Path
) -> tuple[int, int]:
    """Run ``save`` in ``folder``; (states tried, states in which ``check`` of a rebuilt folder was False)."""
    before = snapshot(folder)
    with monkeypatch.context() as patch:
        recorder = Recorder(folder, patch)
        save(recorder)
    tried = failed = 0
    for number, state in enumerate(states(before, recorder.ops)):
        rebuilt = scratch / str(number)
        rebuilt.mkdir(parents=True)
        for name, data in state.items():
            (rebuilt / name).write_bytes(data)
        tried += 1
        failed += not check(rebuilt)
    return tried, failed

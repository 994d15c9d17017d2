"""Every state that a crash could leave of a save: records its file-system calls, then rebuilds what they allow.

The model: data of a file is certain up to its last fsync; what came after may be kept, lost, or cut in the middle, and
what Python still buffers at an fsync came after. A create, rename or removal is certain once its folder was fsynced;
until then each may have happened or not, whatever became of the others. That holds for folders in folders, too. A crash
may come after each call. A save may use threads: the calls are then one order that they had.
"""

from __future__ import annotations

import builtins
import io
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetrain_core.checkpoint import atomic

Op = tuple[Any, ...]

#: Path from the root to content; None for a folder.
State = dict[str, bytes | None]


class Recorder:
    """Passes each call through, and notes those in ``folder``, by paths relative to it.

    ("create", path), ("mkdir", path), ("write", path, bytes), ("fsync", path, bytes that had reached the file),
    ("fsync folder", path), ("rename", from, to), ("remove", path). Seen are ``open`` and what is above it (pathlib),
    ``os`` and what is above it (shutil); not what C++ opens by itself (``torch.save`` to a path).
    """

    def __init__(self, folder: Path, monkeypatch: Any) -> None:
        self.folder, self.ops = folder, []
        self._root, self._lock = os.path.realpath(folder), threading.RLock()
        self._paths: dict[int, str] = {}  # of open handles
        self._real = {n: getattr(os, n) for n in ("fsync", "open", "close")}
        self._real_open = builtins.open
        monkeypatch.setattr(atomic, "open", self.open, raising=False)
        monkeypatch.setattr(builtins, "open", self.open)
        monkeypatch.setattr(io, "open", self.open)
        for name in ("fsync", "open", "close"):
            monkeypatch.setattr(os, name, getattr(self, f"_{name}"))
        for name in ("unlink", "remove", "rmdir"):
            monkeypatch.setattr(os, name, self._noting("remove", getattr(os, name)))
        monkeypatch.setattr(os, "mkdir", self._noting("mkdir", os.mkdir))
        for name in ("rename", "replace"):
            monkeypatch.setattr(os, name, self._noting("rename", getattr(os, name)))

    def _inside(self, path: Any, dir_fd: int | None = None) -> str | None:
        """``path`` relative to the root ("" for the root itself); None for what is elsewhere."""
        if isinstance(path, int):
            return self._paths.get(path)
        path = os.fsdecode(path)
        if dir_fd is not None:
            if dir_fd not in self._paths:
                return None
            path = os.path.join(self._root, self._paths[dir_fd], path)
        path = os.path.join(os.path.realpath(os.path.dirname(path) or "."), os.path.basename(path))
        return path[len(self._root) + 1 :] if f"{path}/".startswith(f"{self._root}/") else None

    def open(self, target: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        path = self._inside(target)
        with self._lock:
            file = self._real_open(target, mode, *args, **kwargs)
            if path is None or not set(mode) & set("wxa+"):
                self._paths.pop(file.fileno(), None)
                if path is not None:  # what is open for reading can be synced, too
                    self._paths[file.fileno()] = path
                return file
            assert set(mode) & set("wx"), f"{path} is opened with {mode}, which is not followed"
            self._paths[file.fileno()] = path
            self.ops.append(("create", path))
        return Traced(file, self, path)

    def _fsync(self, handle: int) -> None:
        with self._lock:
            self._real["fsync"](handle)
            if (path := self._paths.get(handle)) is not None:
                folder = os.path.isdir(os.path.join(self._root, path))
                self.ops.append(("fsync folder", path) if folder else ("fsync", path, os.fstat(handle).st_size))

    def _open(self, path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        inside = self._inside(path, kwargs.get("dir_fd"))
        assert inside is None or not flags & (os.O_WRONLY | os.O_RDWR), f"{path} is written by os.open, not followed"
        with self._lock:
            handle = self._real["open"](path, flags, *args, **kwargs)
            self._paths.pop(handle, None)
            if inside is not None:
                self._paths[handle] = inside
        return handle

    def _close(self, handle: int) -> None:
        with self._lock:
            self._paths.pop(handle, None)
            self._real["close"](handle)

    def _noting(self, kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            count = 2 if kind == "rename" else 1
            paths = [self._inside(path, kwargs.get("dir_fd")) for path in args[:count]]
            assert len({path is None for path in paths}) == 1, f"{args} goes into the folder, or out of it"
            with self._lock:
                result = real(*args, **kwargs)
                if paths[0] is not None:
                    self.ops.append((kind, *paths))
            return result

        return call


class Traced:
    """A file whose writes are noted."""

    def __init__(self, file: Any, recorder: Recorder, path: str) -> None:
        self._file, self._recorder, self._path = file, recorder, path

    def write(self, data: Any) -> int:
        with self._recorder._lock:
            self._recorder.ops.append(("write", self._path, bytes(data)))
            return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        assert name not in ("seek", "truncate", "writelines"), f"{name}() is not followed"
        return getattr(self._file, name)

    def __enter__(self) -> Traced:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)


# --- what the calls allow -----------------------------------------------------------------------------------------


class Inode:
    def __init__(self, data: bytes = b"") -> None:
        self.written, self.certain = bytearray(data), len(data)

    def variants(self) -> list[bytes]:
        whole, sure = bytes(self.written), self.certain
        return list(dict.fromkeys([whole, whole[:sure], whole[: (sure + len(whole)) // 2]]))


class Folder:
    """What is in it now, what is certain to be after a crash, and the changes in between that may be lost."""

    def __init__(self) -> None:
        self.now: dict[str, Inode | Folder] = {}
        self.certain: dict[str, Inode | Folder] = {}
        self.pending: list[Change] = []


#: When it was made, and what it puts where (None = removed); all of it happens, or nothing.
Change = tuple[int, list[tuple[Folder, str, "Inode | Folder | None"]]]


class Tree:
    def __init__(self, before: State) -> None:
        self.root, self.clock = Folder(), itertools.count()
        for path in sorted(before):
            data = before[path]
            folder, name = self.at(path)
            folder.now[name] = folder.certain[name] = Folder() if data is None else Inode(data)

    def at(self, path: str) -> tuple[Folder, str]:
        *parts, name = path.split("/")
        folder = self.root
        for part in parts:
            inner = folder.now[part]
            assert isinstance(inner, Folder)
            folder = inner
        return folder, name

    def change(self, *assigned: tuple[Folder, str, Inode | Folder | None]) -> None:
        for folder, name, node in assigned:
            _assign(folder.now, name, node)
        assigned[-1][0].pending.append((next(self.clock), list(assigned)))

    def replay(self, op: Op) -> None:
        kind, path = op[:2]
        if kind == "fsync folder":
            folder = self.root
            if path:
                parent, name = self.at(path)
                folder = parent.now[name]  # type: ignore[assignment]
            for _, assigned in folder.pending:
                for where, name, node in assigned:
                    _assign(where.certain, name, node)
            folder.pending = []
            return
        folder, name = self.at(path)
        if kind in ("create", "mkdir"):
            self.change((folder, name, Inode() if kind == "create" else Folder()))
        elif kind == "remove":
            self.change((folder, name, None))
        elif kind == "rename":
            self.change((folder, name, None), (*self.at(op[2]), folder.now[name]))
        elif name in folder.now:  # else written after it was removed: nobody will see it
            file = folder.now[name]
            assert isinstance(file, Inode)
            if kind == "write":
                file.written += op[2]
            else:
                file.certain = max(file.certain, op[2])

    def pending(self, folder: Folder | None = None) -> list[Change]:
        folder = folder or self.root
        maybe = [node for _, assigned in folder.pending for _, _, node in assigned]
        inner = {id(n): n for n in (*folder.now.values(), *folder.certain.values(), *maybe) if isinstance(n, Folder)}
        return sorted([*folder.pending, *(c for f in inner.values() for c in self.pending(f))], key=lambda c: c[0])

    def crashed(self, unread: Callable[[str], bool]) -> Iterator[State]:
        pending = self.pending()
        assert len(pending) <= 14, f"{len(pending)} changes may each have happened or not: more than can be tried"
        for happened in itertools.product((False, True), repeat=len(pending)):
            entries: dict[int, dict[str, Inode | Folder]] = {}
            for done, (_, assigned) in zip(happened, pending, strict=True):
                for folder, name, node in assigned if done else ():
                    _assign(entries.setdefault(id(folder), dict(folder.certain)), name, node)
            found = dict(_walk(self.root, entries, ""))
            inodes = {id(node): (path, node) for path, node in found.items() if isinstance(node, Inode)}
            ways = [[b""] if unread(path) else n.variants() for path, n in inodes.values()]
            for chosen in itertools.product(*ways):
                content = dict(zip(inodes, chosen, strict=True))
                yield {path: content.get(id(node)) for path, node in found.items()}


def _assign(entries: dict[str, Inode | Folder], name: str, node: Inode | Folder | None) -> None:
    if node is None:
        entries.pop(name, None)
    else:
        entries[name] = node


def _walk(folder: Folder, entries: dict[int, dict[str, Any]], at: str) -> Iterator[tuple[str, Inode | Folder]]:
    for name, node in entries.get(id(folder), folder.certain).items():
        yield at + name, node
        if isinstance(node, Folder):
            yield from _walk(node, entries, f"{at}{name}/")


def states(before: State, ops: list[Op], unread: Callable[[str], bool] = lambda path: False) -> Iterator[State]:
    """Each distinct content that the folder could have after a crash, the end included.

    Args:
        unread: whether a path is one whose content nobody reads (a temporary); then it is there or not, but empty.
    """
    seen: set[tuple[tuple[str, bytes | None], ...]] = set()
    tree = Tree(before)
    for op in [None, *ops]:
        if op is not None:
            tree.replay(op)
            if op[0] == "write" and unread(op[1]):
                continue
        for state in tree.crashed(unread):
            key = tuple(sorted(state.items()))
            if key not in seen:
                seen.add(key)
                yield state


def snapshot(folder: Path) -> State:
    return {
        path.relative_to(folder).as_posix(): None if path.is_dir() else path.read_bytes() for path in folder.rglob("*")
    }


def survives(
    folder: Path,
    monkeypatch: Any,
    save: Callable[[Recorder], Any],
    check: Callable[[Path], bool],
    scratch: Path,
    unread: Callable[[str], bool] = lambda path: False,
    ended: Callable[[Path], bool] = lambda folder: True,
) -> tuple[int, int]:
    """Run ``save`` in ``folder``; (states tried, states in which ``check`` of a rebuilt folder was False).

    Args:
        unread: see ``states``. ended: what has to hold in every state that a crash leaves after the save has returned.
    """
    before = snapshot(folder)
    with monkeypatch.context() as patch:
        recorder = Recorder(folder, patch)
        save(recorder)

    def holds(state: State, wanted: Callable[[Path], bool]) -> bool:
        rebuilt = scratch / "state" / folder.name
        rebuilt.mkdir(parents=True)
        for path, data in sorted(state.items()):
            (rebuilt / path).mkdir() if data is None else (rebuilt / path).write_bytes(data)
        held = wanted(rebuilt)
        shutil.rmtree(scratch / "state")
        return held

    tried = failed = 0
    for state in states(before, recorder.ops, unread):
        tried += 1
        failed += not holds(state, check)
    tree = Tree(before)
    for op in recorder.ops:
        tree.replay(op)
    failed += sum(not holds(state, ended) for state in tree.crashed(unread))
    return tried, failed

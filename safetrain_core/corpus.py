"""Character-level text to train on: by default the sources of Python's standard library, which every machine has."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["Corpus", "TextWindows", "default_corpus_files", "read_text"]

#: Long-lived modules with plenty of English in them; about two million characters together.
DEFAULT_MODULES = [
    "argparse",
    "ast",
    "calendar",
    "configparser",
    "dataclasses",
    "datetime",
    "difflib",
    "doctest",
    "enum",
    "functools",
    "heapq",
    "inspect",
    "logging/__init__",
    "mailbox",
    "optparse",
    "pdb",
    "pickle",
    "random",
    "statistics",
    "subprocess",
    "tarfile",
    "textwrap",
    "turtle",
    "typing",
    "unittest/mock",
    "zipfile",
]


def default_corpus_files() -> list[Path]:
    """The standard library's files that make up the default corpus; those this Python lacks are left out.

    Raises:
        ValueError: none of them is there (a Python shipped without its sources).

    >>> all(path.suffix == ".py" for path in default_corpus_files())
    True
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in (root / f"{name}.py" for name in DEFAULT_MODULES) if path.is_file()]
    if not files:
        raise ValueError(f"this Python has no standard library sources in {root}; name a text with --corpus FILE")
    return files


def read_text(path: str | Path) -> str:
    """The text of one UTF-8 file, with newlines as ``\\n``.

    Raises:
        ValueError: missing, a folder, unreadable, empty, binary, or not UTF-8; the message says which.

    >>> read_text("no-such-file.txt")
    Traceback (most recent call last):
    ...
    ValueError: corpus no-such-file.txt does not exist; name a UTF-8 text file
    """
    path = Path(path)
    try:
        if not path.exists():
            raise ValueError(f"corpus {path} does not exist; name a UTF-8 text file")
        if path.is_dir():
            raise ValueError(f"corpus {path} is a folder; name its text files, for example {path}/*.txt")
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(f"corpus {path} cannot be read: {error.strerror}") from error
    if b"\0" in raw:
        raise ValueError(f"corpus {path} is binary (byte 0 at offset {raw.index(0)}); name a UTF-8 text file")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"corpus {path} is not UTF-8 text (byte {raw[error.start]:#04x} at offset {error.start}); convert it"
        ) from error
    if not text.strip():
        raise ValueError(f"corpus {path} is empty; name a file with text in it")
    return text.replace("\r\n", "\n").replace("\r", "\n")


class TextWindows(Dataset[tuple[Tensor, Tensor]]):
    """Non-overlapping windows of ``context`` tokens: item i is (inputs, targets), both (context,) int64.

    >>> data = TextWindows(torch.arange(7), context=3)
    >>> len(data), data[1]
    (2, (tensor([3, 4, 5]), tensor([4, 5, 6])))
    """

    def __init__(self, ids: Tensor, context: int) -> None:
        self.ids, self.context = ids, context

    def __len__(self) -> int:
        return max(0, len(self.ids) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.context
        piece = self.ids[start : start + self.context + 1]
        return piece[:-1], piece[1:]


class Corpus:
    """A text as character ids, its vocabulary, and a fixed split: the last tenth is for validation.

    Args:
        text: the whole text.
        context: tokens per window; each part of the split must hold at least one window.
        val_fraction: share of the text, from its end, kept for validation.

    Attributes:
        vocab: the distinct characters, sorted. train, val: ``TextWindows``.

    Raises:
        ValueError: the text is shorter than one window in either part.

    >>> corpus = Corpus("hello world, " * 40, context=16)
    >>> len(corpus.train), len(corpus.val), corpus.decode(corpus.encode("hello"))
    (29, 3, 'hello')
    """

    def __init__(self, text: str, context: int, val_fraction: float = 0.1) -> None:
        # UTF-32: one integer per character, so that numpy finds the vocabulary in one pass.
        points = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype=np.uint32)
        vocab, ids = np.unique(points, return_inverse=True)
        self.vocab = "".join(map(chr, vocab.tolist()))
        self._id_of = {char: i for i, char in enumerate(self.vocab)}
        tokens = self._tokens = torch.from_numpy(ids.reshape(-1).astype(np.int64))
        cut = len(tokens) - int(len(tokens) * val_fraction)
        self.train = TextWindows(tokens[:cut], context)
        self.val = TextWindows(tokens[cut:], context)
        shortest = min(len(self.train), len(self.val))
        if shortest < 1:
            need = int((context + 1) / min(val_fraction, 1 - val_fraction)) + 1
            raise ValueError(
                f"corpus has {len(tokens)} characters; with context={context} and {val_fraction:.0%} kept for "
                f"validation it needs about {need}; give more text or a shorter context"
            )

    @classmethod
    def from_files(cls, paths: Sequence[str | Path] | None, context: int) -> Corpus:
        """The texts of ``paths`` joined, in the order given; None = the default corpus."""
        return cls("\n".join(read_text(p) for p in paths or default_corpus_files()), context)

    def sha256(self) -> str:
        """Of the text: two corpora with the same sum are the same."""
        return hashlib.sha256(self.vocab.encode("utf-8", "surrogatepass") + self._tokens.numpy().tobytes()).hexdigest()

    def encode(self, text: str) -> Tensor:
        """Characters -> ids, (len(text),) int64; ``ValueError`` names one that the vocabulary lacks."""
        unknown = sorted(set(text) - self._id_of.keys())
        if unknown:
            raise ValueError(f"character {unknown[0]!r} is not in this corpus's vocabulary of {len(self.vocab)}")
        return torch.tensor([self._id_of[char] for char in text], dtype=torch.int64)

    def decode(self, ids: Tensor) -> str:
        """Ids (any shape, read in order) -> text."""
        return "".join(self.vocab[i] for i in ids.flatten().tolist())

"""What a run shows on the terminal: a row per step, a progress bar, warnings in a line, a summary."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ..config import TrainConfig
from ..records import StepLog
from .result import FitResult

if TYPE_CHECKING:
    from .ranks import RankFacts  # torch comes with it, and a warning needs none

__all__ = ["plain_warnings", "print_ranks", "print_summary", "row_printer", "say"]


def say(text: str, file: TextIO | None = None) -> None:
    """Print at once, to stdout by default."""
    print(text, file=file, flush=True)


@contextlib.contextmanager
def row_printer(total: int | None) -> Iterator[Callable[[StepLog], None]]:
    """Prints rows to stdout; on a terminal, with a progress bar below them on stderr."""
    bar: Any = None
    if sys.stderr.isatty():
        with contextlib.suppress(ImportError):
            from tqdm import tqdm

            bar = tqdm(total=total, unit="update", file=sys.stderr)

    def show(row: StepLog) -> None:
        if bar is None:
            print(row, flush=True)
        else:
            bar.write(str(row), file=sys.stdout)
            bar.update(not row.skipped)

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """A warning as one line, without the source line that raised it."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *rest, **named: print(f"warning: {message}", file=sys.stderr)
        yield


def print_summary(out: Path, config: TrainConfig, result: FitResult) -> None:
    """What a run reached, a fact per line."""

    def loss(value: float | None) -> str:
        return "-" if value is None else f"{value:.4f}"

    print(f"{result.status}: {out}")
    print(f"  updates          {result.state.updates}")
    print(f"  skips            {result.skips} of {result.state.step} steps")
    print(f"  skip rate        {result.skip_rate:.1%}")
    print(f"  first loss       {loss(result.first_loss)}")
    print(f"  last loss        {loss(result.last_loss)}")
    print(f"  validation loss  {loss(result.val_loss)}")
    if config.gpu_temp_guard:
        print(f"  paused           {result.pauses} times, {result.paused_s:.1f} s, by the thermal guard")
    if result.switches:
        print(f"  switched device  {result.switches} times")
    print(f"  log              {config.csv_log_path or out / 'metrics.csv'}", flush=True)


def print_ranks(facts: Sequence[RankFacts]) -> None:
    """What each rank holds, beside 12 P / N bytes.

    >>> from safetrain_core.train.ranks import RankFacts
    >>> print_ranks([RankFacts(r, 8, 4, 16, 32, 1.5) for r in range(2)])
    rank   weights held   weights + optimizer, bytes   12 P / N, bytes   parameter norm
       0              4                           48                48       1.50000000
       1              4                           48                48       1.50000000
    """
    print("rank   weights held   weights + optimizer, bytes   12 P / N, bytes   parameter norm")
    for fact in facts:
        held = fact.weight_bytes + fact.optimizer_bytes
        print(f"{fact.rank:4d} {fact.held:14,d} {held:28,d} {fact.ideal_bytes(len(facts)):17,.0f} {fact.norm:16.8f}")

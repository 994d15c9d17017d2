"""``safetrain watch``: live readings of a GPU, and what the guard would do. It stops nothing; torch is not needed."""

from __future__ import annotations

import argparse
import contextlib
import csv
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ..config import TrainConfig
from ..records import GPU_COLUMNS
from .guard import ThermalGuard
from .nvml import GpuMonitor
from .reading import GpuReading
from .states import ThermalState, Thresholds
from .trace import SECONDS, RecordedTrace
from .visible import parsed_device

__all__ = ["add_arguments", "watch"]

EXIT_UNKNOWN, EXIT_TOO_HOT = 1, 75

#: The columns of ``--csv``; ``--replay`` reads them.
COLUMNS = (SECONDS, *GPU_COLUMNS, "sm_clock_mhz", "memory_clock_mhz", "throttle_reasons", "guard_state")

#: Seconds since the beginning, where known, and the reading.
Timed = tuple[float | None, GpuReading]

WOULD = {
    ThermalState.NORMAL: "normal",
    ThermalState.PAUSED: "would pause",
    ThermalState.ABORTED: "would abort",
}


def add_arguments(verbs: Any) -> None:
    """Add the verb ``watch`` to argparse's ``verbs``."""
    verb = verbs.add_parser(
        "watch",
        help="show a GPU's temperature, and what the guard would do",
        description="Print a line per reading of one NVIDIA GPU, beside whatever runs on it, and what the guard would "
        "do to a training run; it stops nothing itself. Ctrl-C ends it. Exit status of --once and --replay: 0 normal, "
        "or paused; 75 would abort; 1 no temperature.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    verb.add_argument("--device", default="cuda:0", metavar="X", help="cuda:1, 1 or a UUID, under CUDA_VISIBLE_DEVICES")
    verb.add_argument("--nvml-device-index", type=int, metavar="N", help="NVML's own number, instead of --device")
    verb.add_argument("--interval", type=float, default=5.0, metavar="S", help="seconds between readings")
    verb.add_argument("--once", action="store_true", help="one reading, then stop")
    verb.add_argument("--csv", type=Path, metavar="FILE", help="also write the readings to a new CSV file")
    verb.add_argument("--replay", type=Path, metavar="FILE", help="judge a recorded CSV instead of a GPU")
    for name in ("pause", "resume", "critical"):
        flag, field = f"--gpu-temp-{name}-threshold-c", f"gpu_temp_{name}_threshold_c"
        default = TrainConfig.model_fields[field].default
        verb.add_argument(flag, type=float, default=default, metavar="C", help=f"the guard's {name} threshold")


def watch(args: argparse.Namespace) -> int:
    """Run the verb; the exit status. ``ValueError`` for a mistake in the arguments, before anything is written."""
    if not 0 < args.interval < threading.TIMEOUT_MAX:
        raise ValueError(f"--interval {args.interval:g} must be above 0 and below {threading.TIMEOUT_MAX:.0e} seconds")
    limits = Thresholds(
        args.gpu_temp_pause_threshold_c, args.gpu_temp_resume_threshold_c, args.gpu_temp_critical_threshold_c
    )
    if args.replay is not None:
        trace = RecordedTrace(args.replay)
        with _table(args.csv) as write:
            return _show(((row.seconds, row.reading) for row in trace.rows), limits, None, write)
    if args.nvml_device_index is None and parsed_device(args.device) is None:
        raise ValueError(f"--device {args.device} names no NVIDIA GPU; name one as cuda:1, 1 or by its UUID, GPU-...")
    with GpuMonitor(args.device, nvml_device_index=args.nvml_device_index) as monitor, _table(args.csv) as write:
        told = [f"slows itself down at {monitor.slowdown_c:g} C"] if monitor.slowdown_c is not None else []
        told += [f"switches itself off at {monitor.shutdown_c:g} C"] if monitor.shutdown_c is not None else []
        print(", ".join([f"{monitor.name or args.device}", *told]), flush=True)
        return _show(_live(monitor, args.interval, once=args.once), limits, monitor.slowdown_c, write)


def _live(monitor: GpuMonitor, interval_s: float, *, once: bool) -> Iterator[Timed]:
    start = time.monotonic()
    yield 0.0, monitor.read()
    while not once:
        time.sleep(interval_s)
        yield time.monotonic() - start, monitor.read()


def _show(
    readings: Iterable[Timed], limits: Thresholds, slowdown_c: float | None, write: Callable[[dict[str, Any]], None]
) -> int:
    """A line per reading, and what the guard would have done at the end; the exit status."""
    guard = ThermalGuard(
        lambda: None,  # it is shown each reading instead
        limits.pause_c,
        limits.resume_c,
        limits.critical_c,
        slowdown_c=slowdown_c,
        on_event=lambda event: None,
    )
    known, number, paused_s, before = False, 0, 0.0, None
    for seconds, reading in readings:
        was, told = guard.state, len(guard.events)
        state = guard.see(reading)
        number, known = number + 1, known or reading.temperature_c is not None
        if was == ThermalState.PAUSED and seconds is not None and before is not None:
            paused_s += seconds - before
        before = seconds
        why = f" ({guard.events[-1].why})" if len(guard.events) > told else ""
        when = "" if seconds is None else f"{seconds:8.1f} s  "
        blind = reading.temperature_c is None and state == ThermalState.NORMAL
        values = (*reading.cells().values(), reading.sm_clock_mhz, reading.memory_clock_mhz)
        reasons = None if reading.throttle_reasons is None else "; ".join(reading.throttle_reasons)
        write(dict(zip(COLUMNS, (seconds, *values, reasons, state.value), strict=True)))
        print(f"{when}{reading}: {'cannot tell' if blind else WOULD[state]}{why}", flush=True)
    pauses = sum(event.state == ThermalState.PAUSED for event in guard.events)
    aborted = guard.state == ThermalState.ABORTED
    counts = f"{number} reading{'s' * (number != 1)}: {pauses} pause{'s' * (pauses != 1)}"
    print(f"{counts} of {paused_s:.1f} s in all, {'an abort' if aborted else 'no abort'}")
    if not known:
        return EXIT_UNKNOWN
    return EXIT_TOO_HOT if aborted else 0


@contextlib.contextmanager
def _table(path: Path | None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Writes rows to a new CSV file, each at once on disk; without a path, nowhere."""
    if path is None:
        yield lambda row: None
        return
    try:
        file = path.open("x", encoding="utf-8", newline="")
    except OSError as error:
        raise ValueError(f"--csv {path} cannot be made: {error.strerror}; name another file") from error
    with file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        file.flush()

        def write(row: dict[str, Any]) -> None:
            writer.writerow(row)
            file.flush()

        yield write

"""Builds the stand-in for NVML, and runs programs with it: the real pynvml loads it through the loader's path."""

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COMPILER = shutil.which("cc") or shutil.which("gcc")

#: One card, as good as new.
CARD = {
    "uuid": "GPU-aaaa",
    "name": "Fake A",
    "temperature": 61,
    "power": 123456,
    "utilization": 98,
    "memory": 3 * 2**30,
    "sm_clock": 1980,
    "memory_clock": 2619,
    "throttle": 0,
    "slowdown": 90,
    "shutdown": 100,
}


@functools.cache
def library(*, old_driver: bool = False) -> Path:
    """The folder that holds libnvidia-ml.so.1."""
    folder = Path(tempfile.mkdtemp(prefix="fake_nvml_"))
    subprocess.run(
        [
            COMPILER,
            *("-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libnvidia-ml.so.1"),
            *(["-DOLD_DRIVER"] if old_driver else []),
            *("-o", str(folder / "libnvidia-ml.so.1"), str(HERE / "nvml.c")),
        ],
        check=True,
    )
    return folder


class FakeNvml:
    """A machine of fake cards; ``set`` changes it, also while a program runs."""

    def __init__(self, folder: Path, cards: int = 1) -> None:
        self.state, self.log = folder / "nvml", folder / "calls"
        self.values: dict[str, object] = {"count": cards}
        letters = "abcdefgh"
        for i in range(cards):
            self.values |= {f"gpu{i}.{k}": v for k, v in {**CARD, "uuid": f"GPU-{letters[i] * 4}"}.items()}
        self.set()

    def set(self, **values: object) -> "FakeNvml":
        """Write the machine's state anew; ``gpu0_temperature=90`` for ``gpu0.temperature``; None takes it away."""
        for name, value in values.items():
            prefix, _, rest = name.partition("_")
            self.values[f"{prefix}.{rest}" if rest else prefix] = value
        lines = [f"{key} {value}" for key, value in self.values.items() if value is not None]
        whole = self.state.with_suffix(".new")
        whole.write_text("\n".join(lines) + "\n")
        whole.replace(self.state)
        return self

    def calls(self) -> list[tuple[str, int, int]]:
        """(function, process, thread) of each call so far."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [(name, int(pid), int(tid)) for name, pid, tid in (line.split() for line in lines)]

    def env(self, *, old_driver: bool = False, **more: str) -> dict[str, str]:
        """The environment for a program that is to see these cards."""
        env = {k: v for k, v in os.environ.items() if k not in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")}
        env |= {"FAKE_NVML": str(self.state), "FAKE_NVML_CALLS": str(self.log)}
        return env | {"LD_LIBRARY_PATH": str(library(old_driver=old_driver)), "PYTHONPATH": str(ROOT), **more}

    def run(self, code: str, **env: object) -> object:
        """Run Python code that prints one JSON value last; that value. Warnings go to stderr, which must be short."""
        done = subprocess.run(
            [sys.executable, "-W", "always", "-c", PRELUDE + code],
            env=self.env(**env),
            capture_output=True,
            text=True,
            timeout=60,
        )
        if done.returncode != 0:
            raise AssertionError(done.stderr)
        return json.loads(done.stdout.splitlines()[-1])


PRELUDE = """
import dataclasses, json, os, sys, warnings
from safetrain_core.thermal.nvml import GpuMonitor
def told(*args, reads=2, **kwargs):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor = GpuMonitor(*args, **kwargs)
        for _ in range(reads):
            reading = monitor.read()
    return {"reading": dataclasses.asdict(reading), "uuid": monitor.uuid, "name": monitor.name,
            "slowdown": monitor.slowdown_c, "shutdown": monitor.shutdown_c,
            "warnings": [str(w.message) for w in caught]}
"""

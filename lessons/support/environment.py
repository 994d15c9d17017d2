"""Is this the Python that the lessons need? Each problem is named with the command that mends it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from dataclasses import dataclass, field
from pathlib import Path

#: What the lessons import, or run on, and the oldest release of each that will do.
NEEDED = {
    "torch": "2.6",
    "numpy": "1.26",
    "matplotlib": "3.8",
    "ipywidgets": "8.1",
    "jupyterlab": "4.2",
    "jupytext": "1.16",
    "nbval": "0.11",
}
OLDEST_PYTHON = (3, 11)


@dataclass(frozen=True)
class Facts:
    """What ``look`` found.

    Args:
        python: (major, minor). interpreter: its path.
        versions: distribution -> version, None where it is not installed.
        package_found: safetrain_core can be imported by this interpreter.
        out_error: why the output folder cannot be written; None = it can.
        gpu: "yes", "no driver", ... for information only.
    """

    python: tuple[int, int]
    interpreter: str
    versions: dict[str, str | None]
    package_found: bool
    out_error: str | None = None
    gpu: str = "unknown"
    details: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """One thing that was checked: whether it is well, what was found, and what to do."""

    good: bool
    what: str
    fix: str = ""

    def __str__(self) -> str:
        return (
            f"PASS  {self.what}" if self.good else f"FIX   {self.what}\n      -> {self.fix}"
        )


def look(out: Path) -> Facts:
    """Gather the facts; imports nothing heavy."""
    versions: dict[str, str | None] = {}
    for name in NEEDED:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return Facts(
        python=sys.version_info[:2],
        interpreter=sys.executable,
        versions=versions,
        package_found=importlib.util.find_spec("safetrain_core") is not None,
        out_error=_why_not_writable(out),
        gpu=_gpu(),
        details={
            "system": f"{platform.system()} on {platform.machine()}",
            "CPU cores": str(os.cpu_count()),
        },
    )


def check(facts: Facts) -> list[Finding]:
    """Judge the facts, in the order in which to mend them.

    >>> facts = Facts((3, 10), "python3.10", dict.fromkeys(NEEDED), package_found=False)
    >>> print(check(facts)[0])
    FIX   Python is 3.10; the lessons need 3.11 or newer
          -> make a new environment with a newer Python: make setup PYTHON=python3.12
    """
    findings = []
    oldest = ".".join(map(str, OLDEST_PYTHON))
    if facts.python >= OLDEST_PYTHON:
        findings.append(Finding(True, f"Python {oldest} or newer"))
    else:
        found = ".".join(map(str, facts.python))
        findings.append(
            Finding(
                False,
                f"Python is {found}; the lessons need {oldest} or newer",
                "make a new environment with a newer Python: make setup PYTHON=python3.12",
            )
        )
    if facts.package_found:
        findings.append(Finding(True, "this kernel's interpreter has safetrain_core"))
    else:
        findings.append(
            Finding(
                False,
                f"this kernel runs {facts.interpreter}, which has no safetrain_core",
                "choose the kernel of the environment that has it (Kernel > Change Kernel), or install it in "
                f"this one, from the kit's folder: {facts.interpreter} -m pip install -e '.[dev]'",
            )
        )
    for name, least in NEEDED.items():
        findings.append(_judged(name, facts.versions.get(name), least, facts.interpreter))
    if facts.out_error is None:
        findings.append(Finding(True, "the output folder can be written"))
    else:
        findings.append(
            Finding(
                False,
                f"the output folder cannot be written: {facts.out_error}",
                "start from a folder of your own, or name another one: --out DIR",
            )
        )
    return findings


def _judged(name: str, version: str | None, least: str, interpreter: str) -> Finding:
    install = f"{interpreter} -m pip install '{name}>={least}'"
    if version is None:
        return Finding(
            False, f"{name} is not installed; the lessons need {least} or newer", install
        )
    if _numbers(version) < _numbers(least):
        return Finding(
            False, f"{name} is {version}; the lessons need {least} or newer", install
        )
    return Finding(True, f"{name} {least} or newer")


def _numbers(version: str) -> list[int]:
    """2.13.0+cpu -> [2, 13, 0]."""
    numbers = []
    for part in version.split("+")[0].split("."):
        digits = "".join(c for c in part if c.isdigit())
        if not digits:
            break
        numbers.append(int(digits))
    return numbers


def _why_not_writable(out: Path) -> str | None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".writable"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        return f"{out}: {error.strerror}"
    return None


def _gpu() -> str:
    """Whether an NVIDIA GPU answers; no lesson needs one."""
    if importlib.util.find_spec("pynvml") is None:
        return "unknown: nvidia-ml-py is not installed"
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"none: {error}"
    try:
        return f"{pynvml.nvmlDeviceGetCount()} found"
    except pynvml.NVMLError as error:
        return f"unknown: {error}"
    finally:
        pynvml.nvmlShutdown()

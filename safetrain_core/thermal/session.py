"""NVML, NVIDIA's management library, opened once per process however many ask, closed once; what its errors mean.

Source: https://docs.nvidia.com/deploy/nvml-api/ (nvmlInit counts its callers; handles do not outlive a fork).
"""

from __future__ import annotations

import os
import threading
from typing import Any

__all__ = ["SESSION", "NoSensor", "Session", "explain"]


class NoSensor(Exception):  # noqa: N818  never leaves this room
    """There is nothing to read; the message says why, and what to do."""


def bindings() -> Any:
    """The module ``pynvml``; ``NoSensor`` where it is not installed."""
    try:
        import pynvml  # type: ignore[import-untyped]
    except ImportError:
        raise NoSensor(
            "GPU readings need the package nvidia-ml-py, which is not installed; pip install 'safetrain-core[gpu]'"
        ) from None
    return pynvml


class Session:
    """Counts who uses NVML: the first ``acquire`` initialises it, the last ``release`` shuts it down.

    A forked child inherits the count but not the library's connection: there it counts from 0 again.
    """

    def __init__(self) -> None:
        self._fresh()

    def _fresh(self) -> None:
        self._pid, self._users, self._lock = os.getpid(), 0, threading.Lock()

    def acquire(self) -> Any:
        """The module ``pynvml``, initialised. ``NoSensor``, or an NVMLError of its own, where that cannot be."""
        if self._pid != os.getpid():
            self._fresh()
        nvml = bindings()
        with self._lock:
            if self._users == 0:
                nvml.nvmlInit()
            self._users += 1
        return nvml

    def release(self, pid: int) -> None:
        """Give back what process ``pid`` acquired; in another process, nothing."""
        if pid != os.getpid() or self._pid != pid:
            return
        with self._lock:
            self._users -= 1
            if self._users == 0:
                nvml = bindings()
                try:
                    nvml.nvmlShutdown()
                except nvml.NVMLError:  # shut down by somebody else already, or the driver is gone
                    self._users = 0


#: The one of this process.
SESSION = Session()

#: Name of an NVML error, without NVML_ERROR_ -> what it means here, and what to do.
MEANINGS = {
    "LIBRARY_NOT_FOUND": "NVML (libnvidia-ml.so.1) is not there: no NVIDIA driver, or a container without its GPUs "
    "(start it with --gpus all)",
    "DRIVER_NOT_LOADED": "the NVIDIA driver is not loaded; see what nvidia-smi says, load it or reboot",
    "LIB_RM_VERSION_MISMATCH": "NVML and the loaded driver differ in version, as after an update; reboot",
    "NO_PERMISSION": "this user may not read it; ask for access to /dev/nvidia*, or run where others may",
    "GPU_IS_LOST": "the GPU has fallen off the bus; stop what runs on it, then reset it or reboot",
    "RESET_REQUIRED": "the GPU needs a reset; stop what runs on it, then nvidia-smi --gpu-reset or reboot",
    "NOT_SUPPORTED": "this card, or its MIG mode, does not tell it",
    "FUNCTION_NOT_FOUND": "this driver is too old to tell it; update it",
    "NOT_FOUND": "NVML knows no such device",
}

#: The device itself is out of reach: no use in asking it more.
GONE = ("GPU_IS_LOST", "RESET_REQUIRED", "DRIVER_NOT_LOADED")


def code_of(error: Any) -> str:
    """The name of an NVMLError, such as ``GPU_IS_LOST``."""
    nvml = bindings()
    value = getattr(error, "value", None)
    names = (n for n in dir(nvml) if n.startswith("NVML_ERROR_") and getattr(nvml, n) == value)
    return next(names, f"NVML_ERROR_{value}").removeprefix("NVML_ERROR_")


def explain(error: Exception) -> str:
    """What an error of NVML, or a ``NoSensor``, means, and what to do.

    >>> explain(NoSensor("CUDA_VISIBLE_DEVICES hides it"))
    'CUDA_VISIBLE_DEVICES hides it'
    """
    if isinstance(error, NoSensor):
        return str(error)
    name = code_of(error)
    return f"{MEANINGS.get(name, 'NVML failed')} (NVML says: {error})"

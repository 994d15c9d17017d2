"""GpuMonitor: what an NVIDIA card says of itself, and the one warning where it does not.

Source: https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from .reading import GpuReading
from .session import GONE, SESSION, NoSensor, code_of, explain
from .visible import find_card

__all__ = ["GpuMonitor"]

MIB = 2**20

#: NVML's bits -> words. Idleness (0x01) is left out: it holds nothing down.
THROTTLE_REASONS = {
    0x02: "a clock setting",
    0x04: "the power cap",
    0x08: "hardware slowdown",
    0x10: "a neighbour's clock (sync boost)",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "the power brake",
    0x100: "the display clock",
}

#: After these, the older function of the same purpose is tried.
TRY_OLDER = ("FUNCTION_NOT_FOUND", "ARGUMENT_VERSION_MISMATCH", "NOT_SUPPORTED", "DEPRECATED")

#: How long ``close`` waits for a reading under way in another thread.
CLOSE_AFTER_S = 1.0


class GpuMonitor:
    """Readings of one card. Whatever fails, a reading comes back, with None for what is unknown, and one warning.

    Args:
        device: which card: "cuda:1", 1 or a ``torch.device``, as torch numbers them under CUDA_VISIBLE_DEVICES; or a
            UUID ("GPU-...", "MIG-...").
        backend: "nvml", or "none": every reading unknown, nothing loaded, no warning.
        nvml_device_index: NVML's own number of the card, instead of ``device``.

    Attributes:
        name, uuid: of the card, None where there is none.
        slowdown_c, shutdown_c: where the card slows itself down, and switches itself off; None where it does not say.
        trouble: why readings are unknown, and what to do; None while all is well.

    NVML is initialised with the first monitor of a process and shut down with the last; in a forked child a monitor
    opens it anew. A MIG slice has the temperature, power and clocks of its whole card.

    Raises:
        ValueError: another backend, or an index below 0.

    >>> with GpuMonitor(backend="none") as monitor:
    ...     print(monitor.read())
    temperature unknown
    """

    def __init__(self, device: Any = 0, *, backend: str = "nvml", nvml_device_index: int | None = None) -> None:
        if backend not in ("nvml", "none"):
            raise ValueError(f"backend={backend!r} must be nvml or none")
        if nvml_device_index is not None and nvml_device_index < 0:
            raise ValueError(f"nvml_device_index={nvml_device_index} must be at least 0")
        self.device, self.nvml_device_index, self.backend = device, nvml_device_index, backend
        self.name: str | None = None
        self.uuid: str | None = None
        self.slowdown_c: float | None = None
        self.shutdown_c: float | None = None
        self.trouble: str | None = None
        self._told: set[str] = set()
        self._nvml: Any = None
        self._handle: Any = None  # of the device
        self._card: Any = None  # of the whole card that a MIG slice is part of; else the same
        self._release: Callable[[], Any] = lambda: None
        self._open()

    # --- opening and closing ----------------------------------------------------------------------------------

    def _open(self) -> None:
        """Acquire NVML and find the card; where that fails, every reading is unknown."""
        self._pid, self._lock, self._handle = os.getpid(), threading.Lock(), None
        if self.backend == "none":
            return
        try:
            self._nvml = SESSION.acquire()
        except Exception as error:  # noqa: BLE001  NVML's errors, an unreadable library: no card to read in any case
            self._tell("open", _meaning(error))
            return
        self._release = weakref.finalize(self, SESSION.release, self._pid)
        try:
            self._find()
        except Exception as error:  # noqa: BLE001
            self._release()
            self._tell("open", _meaning(error))

    def _find(self) -> None:
        nvml = self._nvml
        handle = card = find_card(nvml, self.device, self.nvml_device_index)
        self.uuid = nvml.nvmlDeviceGetUUID(handle)
        if str(self.uuid).startswith("MIG-"):
            card = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        self.name = self._asked([(nvml.nvmlDeviceGetName, card)], {}, "name")
        limits = nvml.nvmlDeviceGetTemperatureThreshold
        self.slowdown_c = self._asked([(limits, card, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)], {}, "slowdown")
        self.shutdown_c = self._asked([(limits, card, nvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN)], {}, "shutdown")
        self._handle, self._card = handle, card
        margin_of, now = getattr(nvml, "nvmlDeviceGetMarginTemperature", None), self._temperature({})
        if self.slowdown_c is None and margin_of is not None and now is not None:
            margin = self._asked([(margin_of, card)], {}, "margin")  # newer cards tell the distance to it instead
            self.slowdown_c = None if margin is None else float(now + margin)

    def close(self) -> None:
        """Readings are unknown from now on; the last monitor of the process shuts NVML down. Twice is once."""
        if self._pid != os.getpid():
            return
        if self._lock.acquire(timeout=CLOSE_AFTER_S):
            try:
                self._handle = None
                self._release()
            finally:
                self._lock.release()
        elif isinstance(self._release, weakref.finalize):
            self._release.atexit = False  # the driver hangs in a call: shutting down would hang, too

    def __enter__(self) -> GpuMonitor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- reading ----------------------------------------------------------------------------------------------

    def read(self) -> GpuReading:
        """A reading, now. It takes a call into the driver, so a training step leaves it to a poller."""
        if self._pid != os.getpid():
            self._open()
        with self._lock:
            if self._handle is None:
                return GpuReading()
            try:
                return self._read()
            except self._nvml.NVMLError_Uninitialized:  # another part of the program has shut NVML down
                return self._read_anew()

    def _read_anew(self) -> GpuReading:
        try:
            self._nvml.nvmlInit()
            self._find()
            return self._read()
        except (self._nvml.NVMLError, NoSensor) as error:
            self._tell("open", _meaning(error))
            return GpuReading()

    def _read(self) -> GpuReading:
        nvml, card, self.trouble = self._nvml, self._card, None
        refused: dict[str, list[str]] = {}

        def asked(what: str, *calls: tuple[Any, ...]) -> Any:
            gone = any(code in refused for code in GONE)
            return None if gone else self._asked(calls, refused, what)

        celsius = self._temperature(refused)
        milliwatts = asked("power", (nvml.nvmlDeviceGetPowerUsage, card))
        rates = asked("utilization", (nvml.nvmlDeviceGetUtilizationRates, self._handle))
        memory = asked("memory", (nvml.nvmlDeviceGetMemoryInfo, self._handle))
        sm = asked("SM clock", (nvml.nvmlDeviceGetClockInfo, card, nvml.NVML_CLOCK_SM))
        mem = asked("memory clock", (nvml.nvmlDeviceGetClockInfo, card, nvml.NVML_CLOCK_MEM))
        bits = asked(
            "throttle reasons",
            (getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None), card),
            (nvml.nvmlDeviceGetCurrentClocksThrottleReasons, card),
        )
        for code, what in refused.items():
            error = nvml.NVMLError(getattr(nvml, f"NVML_ERROR_{code}", nvml.NVML_ERROR_UNKNOWN))
            self._tell(code, f"{self.name or self.device}: {', '.join(what)} unknown: {explain(error)}")
        return GpuReading(
            temperature_c=celsius,
            power_w=None if milliwatts is None else milliwatts / 1000,
            utilization_pct=None if rates is None else float(rates.gpu),
            memory_used_mib=None if memory is None else memory.used / MIB,
            sm_clock_mhz=_number(sm),
            memory_clock_mhz=_number(mem),
            throttle_reasons=None if bits is None else tuple(w for bit, w in THROTTLE_REASONS.items() if bits & bit),
        )

    def _temperature(self, refused: dict[str, list[str]]) -> float | None:
        newest, older = getattr(self._nvml, "nvmlDeviceGetTemperatureV", None), self._nvml.nvmlDeviceGetTemperature
        core = self._nvml.NVML_TEMPERATURE_GPU
        return _number(self._asked([(newest, self._card, core), (older, self._card, core)], refused, "temperature"))

    def _asked(self, calls: Sequence[tuple[Any, ...]], refused: dict[str, list[str]], what: str) -> Any:
        """The answer of the first call that is supported; None, and the refusal noted by its code, where none is."""
        code = "FUNCTION_NOT_FOUND"
        for function, *arguments in calls:
            if function is None:  # this nvidia-ml-py is older than the function
                continue
            try:
                return function(*arguments)
            except self._nvml.NVMLError_Uninitialized:
                raise
            except self._nvml.NVMLError as error:
                code = code_of(error)
                if code not in TRY_OLDER:
                    break
        refused.setdefault(code, []).append(what)
        return None

    def _tell(self, kind: str, message: str) -> None:
        self.trouble = message
        if kind not in self._told:
            self._told.add(kind)
            warnings.warn(f"GPU readings: {message}", stacklevel=2)


def _meaning(error: Exception) -> str:
    if hasattr(error, "value") or isinstance(error, NoSensor):
        return explain(error)
    return f"NVML cannot be used ({type(error).__name__}: {error}); reinstall nvidia-ml-py and the driver"


def _number(value: Any) -> float | None:
    return None if value is None else float(value)

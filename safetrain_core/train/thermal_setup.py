"""From a config to the trainer's thermal guard: where temperatures come from, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..config import TrainConfig
from ..distributed import world_size
from ..step.amp import AmpTrainState
from ..thermal.nvml import GpuMonitor
from ..thermal.reading import callable_source
from .cursor import Cursor
from .devices import usable_device
from .result import FitResult
from .switch import DeviceSwitch
from .thermal import Thermal

__all__ = ["thermal_from_config", "thermal_on_device"]


def thermal_from_config(
    config: TrainConfig,
    amp: AmpTrainState,
    cursor: Cursor,
    result: FitResult,
    source: Any = None,
    devices: Sequence[str | torch.device] | None = None,
    newest_good: Callable[[], str | None] = lambda: None,
) -> Thermal | None:
    """The guard, the GPU columns, or both, as ``config`` asks; None where it asks for neither.

    Args:
        source: of the temperatures of the model's device, instead of NVML; or a mapping from device to source.
        devices: where ``switch_on_thermal`` may move to, by preference, the model's own first; None = all CUDA
            devices, then the CPU.

    Raises:
        ValueError: a guard without a source, or whose source gives nothing; settings that have no effect; switching
            with several ranks, with GaLore, or to a device that is not there.

    >>> from ..records import TrainState
    >>> amp = AmpTrainState(torch.nn.Linear(1, 1))
    >>> thermal_from_config(TrainConfig(gpu_temp_guard=True), amp, Cursor([], 1, amp.device, TrainState()), FitResult())
    Traceback (most recent call last):
    ...
    ValueError: gpu_temp_guard has no source of temperatures: gpu_metrics_backend is none; set it to nvml ...
    """
    if devices is not None and not config.switch_on_thermal:
        raise ValueError("thermal_devices have no effect without switch_on_thermal; set it to true")
    home = str(amp.device)
    if not config.switch_on_thermal:
        return thermal_on_device(config, home, result, source, newest_good)
    names = _device_names(config, home, devices)
    return _thermal(config, names, result, source, newest_good, DeviceSwitch(amp, cursor))


def thermal_on_device(
    config: TrainConfig,
    device: str,
    result: FitResult,
    source: Any = None,
    newest_good: Callable[[], str | None] = lambda: None,
) -> Thermal | None:
    """As ``thermal_from_config``, for a run that stays on ``device``, whoever's loop it is."""
    return _thermal(config, (device,), result, source, newest_good)


def _thermal(
    config: TrainConfig,
    names: Sequence[str],
    result: FitResult,
    source: Any,
    newest_good: Callable[[], str | None],
    switch: DeviceSwitch | None = None,
) -> Thermal | None:
    if config.nvml_device_index is not None and config.gpu_metrics_backend == "none":
        raise ValueError(
            f"nvml_device_index={config.nvml_device_index} has no effect with gpu_metrics_backend=none; set it to nvml"
        )
    sources = _sources(config, names[0], names, source)
    if not sources:
        return None
    given = source.values() if isinstance(source, Mapping) else (source,)
    ours = [s for s in sources.values() if isinstance(s, GpuMonitor) and all(s is not g for g in given)]
    return Thermal(config, result, sources, switch=switch, devices=names, closing=ours, newest_good=newest_good)


def _sources(config: TrainConfig, home: str, names: Sequence[str], given: Any) -> dict[str, Any]:
    """Device name -> source, the run's own device first; empty where nothing is asked for."""
    told = {str(torch.device(n)): s for n, s in given.items()} if isinstance(given, Mapping) else {home: given}
    for name in told:
        if name not in names:
            raise ValueError(f"thermal_source tells of {name}, and the run trains on {', '.join(names)} only")
    sources: dict[str, Any] = {}
    for name in names:
        if told.get(name) is not None:
            callable_source(told[name])
            sources[name] = told[name]
        elif config.gpu_metrics_backend == "nvml" and (name == home or name.startswith("cuda")):
            index = config.nvml_device_index if name == home else None
            sources[name] = GpuMonitor(name, nvml_device_index=index)
    if not config.gpu_temp_guard:
        return sources
    if home not in sources:
        raise ValueError(
            "gpu_temp_guard has no source of temperatures: gpu_metrics_backend is none; set it to nvml "
            "(--gpu-metrics-backend nvml), or pass a thermal_source"
        )
    own = sources[home]
    if isinstance(own, GpuMonitor) and own.read().temperature_c is None:
        raise ValueError(f"gpu_temp_guard got no temperature of {home}: {own.trouble or 'the monitor is closed'}")
    return sources


def _device_names(config: TrainConfig, home: str, devices: Sequence[str | torch.device] | None) -> tuple[str, ...]:
    if world_size() > 1:
        raise ValueError(
            f"switch_on_thermal moves one process, and this run has {world_size()} ranks; leave it off: "
            "when one rank's GPU is hot, all ranks pause"
        )
    if config.use_galore:
        raise ValueError("switch_on_thermal cannot move the projections of use_galore; use one of the two")
    if devices is None:
        cuda = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        devices = [home, *(name for name in (*cuda, "cpu") if name != home)]
        if len(devices) < 2:
            raise ValueError(f"switch_on_thermal has no device to move to: {home} is the only one here; leave it off")
    names = tuple(str(torch.device(device)) for device in devices)
    if names[:1] != (home,):
        raise ValueError(f"thermal_devices={list(names)} must begin with the model's own device, {home}")
    if len(set(names)) < 2 or len(set(names)) < len(names):
        raise ValueError(f"thermal_devices={list(names)} must be at least two different devices; add cpu")
    for name in names:
        try:
            usable_device(name)
        except ValueError as error:
            raise ValueError(f"thermal_devices: {error}") from error
    return names

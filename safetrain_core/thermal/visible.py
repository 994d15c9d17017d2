"""From a torch device to NVML's handle. They number cards differently: CUDA_VISIBLE_DEVICES hides and reorders torch's.

Where torch has CUDA running, its UUID of the device decides; else the variable is read as CUDA reads it.

Source: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#env-vars (the list ends at the first entry that is none).
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

from .session import NoSensor

__all__ = ["find_card", "parsed_device", "visible_devices"]

UUID = ("GPU-", "MIG-")


def visible_devices(setting: str | None) -> list[int | str] | None:
    """What a value of CUDA_VISIBLE_DEVICES shows, in torch's order: indices, and UUIDs or their beginnings; None = all.

    >>> visible_devices("2,0"), visible_devices("GPU-8a,GPU-1"), visible_devices(""), visible_devices(None)
    ([2, 0], ['GPU-8a', 'GPU-1'], [], None)
    >>> visible_devices("1,-1,0"), visible_devices("0,0")  # it ends at the first that is none; twice the same hides all
    ([1], [])
    """
    if setting is None:
        return None
    shown: list[int | str] = []
    for entry in setting.split(","):
        text = entry.strip()
        number = re.match(r"\+?\d+", text)
        if not (text.startswith(UUID) or number):
            break
        found = int(number[0]) if number else text
        if found in shown:
            return []
        shown.append(found)
    return shown


def parsed_device(device: Any) -> int | str | None:
    """CUDA index, UUID, or None for a device that NVML does not know.

    Args:
        device: 1, "cuda", "cuda:1", "GPU-...", "MIG-...", or a ``torch.device``.

    >>> parsed_device("cuda:1"), parsed_device("GPU-8a"), parsed_device("cpu")
    (1, 'GPU-8a', None)
    """
    text = str(device)
    if text.startswith(UUID):
        return text
    if text == "cuda":
        torch = sys.modules.get("torch")
        return int(torch.cuda.current_device()) if torch is not None and torch.cuda.is_initialized() else 0
    number = re.fullmatch(r"(?:cuda:)?(\d+)", text)
    return int(number[1]) if number else None


def _torch_uuid(index: int) -> str | None:
    """torch's UUID of the CUDA device, if CUDA runs already: starting it takes memory on the card."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized() or index >= torch.cuda.device_count():
        return None
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return None if uuid is None else str(uuid)


def find_card(nvml: Any, device: Any, nvml_index: int | None) -> Any:
    """NVML's handle for ``device``, or for ``nvml_index``, which wins.

    Raises:
        NoSensor: no such device, none visible, or not an NVIDIA GPU. NVMLError: what NVML says.
    """
    count = nvml.nvmlDeviceGetCount()
    if count == 0:
        raise NoSensor("NVML finds no GPU in this machine; see what nvidia-smi -L says")
    if nvml_index is not None:
        if nvml_index >= count:
            raise NoSensor(f"nvml_device_index={nvml_index} is out of range: NVML has {count} GPUs, 0..{count - 1}")
        return nvml.nvmlDeviceGetHandleByIndex(nvml_index)
    wanted = parsed_device(device)
    if wanted is None:
        raise NoSensor(f"NVML reads NVIDIA GPUs, and {device} is none; train on cuda, or set nvml_device_index")
    if isinstance(wanted, str):
        return _by_uuid(nvml, wanted, count)
    uuid = _torch_uuid(wanted)
    if uuid is not None:
        try:
            return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except nvml.NVMLError_NotFound:
            return nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = visible_devices(setting)
    if shown is not None:
        if wanted >= len(shown):
            raise NoSensor(f"cuda:{wanted} is hidden: CUDA_VISIBLE_DEVICES={setting} shows {len(shown)} devices")
        entry = shown[wanted]
        if isinstance(entry, str):
            return _by_uuid(nvml, entry, count)
        wanted = entry
    if wanted >= count:
        raise NoSensor(f"there is no GPU {wanted}: NVML has {count}, 0..{count - 1}")
    _refuse_a_guess(nvml, count)
    return nvml.nvmlDeviceGetHandleByIndex(wanted)


def _by_uuid(nvml: Any, uuid: str, count: int) -> Any:
    """A whole UUID, or the beginning of exactly one card's."""
    if uuid.startswith("MIG-"):
        return nvml.nvmlDeviceGetHandleByUUID(uuid)
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
    found = [handle for handle in handles if nvml.nvmlDeviceGetUUID(handle).startswith(uuid)]
    if len(found) != 1:
        raise NoSensor(f"{uuid} is the UUID of {len(found)} GPUs here; nvidia-smi -L lists them")
    return found[0]


def _refuse_a_guess(nvml: Any, count: int) -> None:
    """CUDA puts the fastest card first unless told otherwise, NVML goes by the bus: the same where cards are alike."""
    if os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or count == 1:
        return
    names = {nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(i)) for i in range(count)}
    if len(names) > 1:
        raise NoSensor(
            f"the GPUs differ ({', '.join(sorted(names))}), so CUDA may number them otherwise than NVML; "
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name one by nvml_device_index or UUID"
        )

"""A verified DCP folder as the payload of a run: what ``read_checkpoint`` gives of one file."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..distributed import world_size
from .dcp import DcpReader
from .model_state import model_state
from .nested import joined, tensors_in

__all__ = ["FolderSource", "shard_payload"]


class FolderSource:
    """Plain values at once, in ``payload``; tensors are these objects' own, and hold what was saved after ``fill()``.

    Args:
        path: the folder. model, optimizer: as they were when saved, sharded for any number of ranks.

    ``payload["rng"]`` and ``payload["loader"]`` are None where the world size is another now, which is warned of.

    Raises:
        CheckpointError: it cannot be trusted, or holds a state that this optimizer has no place for; the same on every
            rank.
    """

    def __init__(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._reader = DcpReader(path)
        self._live = {"model": model_state(model), "optimizer": {"state": self._places(optimizer)}}
        self.saved_on = self._reader.manifest.world_size
        own = self._reader.own
        if own is None:
            warnings.warn(
                f"{path} was saved on {self.saved_on} ranks and is resumed on {world_size()}: random states begin "
                "anew, so it is not bit for bit the same run",
                stacklevel=5,
            )
        self.payload: dict[str, Any] = joined(self._live, self._reader.common)
        self.payload["model"] = self._live["model"]
        self.payload.update(own or {"rng": None, "loader": None})

    def _places(self, optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
        """Where each saved tensor of the optimizer goes: its own, or a new one where it has not stepped yet."""
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        places: dict[int, dict[str, Any]] = optimizer.state_dict()["state"]
        for name, (shape, dtype) in self._reader.shapes.items():
            match name.split("/"):
                case ["optimizer", "state", number, key] if int(number) < len(weights):
                    weight, place = weights[int(number)].detach(), places.setdefault(int(number), {})
                    if key not in place:
                        like = shape == weight.shape
                        fresh = torch.zeros_like(weight, dtype=dtype) if like else torch.zeros(shape, dtype=dtype)
                        place[key] = fresh
        return places

    def fill(self) -> None:
        """Load the tensors, in place; ``CheckpointError`` before anything is changed where they do not fit."""
        self._reader.fill(tensors_in(self._live))


def shard_payload(payload: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Cut the whole tensors of a one-file payload as the weights of this model are cut; in place.

    ``payload["rng"]`` and ``payload["loader"]`` become None: they were one process's.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    def like(weight: Any, value: Any) -> Any:
        if not isinstance(weight, DTensor) or not isinstance(value, torch.Tensor) or value.shape != weight.shape:
            return value
        return distribute_tensor(value.to(weight.device), weight.device_mesh, weight.placements)

    live = model_state(model)
    for name, value in payload["model"].items():
        payload["model"][name] = like(live.get(name), value)
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    for number, state in payload["optimizer"]["state"].items():
        for key, value in state.items():
            state[key] = like(weights[number], value)
    if world_size() > 1:
        warnings.warn(
            f"saved by one process and resumed on {world_size()} ranks: random states begin anew, so it is not bit for "
            "bit the same run",
            stacklevel=5,
        )
    payload["rng"] = payload["loader"] = None

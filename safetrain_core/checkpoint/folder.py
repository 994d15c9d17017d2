"""A verified DCP folder as the payload of a run: what ``read_checkpoint`` gives of one file."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..distributed import world_size
from .dcp import DcpReader
from .nested import joined, tensors_in
from .single import model_state

__all__ = ["FolderSource"]


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

"""TensorBoard's event files. The package ``tensorboard`` reads them; it is asked for only here."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .columns import assign
from .log import Log
from .table import Cells

__all__ = ["read_events"]


def read_events(path: Path, columns: Mapping[str, str] | None = None) -> Log:
    """Read the scalars of a folder of events, or of one file.

    Raises:
        ValueError: tensorboard is not installed, or there is no scalar.
    """
    try:
        module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
        tensors = importlib.import_module("tensorboard.util.tensor_util")
    except ImportError as error:
        raise ValueError(
            f"{path} holds TensorBoard events, and the package tensorboard is not installed; "
            "pip install tensorboard, or give a CSV"
        ) from error
    events = module.EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    tags = events.Tags()
    points: dict[str, list[tuple[int, float]]] = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags["scalars"]
    }
    for tag in tags["tensors"]:  # scalars that TensorFlow 2 wrote
        values = [(event.step, tensors.make_ndarray(event.tensor_proto)) for event in events.Tensors(tag)]
        if values and all(value.size == 1 and value.dtype.kind in "fiu" for _, value in values):
            points[tag] = [(step, float(value.reshape(-1)[0])) for step, value in values]
    if not points:
        raise ValueError(f"{path} holds no scalar; give the folder that the run's SummaryWriter wrote to")
    # Each tag is written by itself: a row for each step, and one more where a tag was written twice for a step.
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for tag, told in points.items():
        seen: dict[int, int] = {}
        for step, value in told:
            seen[step] = seen.get(step, 0) + 1
            rows.setdefault((step, seen[step]), {"step": step})[tag] = value
    found = assign(["step", *points], {"step": "step", **(columns or {})})
    cells = Cells(found)
    ordered = [rows[key] for key in sorted(rows)]
    cells.extend({role: [row.get(column) for row in ordered] for role, column in found.items()}, len(ordered))
    return cells.log(str(path))

"""One file that holds a run: model, optimizer, schedule, scaler, counters, random states, data position, config.

Loading checks everything first and changes nothing before all of it fits: the sha256, the schema, the names and shapes
of the model, the classes and groups of optimizer and schedule. Then it loads, random states last.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError, type_of
from ..records import TrainState
from .atomic import StrPath, atomic_save, load_while, verify
from .fit import check_fit
from .model_state import genuine, model_state, unwrapped
from .rng import capture_rng_state, restore_rng_state

__all__ = ["CHECKPOINT_SCHEMA", "load_checkpoint", "read_checkpoint", "run_payload", "save_checkpoint"]

log = logging.getLogger(__name__)

#: The schema of what this version writes.
CHECKPOINT_SCHEMA = "ckpt.v1"


def run_payload(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
    state: TrainState,
    *,
    scaler: Any = None,
    loader: Any = None,
    config: Any = None,
) -> dict[str, Any]:
    """What ``save_checkpoint`` writes. The tensors are the live ones, not copies.

    >>> sorted(run_payload(nn.Linear(1, 1), None, None, TrainState()))[:4]
    ['classes', 'config', 'loader', 'model']
    """
    if not isinstance(state, TrainState):
        raise ValueError(f"state is {type_of(state)}, expected a TrainState: TrainState(step=..., updates=...)")
    parts = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "loader": loader}
    refuse_stateless(model, parts, "state_dict")
    return {
        "schema": CHECKPOINT_SCHEMA,
        "model": model_state(model),
        **{name: part.state_dict() if part is not None else None for name, part in parts.items()},
        "classes": {name: type(part).__name__ for name, part in parts.items() if part is not None},
        "state": state.to_dict(),
        "rng": capture_rng_state(),
        "config": config.model_dump() if hasattr(config, "model_dump") else config,
    }


def refuse_stateless(model: Any, parts: dict[str, Any], method: str) -> None:
    """``ValueError`` where one of a run's parts cannot be saved or loaded, for want of ``method``.

    >>> refuse_stateless(nn.Linear(1, 1), {"loader": [1, 2]}, "state_dict")
    Traceback (most recent call last):
    ...
    ValueError: loader is a list without state_dict(); a StatefulDataLoader has one, or pass None
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {type_of(model)}, expected a torch.nn.Module")
    for name, part in parts.items():
        if part is not None and not callable(getattr(part, method, None)):
            cure = "a StatefulDataLoader has one, or pass None" if name == "loader" else "pass None where there is none"
            raise ValueError(f"{name} is {type_of(part)} without {method}(); {cure}")


def save_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
    state: TrainState,
    out_path: StrPath,
    *,
    scaler: Any = None,
    loader: Any = None,
    config: Any = None,
) -> str:
    """Save a run to one file, atomically, with its sha256 inside. Returns that sha256.

    Args:
        model: saved unwrapped of DDP and torch.compile, under genuine names; tied weights stay tied.
        optimizer, scheduler, scaler, loader: saved by their ``state_dict()``; None where there is none. For ``loader``
            give what keeps your data position: torchdata's StatefulDataLoader, or the trainer's cursor.
        state: the counters. config: a TrainConfig or plain types, saved along and not loaded.

    Raises:
        ValueError: something that could not be read back; OSError: see ``atomic_save``. An older file is left whole.

    >>> import tempfile
    >>> model, state = nn.Linear(1, 1), TrainState(step=3, updates=3)
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save_checkpoint(model, sgd, None, state, folder + "/a.pt")
    ...     load_checkpoint(folder + "/a.pt", model, sgd, None).step
    3
    """
    payload = run_payload(model, optimizer, scheduler, state, scaler=scaler, loader=loader, config=config)
    return atomic_save(payload, out_path)


def _from_v0(payload: dict[str, Any]) -> dict[str, Any]:
    """ckpt.v0 had no random states, classes, loader or config; what can be filled in is."""
    warnings.warn(
        "checkpoint schema ckpt.v0 holds no random states: the resumed run is not bit for bit the same run",
        stacklevel=4,
    )
    return {"scaler": None, "loader": None, "config": None, "classes": {}, **payload, "schema": "ckpt.v1", "rng": None}


#: Schema -> what makes the next schema of it.
MIGRATIONS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"ckpt.v0": _from_v0}


def read_checkpoint(path: StrPath) -> dict[str, Any]:
    """The payload of a checkpoint, verified against its sha256, brought to the present schema; tensors on the CPU.

    Raises:
        CheckpointError: missing, torn, altered, not readable without running code, or ``unknown schema``.
    """
    payload = load_while(path, lambda: verify(path))
    check_schema(payload.get("schema") if isinstance(payload, dict) else None, path)
    while payload["schema"] != CHECKPOINT_SCHEMA:
        payload = MIGRATIONS[payload["schema"]](payload)
        check_schema(payload["schema"], path)
    return payload


def check_schema(schema: Any, path: StrPath) -> None:
    """``CheckpointError`` where this version reads no payload of ``schema``.

    >>> check_schema("ckpt.v1", "a.pt")
    """
    if not isinstance(schema, str) or not schema.startswith("ckpt"):
        raise CheckpointError(f"unknown schema {schema!r} in {path}: not a safetrain checkpoint")
    if schema != CHECKPOINT_SCHEMA and schema not in MIGRATIONS:
        raise CheckpointError(
            f"unknown schema {schema!r} in {path}: this version reads {CHECKPOINT_SCHEMA} and "
            f"{', '.join(MIGRATIONS)}; upgrade safetrain"
        )


def load_checkpoint(
    path: StrPath,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
    *,
    scaler: Any = None,
    loader: Any = None,
) -> TrainState:
    """Load a run into these objects, random states last; returns its counters.

    Args:
        path: a file of ``save_checkpoint``. model, optimizer, scheduler, scaler, loader: as they were when saved.

    Raises:
        ValueError: a part that cannot be loaded: a DataLoader without a state, say.
        CheckpointError: the file cannot be trusted, or does not fit (``CheckpointDoesNotFit``); model, optimizer and
            random states are as before.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save_checkpoint(nn.Linear(2, 1), None, None, TrainState(), folder + "/a.pt")
    ...     load_checkpoint(folder + "/a.pt", nn.Linear(3, 1), None, None)
    Traceback (most recent call last):
    ...
    safetrain_core.errors.CheckpointDoesNotFit: ...: weight has shape (1, 2) there and (1, 3) here; build the ...
    """
    parts = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "loader": loader}
    refuse_stateless(model, parts, "load_state_dict")
    payload = read_checkpoint(path)
    check_fit(payload, path, model, optimizer, scheduler)
    load_payload(payload, model, optimizer, scheduler, scaler=scaler, loader=loader)
    return TrainState.from_dict(payload["state"])


def load_payload(
    payload: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
    *,
    scaler: Any = None,
    loader: Any = None,
) -> None:
    """Load a payload that ``check_fit`` has passed."""
    inner = unwrapped(model)
    names = {genuine(name): name for name in inner.state_dict()}
    compiled = any(genuine != name for genuine, name in names.items())
    saved = payload["model"]  # as it is where it can be: it carries the versions of its modules
    inner.load_state_dict({names[genuine]: value for genuine, value in saved.items()} if compiled else saved)
    for name, part in (("optimizer", optimizer), ("scheduler", scheduler), ("loader", loader)):
        if part is not None and payload[name] is not None:
            part.load_state_dict(payload[name])
    _load_scaler(payload["scaler"], scaler)
    if payload["rng"] is not None:
        restore_rng_state(payload["rng"])


def _load_scaler(saved: dict[str, Any] | None, scaler: Any) -> None:
    enabled = scaler is not None and (not hasattr(scaler, "is_enabled") or scaler.is_enabled())
    if enabled and saved:
        scaler.load_state_dict(saved)
    elif enabled:
        log.warning("the checkpoint was saved without loss scaling; the scaler keeps its factor")
    elif saved:
        log.warning("loss scaling is off here; the saved factor %s is dropped", saved.get("scale"))

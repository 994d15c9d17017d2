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

from ..errors import CheckpointDoesNotFit, CheckpointError
from ..records import TrainState
from .atomic import StrPath, atomic_save, load_while, verify
from .rng import capture_rng_state, restore_rng_state

__all__ = ["CHECKPOINT_SCHEMA", "load_checkpoint", "read_checkpoint", "run_payload", "save_checkpoint"]

log = logging.getLogger(__name__)

#: The schema of what this version writes.
CHECKPOINT_SCHEMA = "ckpt.v1"

#: Wrapping by torch.compile stands in names as this; no module is really called so.
COMPILED = "_orig_mod"


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, out of DistributedDataParallel, DataParallel and torch.compile, however nested.

    >>> inner = nn.Linear(1, 1)
    >>> unwrapped(nn.DataParallel(inner)) is inner
    True
    """
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(getattr(model, COMPILED, None), nn.Module):
            model = getattr(model, COMPILED)
        else:
            return model


def _genuine(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != COMPILED)


def model_state(model: nn.Module) -> dict[str, Any]:
    """The state_dict of the unwrapped model, under genuine names: also where a submodule was compiled.

    >>> list(model_state(nn.DataParallel(nn.Linear(1, 1, bias=False))))
    ['weight']
    """
    state = unwrapped(model).state_dict()
    if not any(COMPILED in name for name in state):
        return state
    return {_genuine(name): value for name, value in state.items()}


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
    parts = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "loader": loader}
    return {
        "schema": CHECKPOINT_SCHEMA,
        "model": model_state(model),
        **{name: part.state_dict() if part is not None else None for name, part in parts.items()},
        "classes": {name: type(part).__name__ for name, part in parts.items() if part is not None},
        "state": state.to_dict(),
        "rng": capture_rng_state(),
        "config": config.model_dump() if hasattr(config, "model_dump") else config,
    }


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
        CheckpointError: the file cannot be trusted, or does not fit (``CheckpointDoesNotFit``); model, optimizer and
            random states are as before.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save_checkpoint(nn.Linear(2, 1), None, None, TrainState(), folder + "/a.pt")
    ...     load_checkpoint(folder + "/a.pt", nn.Linear(3, 1), None, None)
    Traceback (most recent call last):
    ...
    safetrain_core.errors.CheckpointDoesNotFit: ...: weight has shape (1, 2) there and (1, 3) here
    """
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
    names = {_genuine(name): name for name in inner.state_dict()}
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


def check_fit(
    payload: dict[str, Any], path: StrPath, model: nn.Module, optimizer: torch.optim.Optimizer | None, scheduler: Any
) -> None:
    """``CheckpointDoesNotFit`` where the payload is not of these objects; nothing is changed."""
    missing = {"model", "optimizer", "scheduler", "scaler", "state", "rng", "classes"} - payload.keys()
    if missing:
        raise CheckpointError(f"{path} lacks {', '.join(sorted(missing))}; it is not a checkpoint of this version")
    _check_model(payload["model"], path, model)
    for name, part in (("optimizer", optimizer), ("scheduler", scheduler)):
        saved, here = payload["classes"].get(name), type(part).__name__
        if part is not None and payload[name] is None:
            raise CheckpointDoesNotFit(f"{path} holds no {name}, and a {here} is to be loaded")
        if part is not None and saved is not None and saved != here:
            raise CheckpointDoesNotFit(f"{path} holds the {name} {saved}, and a {here} is to be loaded; use {saved}")
    if optimizer is not None:
        _check_optimizer(payload["optimizer"], path, optimizer)
    saved_rules = (payload["scheduler"] or {}).get("lr_lambdas")
    if scheduler is not None and saved_rules is not None and saved_rules != scheduler.state_dict().get("lr_lambdas"):
        raise CheckpointDoesNotFit(
            f"{path} was made with another schedule: {_in_words(saved_rules[0])}, here "
            f"{_in_words(scheduler.state_dict()['lr_lambdas'][0])}; keep it, by scheduler_type, "
            "scheduler_total_steps and scheduler_warmup_ratio, also where max_steps is raised"
        )


def _in_words(rule: Any) -> str:
    if not isinstance(rule, dict):
        return str(rule)
    return ", ".join(f"{name} {value}" for name, value in rule.items() if value is not None)


def _check_model(saved: dict[str, Any], path: StrPath, model: nn.Module) -> None:
    here = model_state(model)
    for what, names in (
        ("lacks", here.keys() - saved.keys()),
        ("has, and the model lacks,", saved.keys() - here.keys()),
    ):
        if names:
            raise CheckpointDoesNotFit(
                f"{path} does not fit the model: it {what} {sorted(names)[0]} ({len(names)} in all)"
            )
    for name, value in here.items():
        a, b = getattr(saved[name], "shape", None), getattr(value, "shape", None)
        if a != b:
            raise CheckpointDoesNotFit(
                f"{path} does not fit the model: {name} has shape {tuple(a or ())} there and {tuple(b or ())} here"
            )


def _check_optimizer(saved: dict[str, Any], path: StrPath, optimizer: torch.optim.Optimizer) -> None:
    there = [len(group["params"]) for group in saved["param_groups"]]
    here = [len(group["params"]) for group in optimizer.param_groups]
    if there != here:
        raise CheckpointDoesNotFit(f"{path} does not fit the optimizer: its groups hold {there} weights, here {here}")
    refuse_state = getattr(optimizer, "refuse_state", None)  # GaLore's own look, for example
    if refuse_state is not None:
        try:
            refuse_state(saved)
        except ValueError as error:
            raise CheckpointDoesNotFit(f"{path} does not fit the optimizer: {error}") from error
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [n for group in saved["param_groups"] for n in group["params"]]
    for number, weight in zip(numbers, weights, strict=True):
        for key in ("exp_avg", "momentum_buffer"):
            moment = saved["state"].get(number, {}).get(key)
            if moment is not None and moment.shape != weight.shape:
                raise CheckpointDoesNotFit(
                    f"{path} does not fit the optimizer: {key} has shape {tuple(moment.shape)} there, its weight "
                    f"{tuple(weight.shape)} here"
                )

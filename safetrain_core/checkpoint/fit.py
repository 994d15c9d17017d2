"""Whether a payload is of the objects that it is to be loaded into: asked before anything is changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import CheckpointDoesNotFit, CheckpointError
from ..records import TrainState
from .atomic import StrPath
from .model_state import model_state
from .rng import check_rng_state

__all__ = ["check_fit"]


#: State that has the shape of its weight: in most optimizers the first two, in torch's own all of them.
MOMENTS = ("exp_avg", "momentum_buffer", "exp_avg_sq", "exp_inf", "square_avg", "acc_delta", "grad_avg", "sum", "prev")


def check_fit(
    payload: dict[str, Any], path: StrPath, model: nn.Module, optimizer: torch.optim.Optimizer | None, scheduler: Any
) -> None:
    """``CheckpointDoesNotFit`` where the payload is not of these objects, ``CheckpointError`` where it is damaged.

    Nothing is changed.
    """
    missing = {"model", "optimizer", "scheduler", "scaler", "state", "rng", "classes"} - payload.keys()
    if missing:
        raise CheckpointError(f"{path} lacks {', '.join(sorted(missing))}; it is not a checkpoint of this version")
    try:
        TrainState.from_dict(payload["state"])
        if payload["rng"] is not None:
            check_rng_state(payload["rng"])
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}; resume from an older checkpoint") from error
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


#: The vocabulary of a text model comes from its data.
BUILD_ALIKE = "build the model with the sizes, and from the data, that it was saved with, or use another folder"


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
                f"{path} does not fit the model: it {what} {sorted(names)[0]} ({len(names)} in all); {BUILD_ALIKE}"
            )
    for name, value in here.items():
        a, b = getattr(saved[name], "shape", None), getattr(value, "shape", None)
        if a != b:
            raise CheckpointDoesNotFit(
                f"{path} does not fit the model: {name} has shape {tuple(a or ())} there and {tuple(b or ())} here; "
                f"{BUILD_ALIKE}"
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
    named = [names for group in saved["param_groups"] for names in group.get("param_names") or ()]
    names = [names for group in optimizer.param_groups for names in group.get("param_names") or ()]
    if len(named) == len(names) and named != names:
        at = next(at for at, (there, here) in enumerate(zip(named, names, strict=True)) if there != here)
        raise CheckpointDoesNotFit(
            f"{path} does not fit the optimizer: its weight {at} is {named[at]} there and {names[at]} here; give the "
            "weights in the same order"
        )
    keys = MOMENTS if type(optimizer).__module__.startswith("torch.optim.") else MOMENTS[:2]
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [n for group in saved["param_groups"] for n in group["params"]]
    for number, weight in zip(numbers, weights, strict=True):
        for key in keys:
            moment = saved["state"].get(number, {}).get(key)
            if isinstance(moment, torch.Tensor) and moment.shape != weight.shape:
                raise CheckpointDoesNotFit(
                    f"{path} does not fit the optimizer: {key} has shape {tuple(moment.shape)} there, its weight "
                    f"{tuple(weight.shape)} here"
                )

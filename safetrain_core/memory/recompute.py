"""Recompute activations in the backward pass instead of keeping them: seven policies, and the way back.

::

    none           keep everything
    full           each layer keeps its input only, and runs again in backward
    every_k        segments of k layers do
    sqrt           the same with k of about sqrt(L): the classical rule
    selective      the attention cores do (scores, softmax, mix); all else is kept
    selective_ops  each layer keeps what its matrix products and fused attention return, and does the rest again
    offload        each layer's saved activations wait in host memory

The engine is torch's: ``torch.utils.checkpoint`` (non-reentrant, random state preserved, early stop) and
``torch.autograd.graph.save_on_cpu``. Gradients, buffers and random states are bit for bit those of the plain run.

Which modules take part:

- Layers: the children of each ``nn.Sequential`` or ``nn.ModuleList`` that is not inside another one. A model may say it
  itself: an attribute or property ``recompute_layers``, a sequence of its submodules in the order in which they run.
- Attention cores: submodules with a true attribute ``is_attention_core``. Make the part between the projections a
  module of its own (it has no weights, so the state dict does not change), and set the attribute on its class.

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174 (segments); Korthikanti et
al. 2022, "Reducing Activation Recomputation in Large Transformer Models", arXiv:2205.05198 (selective).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from .layer import Offload, Recomputed, run_again
from .rules import POLICIES, checked_count, optimal_segment
from .segment import Segments

__all__ = ["apply_recompute", "attention_cores", "layers_of", "recomputed", "remove_recompute", "wrappers_of"]

Policy = str | Sequence[str]


def apply_recompute(model: nn.Module, policy: Policy, k: int = 4) -> nn.Module:
    """Make ``model`` train with ``policy``, in place of the one it had; the model itself is returned.

    Acts in training mode with gradients on; evaluation and ``no_grad`` run as ever. State dict, parameters, hooks and
    class of every module stay as they are. ``remove_recompute`` is the way back, and so is the policy ``none``.

    Args:
        policy: "none", "full", "every_k", "sqrt", "selective", "selective_ops" or "offload", see the top of this
            module; or the names of the layers to recompute, each by itself, as ``layers_of`` gives them.
        k: layers per segment of ``every_k``; above the depth it is the depth.

    Raises:
        ValueError: an unknown policy or layer, k < 1, a model without layers or (``selective``) attention cores. The
            model is left as it was.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    >>> apply_recompute(model, "full")(torch.ones(1, 2)).sum().backward()
    >>> apply_recompute(model, "half")
    Traceback (most recent call last):
    ...
    ValueError: recompute policy 'half' is unknown; use none, full, every_k, sqrt, selective, selective_ops or offload
    """
    checked_count("k", k)
    wrappers: list[Recomputed] = []
    if not isinstance(policy, str):
        known = dict(layer for stack in layers_of(model) for layer in stack) if policy else {}
        missing = [name for name in policy if name not in known]
        if missing:
            raise ValueError(f"no layer {missing[0]!r} to recompute; the model's are {', '.join(known)}")
        wrappers = [Recomputed(known[name], run_again) for name in policy]
    elif policy not in POLICIES:
        raise ValueError(f"recompute policy {policy!r} is unknown; use {', '.join(POLICIES[:-1])} or {POLICIES[-1]}")
    elif policy == "selective":
        wrappers = [Recomputed(core, run_again) for core in attention_cores(model).values()]
    elif policy != "none":
        for stack in layers_of(model):
            run = _strategy(policy, optimal_segment(len(stack)) if policy == "sqrt" else min(k, len(stack)))
            wrappers += [Recomputed(module, run) for module in {id(m): m for _, m in stack}.values()]
    remove_recompute(model)
    for wrapper in wrappers:
        wrapper.own = wrapper.module.__dict__.get("forward")
        wrapper.module.__dict__["forward"] = wrapper
    return model


def _strategy(policy: str, segment: int) -> Callable[..., Any]:
    if policy == "offload":
        return Offload()
    if policy == "selective_ops":
        return functools.partial(run_again, ops=True)
    return run_again if policy == "full" or segment == 1 else Segments(segment)


def remove_recompute(model: nn.Module) -> nn.Module:
    """Undo ``apply_recompute``; a model without it is left as it is. Returns the model.

    >>> model = apply_recompute(nn.Sequential(nn.Linear(2, 2)), "full")
    >>> "forward" in vars(model[0]), "forward" in vars(remove_recompute(model)[0])
    (True, False)
    """
    for wrapper in wrappers_of(model):
        wrapper.remove()
    return model


def wrappers_of(model: nn.Module) -> list[Recomputed]:
    """What ``apply_recompute`` has put in place of the forward of layers; empty where it has not."""
    found = (module.__dict__.get("forward") for module in model.modules())
    return [wrapper for wrapper in found if isinstance(wrapper, Recomputed)]


@contextlib.contextmanager
def recomputed(model: nn.Module, policy: Policy | None, k: int = 4) -> Iterator[None]:
    """``policy`` inside the context, and outside what was there before. None = leave it as it is.

    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> with recomputed(model, "full"):
    ...     "forward" in vars(model[0])
    True
    >>> "forward" in vars(model[0])
    False
    """
    before = wrappers_of(model)
    if policy is not None:
        apply_recompute(model, policy, k)
    try:
        yield
    finally:
        if policy is not None:
            remove_recompute(model)
            for wrapper in before:
                wrapper.module.__dict__["forward"] = wrapper


def layers_of(model: nn.Module) -> list[list[tuple[str, nn.Module]]]:
    """The stacks of layers that can be recomputed, each a list of (name, module) in order.

    Raises:
        ValueError: there is none.

    >>> [[name for name, _ in stack] for stack in layers_of(nn.Sequential(nn.Linear(1, 1), nn.Tanh()))]
    [['0', '1']]
    """
    told: Any = next((m.recompute_layers for m in model.modules() if hasattr(m, "recompute_layers")), None)
    if told is not None:
        names = {id(module): name for name, module in model.named_modules()}
        stacks = [[(names[id(module)], module) for module in told]]
    else:
        stacks = _stacks("", model)
    stacks = [stack for stack in stacks if stack]
    if not stacks:
        raise ValueError(
            f"{type(model).__name__} has no stack of layers to recompute: no nn.Sequential or nn.ModuleList in it, and "
            "no attribute recompute_layers; put its layers into one"
        )
    return stacks


def _stacks(prefix: str, module: nn.Module) -> list[list[tuple[str, nn.Module]]]:
    """The layers of the outermost containers. A ModuleList is no layer, it has no forward: it is looked into."""
    children = [(f"{prefix}{name}", child) for name, child in module.named_children()]
    if not isinstance(module, nn.Sequential | nn.ModuleList):
        return [stack for name, child in children for stack in _stacks(f"{name}.", child)]
    own = [(name, child) for name, child in children if not isinstance(child, nn.ModuleList)]
    inner = (_stacks(f"{name}.", child) for name, child in children if isinstance(child, nn.ModuleList))
    return [own, *(stack for stacks in inner for stack in stacks)]


def attention_cores(model: nn.Module) -> dict[str, nn.Module]:
    """The submodules that say ``is_attention_core``, by name.

    Raises:
        ValueError: there is none.

    >>> attention_cores(nn.Linear(1, 1))
    Traceback (most recent call last):
    ...
    ValueError: Linear has no attention core to recompute; set is_attention_core = True on the class of ...
    """
    cores = {name: m for name, m in model.named_modules() if getattr(m, "is_attention_core", False)}
    if not cores:
        raise ValueError(
            f"{type(model).__name__} has no attention core to recompute; set is_attention_core = True on the class of "
            "the module that mixes the values, or use the policy full"
        )
    return cores

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

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .moment import Moment
from .rules import POLICIES, checked_count, optimal_segment
from .segment import Segments

__all__ = ["apply_recompute", "attention_cores", "layers_of", "recomputed", "remove_recompute"]

Policy = str | Sequence[str]


class Recomputed:
    """Stands as a module's instance attribute ``forward``; the class, the children and the state dict stay as they are.

    It copies and pickles with its module: a copy's points to the copy.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        self.module, self.run = module, run
        self.own = module.__dict__.get("forward")  # a forward of the instance's own, put there by others
        self._inside = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._inside or not (self.module.training and torch.is_grad_enabled()):
            return self.plain(*args, **kwargs)
        return self.run(self, args, kwargs)

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward as it was."""
        if self.own is not None:
            return self.own(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def again(self, *args: Any, **kwargs: Any) -> Any:
        """The same for a second run that comes from outside the module, in a segment.

        Hooks on the module ran the first time and are left out, but for FSDP's: they gather the weights.
        """
        if not hasattr(self.module, "unshard"):
            return self.plain(*args, **kwargs)
        self._inside = True
        try:
            return self.module(*args, **kwargs)
        finally:
            self._inside = False

    def remove(self) -> None:
        """Put back what was there before."""
        if self.own is None:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = self.own


def _whole(layer: Recomputed, args: tuple[Any, ...], kwargs: dict[str, Any], ops: bool = False) -> Any:
    """One module, run again as a whole, or (``ops``) but for its expensive operations."""
    moment = Moment(layer.module)
    output = checkpoint(
        layer.plain,
        *args,
        use_reentrant=False,
        context_fn=functools.partial(_contexts, moment, ops),
        **kwargs,
    )
    moment.settle()
    return output


def _contexts(moment: Moment, ops: bool) -> tuple[Any, Any]:
    if not ops:
        return contextlib.nullcontext(), moment
    first, second = create_selective_checkpoint_contexts(_keep_what_is_dear)
    return first, _Both(moment, second)


class _Both:
    """Two contexts as one, which can be entered again; contextlib's are good for once."""

    def __init__(self, *contexts: Any) -> None:
        self.contexts, self._stacks = contexts, list[contextlib.ExitStack]()

    def __enter__(self) -> None:
        stack = contextlib.ExitStack()
        for context in self.contexts:
            stack.enter_context(context)
        self._stacks.append(stack)

    def __exit__(self, *error: Any) -> None:
        self._stacks.pop().__exit__(*error)


@functools.cache
def _dear_ops() -> frozenset[Any]:
    """Products with a weight, and attention in one kernel. Batched products are left out: their results are scores."""
    aten = torch.ops.aten
    fused = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    found = [getattr(aten, f"_scaled_dot_product_{name}", None) for name in fused]
    return frozenset([aten.mm.default, aten.addmm.default, *(op.default for op in found if op is not None)])


def _keep_what_is_dear(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Whether to keep an operation's result. Not where it drew random numbers: the second run must draw them too."""
    if op not in _dear_ops():
        return CheckpointPolicy.PREFER_RECOMPUTE
    named = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
    drew = named.get("dropout_p", 0.0) > 0
    return CheckpointPolicy.PREFER_RECOMPUTE if drew else CheckpointPolicy.MUST_SAVE


class Offload:
    """Saved activations wait in host memory. On a CPU that is where they are: they are only counted, in ``bytes``."""

    def __init__(self) -> None:
        self.bytes = 0

    def __call__(self, layer: Recomputed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        torchs = save_on_cpu(pin_memory=torch.cuda.is_available())
        # Weights stay on the device anyway; torch's hook would send a copy of each.
        own = {t.untyped_storage()._cdata for t in (*layer.module.parameters(), *layer.module.buffers())}

        def pack(tensor: Tensor) -> Any:
            if tensor.untyped_storage()._cdata in own:
                return tensor
            self.bytes += tensor.numel() * tensor.element_size()
            return tensor if tensor.device.type == "cpu" else torchs.pack_hook(tensor)

        def unpack(packed: Any) -> Tensor:
            return packed if isinstance(packed, Tensor) else torchs.unpack_hook(packed)

        with saved_tensors_hooks(pack, unpack):
            return layer.plain(*args, **kwargs)


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
        wrappers = [Recomputed(known[name], _whole) for name in policy]
    elif policy not in POLICIES:
        raise ValueError(
            f"recompute policy {policy!r} is unknown; use {', '.join(POLICIES[:-1])} or {POLICIES[-1]}"
        )
    elif policy == "selective":
        wrappers = [Recomputed(core, _whole) for core in attention_cores(model).values()]
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
        return functools.partial(_whole, ops=True)
    return _whole if policy == "full" or segment == 1 else Segments(segment)


def remove_recompute(model: nn.Module) -> nn.Module:
    """Undo ``apply_recompute``; a model without it is left as it is. Returns the model.

    >>> model = apply_recompute(nn.Sequential(nn.Linear(2, 2)), "full")
    >>> "forward" in vars(model[0]), "forward" in vars(remove_recompute(model)[0])
    (True, False)
    """
    for wrapper in _wrappers(model):
        wrapper.remove()
    return model


def _wrappers(model: nn.Module) -> list[Recomputed]:
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
    before = _wrappers(model)
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
    told = next((m.recompute_layers for m in model.modules() if hasattr(m, "recompute_layers")), None)
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
    ValueError: Linear has no attention core to recompute; set is_attention_core = True on the class of the module that ...
    """
    cores = {name: m for name, m in model.named_modules() if getattr(m, "is_attention_core", False)}
    if not cores:
        raise ValueError(
            f"{type(model).__name__} has no attention core to recompute; set is_attention_core = True on the class of "
            "the module that mixes the values, or use the policy full"
        )
    return cores

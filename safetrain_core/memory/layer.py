"""A layer whose forward runs again in backward: what stands in for its ``forward``, and three ways to run it.

The engine is torch's: ``torch.utils.checkpoint`` without reentrancy, and ``torch.autograd.graph.save_on_cpu``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .moment import Moment

__all__ = ["Offload", "Recomputed", "run_again"]


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


def run_again(layer: Recomputed, args: tuple[Any, ...], kwargs: dict[str, Any], ops: bool = False) -> Any:
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
            stays = tensor.untyped_storage()._cdata in own
            if not stays:
                self.bytes += tensor.numel() * tensor.element_size()
            # Detached: a saved output would hold the graph that holds it, and never be freed.
            return tensor.detach() if stays or tensor.device.type == "cpu" else torchs.pack_hook(tensor)

        def unpack(packed: Any) -> Tensor:
            return packed if isinstance(packed, Tensor) else torchs.unpack_hook(packed)

        with saved_tensors_hooks(pack, unpack):
            return layer.plain(*args, **kwargs)

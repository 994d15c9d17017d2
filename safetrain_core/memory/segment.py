"""Several layers recomputed as one segment, although the model's own loop calls them one by one.

``torch.utils.checkpoint.checkpoint`` wants one function to run twice. A model that loops over a ``ModuleList`` offers
none for "layers 4 to 7", so a segment records the calls as they come. While a layer of the segment runs, torch's own
checkpoint hook replaces what autograd saves by placeholders; the first placeholder that a backward pass opens replays
the recorded calls in a chain. Only what came from outside the segment is kept.

A layer joins the segment before it if one of its arguments is an output of that segment, untouched; else it begins a
new one. So a loop that does something between its layers, leaves early or runs twice is right, if less thrifty.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
import torch.utils.checkpoint as engine
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from .moment import Moment

__all__ = ["Segments"]

#: Whom torch 2.6 asks for the arguments of ``replay``, which has none; newer ones do not ask.
SAVER = getattr(engine, "_NoopSaveInputs", None)


class Layer(Protocol):
    """What a segment asks of a layer: its forward, and the same for the second run."""

    module: nn.Module

    def plain(self, *args: Any, **kwargs: Any) -> Any: ...
    def again(self, *args: Any, **kwargs: Any) -> Any: ...


class Outside(NamedTuple):
    """A tensor from outside the segment. Detached: the graph that it comes from must not be kept alive by it."""

    value: Tensor
    requires_grad: bool
    version: int

    def again(self) -> Tensor:
        if self.value._version != self.version:
            raise RuntimeError(
                f"an input of a recomputed layer, shape {tuple(self.value.shape)}, was changed in place after the "
                "forward pass; recomputing would use other values: change a copy"
            )
        return self.value.detach().requires_grad_(self.requires_grad)


class Inside(NamedTuple):
    """Leaf ``leaf`` of what call ``call`` of the segment returned."""

    call: int
    leaf: int


class Surroundings:
    """Random states and autocast as they are now, to be entered for the second run."""

    def __init__(self, tensors: list[Tensor]) -> None:
        others = [t.device.type for t in tensors if t.device.type not in ("cpu", "meta")]
        self.device_type = others[0] if others else "cuda"
        self.cpu = torch.get_rng_state()
        self.devices, self.states = engine.get_device_states(*tensors) if others else ([], [])
        self.autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in dict.fromkeys(["cpu", *others[:1]])
        ]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype, cache in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache))
            torch.set_rng_state(self.cpu)
            if self.devices:
                engine.set_device_states(self.devices, self.states, device_type=self.device_type)
            yield


class Call(NamedTuple):
    """One layer's call: where each of its arguments comes from, and what it ran in."""

    layer: Layer
    sources: list[Any]
    spec: TreeSpec
    moment: Moment
    surroundings: Surroundings


class Segment:
    """The calls recorded so far. Lives as long as the graph holds a placeholder of it."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.outputs: list[list[tuple[weakref.ref[Tensor], int] | None]] = []

    def source(self, leaf: Any) -> Any:
        """Where an argument comes from: Inside, Outside, or a plain value as it is."""
        if not isinstance(leaf, Tensor):
            return leaf
        for call, leaves in enumerate(self.outputs):
            for index, known in enumerate(leaves):
                output = known[0]() if known is not None else None
                if known is not None and output is not None and _same(leaf, output, known[1]):
                    return Inside(call, index)
        return Outside(leaf.detach(), leaf.requires_grad, leaf._version)

    def run(self, frame: Any, layer: Layer, sources: list[Any], spec: TreeSpec, args: Any, kwargs: Any) -> Any:
        """The layer's forward, recorded."""
        moment = Moment(layer.module)
        surroundings = Surroundings([leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)])
        before = len(frame.weak_holders)
        try:
            with engine._checkpoint_hook(frame):
                output = layer.plain(*args, **kwargs)
        except BaseException:  # what this layer saved is nothing that the replay will save
            del frame.weak_holders[before:], frame.x_metadatas[before:]
            raise
        moment.settle()
        self.calls.append(Call(layer, sources, spec, moment, surroundings))
        self.outputs.append(
            [(weakref.ref(t), t._version) if isinstance(t, Tensor) else None for t in tree_leaves(output)]
        )
        return output

    def replay(self) -> None:
        """Run the recorded calls again; torch's recomputation hook takes what they save, and ends it with the last."""
        made: list[list[Any]] = []
        devices = sorted({device for call in self.calls for device in call.surroundings.devices})
        kind = next((c.surroundings.device_type for c in self.calls if c.surroundings.devices), "cuda")
        with torch.random.fork_rng(devices=devices, device_type=kind):
            for call in self.calls:
                leaves = [
                    made[source.call][source.leaf]
                    if isinstance(source, Inside)
                    else source.again()
                    if isinstance(source, Outside)
                    else source
                    for source in call.sources
                ]
                args, kwargs = tree_unflatten(leaves, call.spec)
                with call.surroundings.again(), call.moment:
                    made.append(tree_leaves(call.layer.again(*args, **kwargs)))


def _same(leaf: Tensor, output: Tensor, version: int) -> bool:
    """Whether ``leaf`` is ``output`` as it was returned, or an alias of it as FSDP's hooks make one."""
    if leaf is not output and (
        leaf.untyped_storage()._cdata != output.untyped_storage()._cdata
        or leaf.storage_offset() != output.storage_offset()
        or leaf.shape != output.shape
        or leaf.stride() != output.stride()
        or leaf.dtype != output.dtype
    ):
        return False
    return leaf._version == version


def _frame_of(segment: Segment) -> Any:
    """torch's own bookkeeping of a segment: its placeholders, and what to run when one is opened."""
    early_stop = engine._enable_checkpoint_early_stop is not False
    frame: Any = engine._CheckpointFrame(segment.replay, early_stop, None, engine._default_meta_extractor)
    frame.forward_completed = True  # never backward inside forward: a segment's forward has no inside
    if SAVER is not None:
        frame.input_saver = SAVER.apply(torch.empty(0, requires_grad=True))
    return frame


class Segments:
    """Recomputes the layers that call it in segments of at most ``size``."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._open: weakref.ref[Any] | None = None  # torch's frame of the segment that is not full yet

    def __getstate__(self) -> dict[str, Any]:
        return {"size": self.size, "_open": None}

    def __call__(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        frame = self._open() if self._open is not None else None
        segment = frame.recompute_fn.__self__ if frame is not None else Segment()
        sources = [segment.source(leaf) for leaf in leaves]
        joins = len(segment.calls) < self.size and any(isinstance(source, Inside) for source in sources)
        if frame is None or not joins:
            segment = Segment()
            sources = [segment.source(leaf) for leaf in leaves]
            frame = _frame_of(segment)
            self._open = weakref.ref(frame)
        return segment.run(frame, layer, sources, spec, args, kwargs)

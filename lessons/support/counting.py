"""Costs that are counted, not timed: host reads, passes over gradients, bytes kept for the backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class _Ops(TorchDispatchMode):
    """Sees every operator that runs, with its arguments."""

    def __init__(self, see: Callable[[str, list[Tensor]], None]) -> None:
        super().__init__()
        self._see = see

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self._see(func._schema.name, list(_tensors(args)))
        return func(*args, **(kwargs or {}))


def _tensors(values: Any) -> Iterable[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)


def host_reads(function: Callable[[], Any]) -> int:
    """How often ``function`` made Python wait for a value of a tensor: item, float, bool, tolist, numpy.

    What an operator reads inside its own C++ code is not seen.

    >>> x = torch.ones(3)
    >>> host_reads(lambda: (x.sum().item(), bool(x[0] > 0), x.tolist()))
    3
    """
    count = Counter()

    def see(name: str, _: list[Tensor]) -> None:
        count["reads"] += name == "aten::_local_scalar_dense"

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            count["reads"] += 1
            return method(self, *args, **kwargs)

        return read

    with (
        mock.patch.object(Tensor, "tolist", counted(Tensor.tolist)),
        mock.patch.object(Tensor, "numpy", counted(Tensor.numpy)),
        _Ops(see),
    ):
        function()
    return count["reads"]


def calls_of(name: str, function: Callable[[], Any]) -> int:
    """How often ``function`` ran the operator ``name`` of torch.

    >>> calls_of("aten::_linalg_svd", lambda: torch.linalg.svdvals(torch.eye(2)))
    1
    """
    count = Counter()

    def see(called: str, _: list[Tensor]) -> None:
        count[called] += 1

    with _Ops(see):
        function()
    return count[name]


def gradient_passes(model: nn.Module, function: Callable[[], Any]) -> float:
    """How often ``function`` read or wrote all of the model's gradients: elements touched / elements.

    >>> layer = nn.Linear(2, 1); layer(torch.ones(1, 2)).sum().backward()
    >>> gradient_passes(layer, lambda: [p.grad.mul_(2) for p in layer.parameters()])
    1.0
    """
    sizes = {
        p.grad.data_ptr(): p.grad.numel() for p in model.parameters() if p.grad is not None
    }
    touched = 0

    def see(_: str, tensors: list[Tensor]) -> None:
        nonlocal touched
        touched += sum(sizes.get(address, 0) for address in {t.data_ptr() for t in tensors})

    with torch.no_grad(), _Ops(see):
        function()
    return touched / sum(sizes.values())


def activation_bytes(
    model: nn.Module, forward: Callable[[], Any]
) -> dict[torch.dtype, int]:
    """Bytes that autograd keeps for the backward pass, each storage once, the model's own weights left out.

    >>> layer = nn.Linear(8, 4); x = torch.ones(2, 8)
    >>> activation_bytes(layer, lambda: layer(x).relu().sum())
    {torch.float32: 96}
    """
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in weights:
            kept.setdefault(address, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    total: Counter[torch.dtype] = Counter()
    for tensor in kept.values():
        total[tensor.dtype] += tensor.untyped_storage().nbytes()
    return dict(total)

"""What GaLore asks of its arguments, of the weights, and of the optimizer inside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import SafeTrainError, type_of
from .projection import METHODS, MOMENTS

__all__ = [
    "Factory",
    "checked",
    "decays_weight",
    "ignores_weight",
    "is_eligible",
    "largest_of",
    "made",
    "pass_on",
    "refuse_other_state",
    "refuse_sharded",
]

#: ``optimizer_factory(groups) -> Optimizer``.
Factory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

_names = ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "Muon", "NAdam", "RAdam", "RMSprop", "SGD")

#: Their updates do not depend on the weight once its decay is left out, so that a proxy of zeros does: one product of
#: matrices less, and no rounding of a small change against a large weight. Exactly these, not what inherits from them.
BLIND = tuple(getattr(torch.optim, name) for name in _names if hasattr(torch.optim, name))

#: They add weight decay to the gradient; all others multiply the weight by it.
COUPLED = tuple(getattr(torch.optim, name) for name in (*_names, "ASGD") if name not in ("AdamW", "Muon"))


def is_eligible(weight: Tensor, rank: int, max_dim: int | None = None, *, force: bool = False) -> bool:
    """Whether GaLore projects a weight: a real matrix, both sides above ``rank``, none above ``max_dim``.

    >>> [is_eligible(torch.empty(*shape), 4, 100) for shape in [(8, 16), (4, 16), (8, 101), (8,), (8, 8, 3, 3)]]
    [True, False, False, False, False]
    """
    if weight.dim() != 2 or not weight.is_floating_point() or weight.numel() == 0:
        return False
    return (force or min(weight.shape) > rank) and (max_dim is None or max(weight.shape) <= max_dim)


def ignores_weight(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's updates, its weight decay aside, are known not to depend on the weight.

    >>> weight = [torch.nn.Parameter(torch.zeros(1))]
    >>> ignores_weight(torch.optim.AdamW(weight)), ignores_weight(torch.optim.Adafactor(weight))
    (True, False)
    """
    return type(optimizer) in BLIND


def decays_weight(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether a group's weight decay multiplies the weight (decoupled), and is not added to its gradient.

    >>> weight = [torch.nn.Parameter(torch.zeros(1))]
    >>> [decays_weight(o, o.param_groups[0]) for o in (torch.optim.AdamW(weight), torch.optim.SGD(weight, lr=1))]
    [True, False]
    """
    told = group.get("decoupled_weight_decay", group.get("weight_decouple"))
    if told is not None:
        return bool(told)
    return not isinstance(optimizer, COUPLED) or isinstance(optimizer, torch.optim.AdamW)


def checked(rank: int, update_interval: int, scale: float, max_dim: int | None, method: str, moments: str) -> None:
    """``ValueError`` with name, value and limit of an argument of ``GaLore`` that is out of range.

    >>> checked(0, 200, 0.25, None, "svd", "keep")
    Traceback (most recent call last):
    ...
    ValueError: rank=0 must be a whole number of at least 1
    """
    for name, value in (("rank", rank), ("update_interval", update_interval), ("max_dim", max_dim)):
        if name == "max_dim" and value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
    if not 0 < scale < math.inf:
        raise ValueError(f"scale={scale} must be a finite number above 0")
    for name, word, choices in (("method", method, METHODS), ("moments", moments, MOMENTS)):
        if word not in choices:
            raise ValueError(f"{name}={word!r} is unknown; choose one of {', '.join(choices)}")


def pass_on(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    """Options of groups, a learning rate that a schedule has set among them, to the same groups elsewhere."""
    for ours, theirs in zip(source, target, strict=True):
        theirs.update((k, v) for k, v in ours.items() if k != "params" and not k.startswith("galore_"))


def refuse_sharded(weight: Tensor) -> None:
    """``ValueError`` for a weight of which this process holds a part: the parts would have different bases."""
    flat = getattr(weight, "_is_flat_param", False) or getattr(weight, "_fsdp_flattened", False)
    if flat or hasattr(weight, "device_mesh"):
        raise ValueError(
            f"a weight of shape {tuple(weight.shape)} is sharded ({type(weight).__name__}): GaLore needs whole "
            "gradients; use DistributedDataParallel, or the optimizer without GaLore"
        )


def largest_of(grad: Tensor, updates: int) -> float:
    """max|g| of a gradient that a basis is to be taken from; a host read.

    Raises:
        SafeTrainError: it is not finite, or sparse.

    >>> largest_of(torch.tensor([[1.0, -3.0]]), updates=200)
    3.0
    """
    shape = tuple(grad.shape)
    if grad.is_sparse:
        raise SafeTrainError(f"the gradient of a {shape} weight is sparse; name the weight in GaLore's exclude")
    largest = torch.linalg.vector_norm(grad, math.inf).item()
    if not math.isfinite(largest):
        raise SafeTrainError(
            f"the gradient of a {shape} weight is not finite (max|g|={largest}), and update {updates} needs its "
            "singular vectors; nothing was changed. AmpTrainState refuses such a step; or look before step()"
        )
    return float(largest)


def refuse_other_state(
    state_dict: dict[str, Any], weights: list[Tensor], proxies: Mapping[Tensor, Tensor], rank: int, optimizer: str
) -> None:
    """``ValueError`` where a state is not that of GaLore of this rank around this class, over these weights."""
    for group in state_dict["param_groups"]:
        saved_rank, saved_optimizer = group.get("galore_rank"), group.get("galore_inner")
        if (saved_rank, saved_optimizer) != (rank, optimizer):
            told = (
                "without GaLore" if saved_rank is None else f"by GaLore of rank {saved_rank} around {saved_optimizer}"
            )
            raise ValueError(f"it was saved {told}; here it is GaLore of rank {rank} around {optimizer}")
    numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
    for number, weight in zip(numbers, weights, strict=False):  # torch refuses another number of weights
        saved, proxy = state_dict["state"].get(number, {}), proxies.get(weight)
        basis = saved.get("projector")
        expected = None if proxy is None else (min(weight.shape), min(proxy.shape))
        if basis is not None:
            fits = tuple(basis.shape) == expected
        else:  # not projected, or no gradient but zeros so far
            fits = not saved or (proxy is not None) == ("inner" in saved)
        if not fits:
            raise ValueError(
                f"a weight of shape {tuple(weight.shape)} was saved with a basis of shape "
                f"{None if basis is None else tuple(basis.shape)}, here {expected}; keep max_dim and exclude"
            )


def made(factory: Factory, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The inner optimizer, checked to be over these weights and steppable without a closure."""
    if not callable(factory):
        raise ValueError(
            f"optimizer_factory={factory!r} must be callable: groups -> Optimizer, as torch.optim.AdamW is"
        )
    inner = factory(groups)
    if not isinstance(inner, torch.optim.Optimizer):
        raise ValueError(f"optimizer_factory returned {type_of(inner)}, expected a torch.optim.Optimizer")
    if isinstance(inner, torch.optim.LBFGS):
        raise ValueError(
            "GaLore cannot wrap LBFGS: it evaluates its closure many times per step; use another optimizer"
        )
    held = [id(p) for group in inner.param_groups for p in group["params"]]
    if sorted(held) != sorted(id(p) for group in groups for p in group["params"]):
        raise ValueError(
            "optimizer_factory returned an optimizer over other weights; build it from the groups that it is given, "
            "not from model.parameters()"
        )
    return inner

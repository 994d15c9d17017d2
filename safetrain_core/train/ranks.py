"""What each rank of a run holds: its share of the weights and of the optimizer's state, counted and summed."""

from __future__ import annotations

import hashlib
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..distributed import rank
from ..step.amp import AmpTrainState

__all__ = ["RankFacts", "rank_facts", "state_digest"]

#: FP32 weight and Adam's two moments: what mixed-precision training keeps of each parameter beside its 16-bit copy.
#: Source: Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054, section 3.1 (K = 12).
BYTES_PER_PARAMETER = 12


class RankFacts(NamedTuple):
    """One rank's share.

    Args:
        parameters: weights of the whole model. held: elements of it on this rank.
        weight_bytes, optimizer_bytes: of what this rank holds; counters of one element are left out.
        norm: global L2 norm of the weights, as this rank sees them.
    """

    rank: int
    parameters: int
    held: int
    weight_bytes: int
    optimizer_bytes: int
    norm: float

    def ideal_bytes(self, ranks: int) -> float:
        """12 P / N: FP32 weights and two moments, cut evenly."""
        return BYTES_PER_PARAMETER * self.parameters / ranks


def _held(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@torch.no_grad()
def rank_facts(model: nn.Module, optimizer: torch.optim.Optimizer) -> RankFacts:
    """Count and measure this rank's share; every rank calls it.

    >>> model = nn.Linear(3, 1, bias=False)
    >>> adam = torch.optim.AdamW(model.parameters())
    >>> model(torch.ones(1, 3)).sum().backward(); adam.step()
    >>> facts = rank_facts(model, adam)
    >>> facts.held, facts.weight_bytes, facts.optimizer_bytes, facts.ideal_bytes(1)
    (3, 12, 24, 36.0)
    """
    weights = list(model.parameters())
    held = [_held(w) for w in weights]
    states = [value for state in optimizer.state.values() for value in state.values()]
    moments = [_held(value) for value in states if isinstance(value, Tensor) and value.dim()]
    squares = (float(_whole(w).double().square().sum().item()) for w in weights)  # one whole weight at a time
    return RankFacts(
        rank(),
        sum(w.numel() for w in weights),
        sum(w.numel() for w in held),
        sum(w.numel() * w.element_size() for w in held),
        sum(m.numel() * m.element_size() for m in moments),
        math.sqrt(sum(squares)),
    )


def _whole(weight: Any) -> Tensor:
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


@torch.no_grad()
def state_digest(amp: AmpTrainState) -> str:
    """The sha256 of what this rank holds of weights, buffers and optimizer state: equal sums, equal bytes.

    >>> amp = AmpTrainState(nn.Linear(1, 1))
    >>> before = state_digest(amp)
    >>> _ = amp.step(torch.ones(1, 1), torch.zeros(1, 1))
    >>> state_digest(amp) == before
    False
    """
    digest = hashlib.sha256()
    optimizer = amp.optimizer
    states = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"] if p in optimizer.state]
    tensors = [*amp.model.parameters(), *amp.model.buffers()]
    tensors += [state[key] for state in states for key in sorted(state) if isinstance(state[key], Tensor)]
    for tensor in tensors:
        digest.update(_held(tensor).detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()

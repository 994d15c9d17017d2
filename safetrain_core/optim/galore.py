"""GaLore: any optimizer of torch, run on gradients of low rank.

A weight W of shape (m, n) gets a basis P of rank r on its smaller side. The inner optimizer holds in its place a proxy
of the projected shape, (r, n) for m <= n, else (m, r). In each step the proxy holds P^T W, with the gradient P^T G; the
inner optimizer moves it, and the change goes back: W <- W + scale P (after - before). So its moments have the projected
size, and it need not know. Between steps a proxy takes no memory.

Weight decay acts on W itself where the optimizer multiplies the weight by it (AdamW, Adafactor, Muon); where it adds it
to the gradient (SGD, Adam) it is part of the gradient, and is projected with it.

What differs from the authors' galore-torch: a square weight is projected from the left, as in the paper, there from the
right; AdamW's epsilon and the order of decay and update are torch's; a weight whose gradient is all zero waits for one
that is not before it takes a basis.

Source: Zhao et al. 2024, "GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection", arXiv:2403.03507.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .inner import (
    Factory,
    checked,
    decays_weight,
    ignores_weight,
    is_eligible,
    largest_of,
    made,
    pass_on,
    refuse_other_state,
    refuse_sharded,
)
from .projection import add_back, find_basis, projected, projected_shape, turn_

__all__ = ["GaLore"]

log = logging.getLogger(__name__)

#: Group, weight and proxy of each projected weight that has a gradient.
Work = list[tuple[dict[str, Any], Tensor, nn.Parameter]]


class GaLore(torch.optim.Optimizer):
    """An optimizer whose moments have low rank: ``optimizer_factory``'s, on projected gradients.

    Args:
        params: as for every optimizer: weights, or groups of them with their options.
        optimizer_factory: ``optimizer_factory(groups) -> Optimizer`` over exactly these groups, which hold a proxy in
            place of each weight that is projected. Weights that are not (see ``is_eligible``) stay, and are stepped
            as without GaLore.
        rank: columns of the basis, at least 1. A weight with a side of this or less is not projected.
        update_interval: updates between two bases, at least 1; each costs an SVD of the gradient and a host read.
        scale: factor on the projected update, above 0.
        max_dim: weights with a larger side are not projected; None = no limit.
        exclude: weights that are not projected, for example embeddings.
        method: "svd", or "randomized": see ``find_basis``.
        moments: what a new basis does to the inner optimizer's moments. "keep": nothing, as in the paper; "reset":
            the optimizer starts anew for that weight; "project": they are turned into it.
        seed: of the randomized method.
        force_full_rank: project also where ``rank`` is the smaller side or more: a rotation, which saves nothing.
        decoupled_decay: whether weight decay multiplies the weight; None = as known of torch's own; True for others.

    Attributes:
        inner: the optimizer that the factory made. param_groups: its groups, with the weights themselves in them.

    Raises:
        ValueError: an argument out of range, a sharded weight, a factory that does not take the groups as they are.

    >>> weight = nn.Parameter(torch.zeros(8, 16))
    >>> optimizer = GaLore([weight], lambda groups: torch.optim.AdamW(groups, lr=0.1), rank=2, scale=1.0)
    >>> weight.grad = torch.ones(8, 16)
    >>> optimizer.step()
    >>> state = optimizer.state[weight]
    >>> state["projector"].shape, state["inner"]["exp_avg"].shape
    (torch.Size([8, 2]), torch.Size([2, 16]))
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_factory: Factory,
        *,
        rank: int,
        update_interval: int = 200,
        scale: float = 0.25,
        max_dim: int | None = None,
        exclude: Iterable[Tensor] = (),
        method: str = "svd",
        moments: str = "keep",
        seed: int = 0,
        force_full_rank: bool = False,
        decoupled_decay: bool | None = None,
    ) -> None:
        checked(rank, update_interval, scale, max_dim, method, moments)
        self.rank, self.update_interval, self.scale, self.max_dim = rank, update_interval, scale, max_dim
        self.method, self.moments, self.seed = method, moments, seed
        self.force_full_rank, self.decoupled_decay = force_full_rank, decoupled_decay
        self._excluded = {id(weight) for weight in exclude}
        self._proxy: dict[Tensor, nn.Parameter] = {}
        super().__init__(params, {})
        groups = [self._for_inner(group) for group in self.param_groups]
        self.inner = made(optimizer_factory, groups)
        # The groups are the inner optimizer's: a factory may have split or sorted them.
        weight_of: dict[Tensor, Tensor] = {proxy: weight for weight, proxy in self._proxy.items()}
        self.param_groups = [
            self._marked({**group, "params": [weight_of.get(p, p) for p in group["params"]]})
            for group in self.inner.param_groups
        ]
        self.defaults = dict(self.inner.defaults)
        if not self._proxy:
            log.warning("GaLore projects none of the weights: rank=%d, max_dim=%s; choose a lower rank", rank, max_dim)

    def _for_inner(self, group: dict[str, Any]) -> dict[str, Any]:
        """A group as the inner optimizer gets it, with proxies."""
        for weight in group["params"]:
            refuse_sharded(weight)
        return {**group, "params": [self._standing_for(weight) for weight in group["params"]]}

    def _standing_for(self, weight: Tensor) -> Tensor:
        if id(weight) in self._excluded or not is_eligible(weight, self.rank, self.max_dim, force=self.force_full_rank):
            return weight
        # One zero, seen as a matrix: the right shape for whoever asks, and no memory.
        blank = weight.new_zeros(()).expand(projected_shape(weight.shape, min(self.rank, *weight.shape)))
        self._proxy[weight] = nn.Parameter(blank)
        return self._proxy[weight]

    def _marked(self, group: dict[str, Any]) -> dict[str, Any]:
        """With what a checkpoint must hold, so that another rank or optimizer is noticed."""
        return {**group, "galore_rank": self.rank, "galore_inner": type(self.inner).__name__, "galore_updates": 0}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As every optimizer's; the new weights are projected by the same rules."""
        super().add_param_group(param_group)
        if "inner" not in self.__dict__:  # called by the constructor
            return
        group = self.param_groups.pop()
        self.inner.add_param_group(self._for_inner(group))
        options = {key: value for key, value in self.inner.param_groups[-1].items() if key != "params"}
        self.param_groups.append(self._marked({**options, "params": group["params"]}))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update; the closure, where given, is evaluated once, before. The gradients stay as they are.

        Raises:
            SafeTrainError: a gradient that is not finite, or sparse, where a basis is to be found; nothing was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [
            (group, weight, self._proxy[weight])
            for group in self.param_groups
            for weight in group["params"]
            if weight.grad is not None and weight in self._proxy
        ]
        device = work[0][1].device.type if work else "cpu"
        with torch.autocast(device, enabled=False):  # a caller's autocast must not round the projections
            self._update(work)
        return loss

    def _update(self, work: Work) -> None:
        self._take_up(self._new_bases(work))
        pass_on(self.param_groups, self.inner.param_groups)
        moves = [self._fill(*item) for item in work]
        try:
            self.inner.step()
            for (_, weight, proxy), (basis, before, keep) in zip(work, moves, strict=True):
                change = proxy.detach() if before is None else proxy.detach().sub_(before, alpha=keep)
                add_back(weight, basis, change, scale=self.scale, keep=keep)
        finally:
            for _, _, proxy in work:
                proxy.grad, proxy.data = None, proxy.new_zeros(()).expand(proxy.shape)
        pass_on(self.inner.param_groups, self.param_groups)
        for group in self.param_groups:
            group["galore_updates"] += 1
            for weight in group["params"]:
                self._show_state(weight)

    def _show_state(self, weight: Tensor) -> None:
        """Let ``self.state`` hold the inner optimizer's state of a weight: the same dict, not a copy."""
        proxy = self._proxy.get(weight)
        if proxy is None and weight in self.inner.state:
            self.state[weight] = self.inner.state[weight]
        elif proxy is not None and proxy in self.inner.state:
            self.state[weight]["inner"] = self.inner.state[proxy]

    def _new_bases(self, work: Work) -> dict[Tensor, Tensor]:
        """The bases that are due, found before anything is changed. A gradient of zeros gives none."""
        found: dict[Tensor, Tensor] = {}
        for group, weight, proxy in work:
            grad, updates = weight.grad, group["galore_updates"]
            due = updates % self.update_interval == 0 or "projector" not in self.state.get(weight, {})
            if due and grad is not None and largest_of(grad, updates) > 0:
                found[weight] = find_basis(grad, min(proxy.shape), method=self.method, seed=self.seed + updates)
        return found

    def _take_up(self, bases: dict[Tensor, Tensor]) -> None:
        for weight, basis in bases.items():
            state = self.state[weight]
            if "projector" in state and self.moments == "reset":
                self.inner.state[self._proxy[weight]].clear()
            elif "projector" in state and self.moments == "project":
                turn_(self.inner.state[self._proxy[weight]], state["projector"], basis, weight.shape)
            state["projector"] = basis

    def _fill(self, group: dict[str, Any], weight: Tensor, proxy: nn.Parameter) -> tuple[Tensor, Tensor | None, float]:
        """Give a proxy its value and gradient; its basis, its value if that matters, and what decay leaves of W."""
        basis = self.state.get(weight, {}).get("projector")
        if basis is None:  # no gradient but zeros so far: any basis does, and the next update looks again
            basis = torch.eye(min(weight.shape), min(proxy.shape), dtype=weight.dtype, device=weight.device)
        decay = float(group["lr"] * group.get("weight_decay", 0)) if "lr" in group else 0.0
        decoupled = decays_weight(self.inner, group) if self.decoupled_decay is None else self.decoupled_decay
        before = None
        if ignores_weight(self.inner) and (decoupled or decay == 0):
            proxy.data = weight.new_zeros(proxy.shape)
        else:
            proxy.data = projected(weight, basis)
            before = proxy.detach().clone()
        proxy.grad = projected(weight.grad, basis)  # type: ignore[arg-type]
        return basis, before, 1 - decay if decoupled else 1.0

    def refuse_state(self, state_dict: dict[str, Any]) -> None:
        """``ValueError`` where a state was saved without GaLore, at another rank, or around another optimizer."""
        weights = [weight for group in self.param_groups for weight in group["params"]]
        refuse_other_state(state_dict, weights, self._proxy, self.rank, type(self.inner).__name__)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As every optimizer's.

        Raises:
            ValueError: see ``refuse_state``; nothing is changed then.
        """
        self.refuse_state(state_dict)
        super().load_state_dict(state_dict)
        self.inner.state.clear()
        for weight, state in self.state.items():
            proxy = self._proxy.get(weight)
            if proxy is None:
                self.inner.state[weight] = state
            else:
                self.inner.state[proxy] = state.setdefault("inner", {})
        pass_on(self.param_groups, self.inner.param_groups)

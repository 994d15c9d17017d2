"""Optimizers by name: torch's own where torch has one, a well-kept library's where it has not.

Weight decay is off for biases and for the weights of normalization layers, as is usual for transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .apollo import apollo
from .galore import GaLore

__all__ = ["OPTIMIZERS", "OptimizerPair", "build_optimizer", "decay_groups"]

#: Momentum of ``sgd_momentum``.
SGD_MOMENTUM = 0.9

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase, nn.LocalResponseNorm)

Groups = list[dict[str, Any]]


def decay_groups(model: nn.Module, weight_decay: float, *, split_tables: bool = False) -> Groups:
    """The trainable weights in two groups: decayed, and not (vectors, scalars and all weights of norms).

    Args:
        split_tables: split each group further by an option ``matrix``: whether its weights are 2-D and not embeddings,
            which are tables of vectors.

    >>> model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    >>> [(group["weight_decay"], len(group["params"])) for group in decay_groups(model, 0.1)]
    [(0.1, 1), (0.0, 3)]
    """
    of_norms = {id(p) for m in model.modules() if isinstance(m, NORMS) for p in m.parameters(recurse=False)}
    trainable = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trainable if p.dim() >= 2 and id(p) not in of_norms]
    chosen = {id(p) for p in decayed}
    rest = [p for p in trainable if id(p) not in chosen]
    groups: Groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    if split_tables:
        tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        is_matrix = {id(p): p.dim() == 2 and id(p) not in tables for p in trainable}
        groups = [
            {**group, "params": [p for p in group["params"] if is_matrix[id(p)] is matrix], "matrix": matrix}
            for matrix in (True, False)
            for group in groups
        ]
    return [group for group in groups if group["params"]]


class OptimizerPair(torch.optim.Optimizer):
    """Two optimizers over different weights behind one: one ``step``, one ``state_dict``, one schedule.

    The groups and the state are the inner optimizers' own, not copies, so a learning rate set here acts there.

    >>> a, b = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    >>> pair = OptimizerPair(torch.optim.SGD([a], lr=0.1), torch.optim.AdamW([b], lr=0.2))
    >>> [group["lr"] for group in pair.param_groups]
    [0.1, 0.2]
    """

    def __init__(self, first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> None:
        self.inner = (first, second)
        super().__init__([*first.param_groups, *second.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Point the inner optimizers at this one's groups and state, which loading replaces by new objects."""
        cut = len(self.inner[0].param_groups)
        self.inner[0].param_groups = self.param_groups[:cut]
        self.inner[1].param_groups = self.param_groups[cut:]
        for optimizer in self.inner:
            optimizer.state = self.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """``ValueError`` once it is made: nothing says which of the two should step the new weights."""
        if "state" in self.__dict__ and self.inner[0].state is self.state:
            raise ValueError("a pair of optimizers takes no further group; add it to one of them, or build a new pair")
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step of both; the closure, where given, is evaluated once, before."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.inner:
            optimizer.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As every optimizer's."""
        super().load_state_dict(state_dict)
        self._share()


def _momentum_fused(groups: Groups) -> bool | None:
    """As ``_fused``, from 32 bits up: in bfloat16 the CPU kernel starts momentum from whatever is in memory (2.13)."""
    return _fused(groups) if all(p.element_size() >= 4 for group in groups for p in group["params"]) else None


def _fused(groups: Groups) -> bool | None:
    """Fused kernels read each weight once; they need floating-point weights on a CPU or a CUDA device."""
    weights: list[Tensor] = [p for group in groups for p in group["params"]]
    return all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in weights) or None


def _muon(groups: Groups, lr: float) -> torch.optim.Optimizer:
    """Muon for the matrices, AdamW for the rest."""
    if not hasattr(torch.optim, "Muon"):
        raise ValueError(f"optimizer_class=muon needs torch 2.9 or newer, this is {torch.__version__}; upgrade torch")
    hidden, rest = ([group for group in groups if group["matrix"] is wanted] for wanted in (True, False))
    if not hidden:
        raise ValueError("optimizer_class=muon needs a 2-D weight, and the model has none; use adamw")
    # match_rms_adamw: its updates have the size of AdamW's, so that one learning rate serves both.
    muon = torch.optim.Muon(hidden, lr=lr, adjust_lr_fn="match_rms_adamw")
    return OptimizerPair(muon, torch.optim.AdamW(rest, lr=lr, fused=_fused(rest))) if rest else muon


def _lion(groups: Groups, lr: float) -> torch.optim.Optimizer:
    try:
        from pytorch_optimizer import Lion
    except ImportError:
        raise ValueError(
            "optimizer_class=lion needs the package pytorch-optimizer; pip install 'safetrain-core[optim]'"
        ) from None
    return Lion(groups, lr=lr)


_BUILDERS: dict[str, Callable[[Groups, float], torch.optim.Optimizer]] = {
    "adamw": lambda groups, lr: torch.optim.AdamW(groups, lr=lr, fused=_fused(groups)),
    "adam": lambda groups, lr: torch.optim.Adam(groups, lr=lr, fused=_fused(groups)),
    "sgd_momentum": lambda groups, lr: torch.optim.SGD(
        groups, lr=lr, momentum=SGD_MOMENTUM, fused=_momentum_fused(groups)
    ),
    "adafactor": lambda groups, lr: torch.optim.Adafactor(groups, lr=lr),
    "muon": _muon,
    "lion": _lion,
    "apollo": apollo,
}

#: They treat matrices and tables of vectors in different ways.
SPLIT_TABLES = ("muon", "apollo")

#: What ``build_optimizer`` knows.
OPTIMIZERS: Sequence[str] = tuple(_BUILDERS)


def build_optimizer(
    model: nn.Module,
    optimizer_class: str,
    *,
    lr: float,
    weight_decay: float,
    galore_rank: int | None = None,
    galore_update_interval: int = 200,
    galore_scale: float = 0.25,
    galore_max_dim: int | None = None,
) -> torch.optim.Optimizer:
    """An optimizer over the trainable weights of ``model``, already on its device.

    Args:
        optimizer_class: one of ``OPTIMIZERS``. ``lion`` needs the extra ``optim``, ``apollo`` the extra ``apollo``,
            ``muon`` torch 2.9 or newer. ``apollo`` is APOLLO-Mini, of rank 1.
        lr: learning rate. weight_decay: for all but norms and biases.
        galore_rank: of GaLore around it; None = without. galore_update_interval, galore_scale, galore_max_dim: see
            ``GaLore``.

    Raises:
        ValueError: an unknown class (with the list), a package or a torch that is missing, no trainable weight.

    >>> build_optimizer(nn.Linear(2, 1), "sgd", lr=0.1, weight_decay=0.0)
    Traceback (most recent call last):
    ...
    ValueError: optimizer_class='sgd' is unknown; choose one of adamw, adam, sgd_momentum, adafactor, muon, lion, apollo
    """
    if optimizer_class not in _BUILDERS:
        raise ValueError(f"optimizer_class={optimizer_class!r} is unknown; choose one of {', '.join(OPTIMIZERS)}")
    groups = decay_groups(model, weight_decay, split_tables=optimizer_class in SPLIT_TABLES)
    if not groups:
        raise ValueError("the model has no trainable parameter (requires_grad=True); there is nothing to step")
    builder = _BUILDERS[optimizer_class]
    if galore_rank is None:
        return builder(groups, lr)
    return GaLore(
        groups,
        lambda given: builder(given, lr),
        rank=galore_rank,
        update_interval=galore_update_interval,
        scale=galore_scale,
        max_dim=galore_max_dim,
    )

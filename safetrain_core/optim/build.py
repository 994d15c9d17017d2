"""Optimizers by name: torch's own where torch has one, a well-kept library's where it has not.

Weight decay is off for biases and for the weights of normalization layers, as is usual for transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["OPTIMIZERS", "OptimizerPair", "build_optimizer", "decay_groups"]

#: Momentum of ``sgd_momentum``.
SGD_MOMENTUM = 0.9

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase, nn.LocalResponseNorm)

Groups = list[dict[str, Any]]


def decay_groups(model: nn.Module, weight_decay: float) -> Groups:
    """The trainable weights in two groups: decayed, and not (vectors, scalars and all weights of norms).

    >>> model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    >>> [(group["weight_decay"], len(group["params"])) for group in decay_groups(model, 0.1)]
    [(0.1, 1), (0.0, 3)]
    """
    of_norms = {id(p) for m in model.modules() if isinstance(m, NORMS) for p in m.parameters(recurse=False)}
    trainable = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trainable if p.dim() >= 2 and id(p) not in of_norms]
    chosen = {id(p) for p in decayed}
    rest = [p for p in trainable if id(p) not in chosen]
    groups = ({"params": decayed, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0})
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


def _fused(groups: Groups) -> bool | None:
    """Fused kernels read each weight once; they need floating-point weights on a CPU or a CUDA device."""
    weights: list[Tensor] = [p for group in groups for p in group["params"]]
    return all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in weights) or None


def _muon(model: nn.Module, groups: Groups, lr: float) -> torch.optim.Optimizer:
    """Muon for the 2-D weights, AdamW for the rest; an embedding is a table of vectors, not a matrix, so it is rest."""
    if not hasattr(torch.optim, "Muon"):
        raise ValueError(f"optimizer_class=muon needs torch 2.9 or newer, this is {torch.__version__}; upgrade torch")
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}

    def part(matrices: bool) -> Groups:
        made = [
            {**g, "params": [p for p in g["params"] if (p.dim() == 2 and id(p) not in tables) is matrices]}
            for g in groups
        ]
        return [group for group in made if group["params"]]

    # match_rms_adamw: its updates have the size of AdamW's, so that one learning rate serves both.
    hidden, rest = part(True), part(False)
    if not hidden:
        raise ValueError("optimizer_class=muon needs a 2-D weight, and the model has none; use adamw")
    muon = torch.optim.Muon(hidden, lr=lr, adjust_lr_fn="match_rms_adamw")
    return OptimizerPair(muon, torch.optim.AdamW(rest, lr=lr, fused=_fused(rest))) if rest else muon


def _lion(model: nn.Module, groups: Groups, lr: float) -> torch.optim.Optimizer:
    try:
        from pytorch_optimizer import Lion
    except ImportError:
        raise ValueError(
            "optimizer_class=lion needs the package pytorch-optimizer; pip install 'safetrain-core[optim]'"
        ) from None
    return Lion(groups, lr=lr)


_BUILDERS: dict[str, Callable[[nn.Module, Groups, float], torch.optim.Optimizer]] = {
    "adamw": lambda _, groups, lr: torch.optim.AdamW(groups, lr=lr, fused=_fused(groups)),
    "adam": lambda _, groups, lr: torch.optim.Adam(groups, lr=lr, fused=_fused(groups)),
    "sgd_momentum": lambda _, groups, lr: torch.optim.SGD(groups, lr=lr, momentum=SGD_MOMENTUM, fused=_fused(groups)),
    "adafactor": lambda _, groups, lr: torch.optim.Adafactor(groups, lr=lr),
    "muon": _muon,
    "lion": _lion,
}

#: What ``build_optimizer`` knows.
OPTIMIZERS: Sequence[str] = tuple(_BUILDERS)


def build_optimizer(model: nn.Module, optimizer_class: str, *, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """An optimizer over the trainable weights of ``model``, already on its device.

    Args:
        optimizer_class: one of ``OPTIMIZERS``. ``lion`` needs the extra ``optim``, ``muon`` torch 2.9 or newer.
        lr: learning rate. weight_decay: for all but norms and biases.

    Raises:
        ValueError: an unknown class (with the list), a package or a torch that is missing, no trainable weight.

    >>> build_optimizer(nn.Linear(2, 1), "sgd", lr=0.1, weight_decay=0.0)
    Traceback (most recent call last):
    ...
    ValueError: optimizer_class='sgd' is unknown; choose one of adamw, adam, sgd_momentum, adafactor, muon, lion
    """
    if optimizer_class not in _BUILDERS:
        raise ValueError(f"optimizer_class={optimizer_class!r} is unknown; choose one of {', '.join(OPTIMIZERS)}")
    groups = decay_groups(model, weight_decay)
    if not groups:
        raise ValueError("the model has no trainable parameter (requires_grad=True); there is nothing to step")
    return _BUILDERS[optimizer_class](model, groups, lr)

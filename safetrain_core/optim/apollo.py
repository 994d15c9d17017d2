"""APOLLO from its authors' package, with a state that a checkpoint can hold.

Source: Zhu et al. 2024, "APOLLO: SGD-like Memory, AdamW-level Performance", arXiv:2412.05270.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["apollo"]

#: Updates between two random projections, as its authors have it.
UPDATE_INTERVAL = 200

#: Factor on the update at rank 1, where one number scales the whole gradient (APOLLO-Mini).
MINI_SCALE = 128.0


def apollo(groups: list[dict[str, Any]], lr: float, *, rank: int = 1) -> torch.optim.Optimizer:
    """APOLLO over ``groups``: moments of a random projection tell how to scale the gradient, which stays full.

    Args:
        groups: as for every optimizer. Those with an option ``matrix`` that is False, and weights that are no matrix
            or have a side of ``rank`` or less, are stepped by AdamW, as its package does.
        rank: of the projection. 1 is APOLLO-Mini, one scale for the whole weight; above, one for each channel.

    Raises:
        ValueError: the package apollo-torch, or what it imports, is missing.
    """
    try:
        from apollo_torch import APOLLOAdamW
        from apollo_torch.random_projector import GradientProjector
    except ImportError as error:
        raise ValueError(
            f"optimizer_class=apollo needs the package apollo-torch ({error}); pip install 'safetrain-core[apollo]'"
        ) from None

    class APOLLO(APOLLOAdamW):  # type: ignore[misc]
        """Its projector is an object, which ``torch.load(weights_only=True)`` refuses; between steps it is a dict."""

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            for group in self.param_groups:
                for weight in group["params"]:
                    state = self.state[weight]
                    state.setdefault("seed", len(self.state))  # new, or cleared since
                    if "projector" in state:
                        state["projector"] = self._revived(group, state["projector"])
            super().step()
            for state in self.state.values():
                if "projector" in state:
                    made = state["projector"]
                    state["projector"] = {"seed": made.seed, "ortho_matrix": made.ortho_matrix}
            return loss

        @staticmethod
        def _revived(group: dict[str, Any], saved: dict[str, Any]) -> Any:
            made = GradientProjector(
                group["rank"], update_proj_gap=group["update_proj_gap"], scale=group["scale"], seed=saved["seed"]
            )
            made.ortho_matrix = saved["ortho_matrix"]
            return made

    mini = rank == 1
    options = {
        "rank": rank,
        "proj": "random",
        "proj_type": "std",
        "update_proj_gap": UPDATE_INTERVAL,
        "scale": MINI_SCALE if mini else 1.0,
        "scale_type": "tensor" if mini else "channel",
    }
    made = []
    for group in groups:
        fit = [group.get("matrix", True) and p.dim() == 2 and min(p.shape) > rank for p in group["params"]]
        for wanted, extra in ((True, options), (False, {})):
            chosen = [p for p, is_fit in zip(group["params"], fit, strict=True) if is_fit is wanted]
            if chosen:
                made.append({**group, **extra, "params": chosen})
    return APOLLO(made, lr=lr)

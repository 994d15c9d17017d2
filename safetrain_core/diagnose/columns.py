"""Which column of a log holds what, by the names that trainers and people give them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

__all__ = ["NUMBERS", "ROLES", "TEXTS", "assign", "flat_name"]

#: Role -> the names it goes by, the likeliest first; compared in lower case, with every separator as ``_``.
_NAMES = {
    "step": "step global_step _step trainer_global_step train_global_step iteration iter steps iters update "
    "num_steps batch_idx",
    "epoch": "epoch train_epoch epochs",
    "loss": "loss train_loss training_loss loss_train train_loss_step loss_step trainer_loss train_train_loss "
    "lm_loss train_lm_loss batch_loss train_loss_epoch loss_epoch",
    "val_loss": "val_loss eval_loss validation_loss valid_loss loss_val loss_validation dev_loss val_loss_epoch "
    "test_loss loss_eval eval_eval_loss",
    "lr": "learning_rate lr train_learning_rate train_lr optim_lr current_lr trainer_lr",
    "norm": "gradient_norm grad_norm pre_clip grad_norm_total gnorm train_grad_norm total_norm gradients_norm "
    "global_grad_norm grad_2_0_norm_total grad_norm_pre_clip train_gradient_norm grad_norm_before_clip "
    "gradient_norm_before_clip global_norm grad_total_norm",
    "clipped": "gradient_norm_clipped post_clip grad_norm_clipped clipped_grad_norm grad_norm_post_clip "
    "grad_norm_after_clip gradient_norm_after_clip clipped_norm",
    "scale": "scaler_scale loss_scale scale scaling_factor grad_scale amp_scale train_loss_scale scaler "
    "grad_scaler_scale train_scale loss_scaling",
    "skipped": "skipped skip overflow is_skipped step_skipped skipped_step found_inf optimizer_step_was_skipped",
    "batch_size": "effective_batch_size global_batch_size total_batch_size total_train_batch_size train_batch_size "
    "batch_size",
    "temperature": "gpu_temperature_c gpu_temp gpu_temperature temperature temp_c gpu_temp_c gpu_0_temp "
    "system_gpu_0_temp",
}
NUMBERS: dict[str, tuple[str, ...]] = {role: tuple(names.split()) for role, names in _NAMES.items()}

TEXTS: dict[str, tuple[str, ...]] = {
    "skip_reason": ("skip_reason", "reason"),
    "thermal_event": ("thermal_event",),
}

#: Everything that a log can tell here.
ROLES = (*NUMBERS, *TEXTS)


def flat_name(name: str) -> str:
    """A column's name as it is compared.

    >>> flat_name("train/Loss"), flat_name(" lr-AdamW/pg1")
    ('train_loss', 'lr_adamw_pg1')
    """
    return re.sub(r"[^a-z0-9_]+", "_", name.strip().strip("\ufeff").lower()).rstrip("_")


def assign(names: Iterable[str], wanted: Mapping[str, str] | None = None) -> dict[str, str]:
    """Role -> the column that holds it.

    Args:
        names: the log's columns, as they are. wanted: role -> column, which wins.

    Raises:
        ValueError: an unknown role, or a wanted column that the log lacks; named with the nearest.

    >>> assign(["global_step", "train/loss", "lr-AdamW", "note"])
    {'step': 'global_step', 'loss': 'train/loss', 'lr': 'lr-AdamW'}
    >>> assign(["step", "my_loss"], {"loss": "my_loss"})["loss"]
    'my_loss'
    """
    names, wanted = list(names), dict(wanted or {})
    for role, column in wanted.items():
        if role not in ROLES:
            raise ValueError(
                f"--columns {role}={column}: {role} is none of {', '.join(ROLES)}{_near(role, ROLES, told=True)}"
            )
        if column not in names:
            raise ValueError(f"--columns {role}={column}: the log has no column {column}{_near(column, names)}")
    flat: dict[str, str] = {}
    for name in names:
        flat.setdefault(flat_name(name), name)
    found: dict[str, str] = {}
    for role, usual in {**NUMBERS, **TEXTS}.items():
        known = wanted.get(role) or next((flat[name] for name in usual if name in flat), None)
        if role == "lr" and known is None:  # Lightning names it after the optimizer: lr-RAdam/pg1
            known = next((flat[name] for name in flat if name.startswith("lr_")), None)
        if known is not None and (role in wanted or known not in wanted.values()):
            found[role] = known
    return found


def _near(word: str, words: Iterable[str], *, told: bool = False) -> str:
    """The nearest of ``words``, or all of them where none is near, unless they are ``told`` already."""
    words = list(words)
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; it has {', '.join(words[:12])}" if words and not told else ""

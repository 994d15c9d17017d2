"""All rules, in the order in which they are tried."""

from __future__ import annotations

from .rule import Rule
from .rules_amp import norm_follows_scale, scale_collapsed, scale_never_moves, skip_rate
from .rules_clip import clips_every_step, loss_times_k, overfits
from .rules_log import log_is_whole, thermal_pauses
from .rules_loss import nan_stays, spike_stays
from .rules_resume import schedule_moves_on_skips, schedule_restarts
from .rules_trend import diverged, not_learning

__all__ = ["RULES"]

RULES: tuple[Rule, ...] = (
    nan_stays,
    spike_stays,
    scale_never_moves,
    norm_follows_scale,
    skip_rate,
    scale_collapsed,
    loss_times_k,
    schedule_restarts,
    schedule_moves_on_skips,
    diverged,
    clips_every_step,
    thermal_pauses,
    log_is_whole,
    overfits,
    not_learning,
)

"""One safe optimizer step under automatic mixed precision (AMP), in the order that matters.

::

    window of K micro-batches: forward under autocast, loss / K, scaled backward
    loss not finite                     -> SKIP non_finite_loss      the scale stays
    unscale, then the global norm       one pass
    norm not finite                     -> SKIP non_finite_grad      the scale halves
    clip to max_norm
    max|g| > inf_post_clip_threshold    -> SKIP post_clip_explosion  the scale stays
    optimizer step, scaler update, schedule

A skipped step leaves weights, optimizer moments, buffers and learning rate bit for bit as they were.

Source: https://docs.pytorch.org/docs/stable/notes/amp_examples.html (unscale before clipping), and
Micikevicius et al. 2018, "Mixed Precision Training", arXiv:1710.03740 (loss scaling).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed import VERDICT, world_size
from ..records import SKIP_REASONS, SkipLog, SkipRateAlert, StepLog, TrainState
from .buffers import BufferKeeper
from .clip import DEFAULT_MAX_NORM
from .gradients import all_finite, params_with_grad
from .refusals import checked_trainable, refuse_arguments, refuse_foreign_optimizer, refuse_wrong_kinds
from .scaling import LossScaling
from .verdict import GradientDetail, Limits, Verdict, judge
from .window import UNCONNECTED, LossFn, WindowPass, checked_window

__all__ = ["AmpTrainState"]

#: The verdict, in ``distributed.agree``'s code, of a rank whose weights or buffers are not finite.
NON_FINITE_STATE = 1 + SKIP_REASONS.index("non_finite_state")

#: Where autocast goes by default.
DEFAULT_AMP_DTYPE = {"cpu": torch.bfloat16, "cuda": torch.float16}


class AmpTrainState:
    """A model, its optimizer and its GradScaler, stepped safely.

    Args:
        model: any module, already on its device. Its trainable weights must not be float16 when a scaler is on.
        lr: learning rate of the default optimizer.
        max_norm: clip threshold tau for the global L2 norm; 0 = no clipping.
        device_type: "cpu", "cuda", ...: where the model is, and where autocast acts.
        weight_decay: of the default optimizer.
        amp_dtype: bfloat16 on cpu and float16 on cuda by default; ``torch.float32`` = no autocast. With float16 a
            GradScaler is on, on any device, unless weights are bfloat16, which need no scaling.
        optimizer: the optimizer to step, over this model's parameters; by default AdamW(lr, weight_decay), fused.
            Clipping covers the parameters that the optimizer holds.
        scheduler: a learning-rate schedule that advances once per optimizer step taken, never on a skip; not one that
            waits for a metric, as ReduceLROnPlateau does.
        loss_fn: ``loss_fn(output, target) -> scalar``; by default ``mse_loss`` for floating-point targets, else
            ``cross_entropy``.
        inf_post_clip_threshold: refuse the step if max|g| after the clip is above this; 0 = no check. After a clip
            to tau, max|g| <= tau: with a threshold >= tau this can only fire when clipping is off (max_norm=0).
        check_loss_before_backward: look at each loss before its backward (a host read per micro-batch, which stalls
            an accelerator). None = on a CPU only. Always off with several ranks, where a rank that left out its
            backward would hang the others. Rows, weights, moments and scale are the same either way.
        init_scale: first loss scaling factor. growth_interval: clean steps before it doubles.
        loss_weighting: "equal", each micro-batch 1/K; or "tokens", by its valid targets (those that are not -100), for
            a ``loss_fn`` that is a mean over them. Counting them costs one more host read per window.
        loss_jump_factor: refuse a step whose loss is above this x the median of the last ``loss_jump_window`` accepted
            losses, once there are as many; None = off.
        skip_rate_alert: warn when more than this share of the last ``skip_rate_window`` steps was skipped.
        keep_rows: rows kept in ``log`` and ``skip_log``; None = all.

    Attributes:
        log: every attempt, a ``StepLog`` each. skip_log: the refused ones, a ``SkipLog`` each.
        counters: a ``TrainState``: attempts, optimizer steps taken, the last accepted losses. skip_count: refused.
        detail: of the last step's gradients, where it was asked for. requests: of any rank, at the last step.
        optimizer, scheduler, model: as used.

    Raises:
        ValueError: device mismatch between model, optimizer, autocast or data; float16 weights with a scaler; an
            optimizer that holds none of the model's weights; no trainable weight; an argument of a wrong kind.

    >>> _ = torch.manual_seed(0)
    >>> state = AmpTrainState(nn.Linear(4, 1), lr=0.1)
    >>> row = state.step(torch.ones(8, 4), torch.zeros(8, 1))
    >>> row.skipped, state.counters.updates
    (False, 1)
    >>> row = state.step(torch.full((8, 4), float("inf")), torch.zeros(8, 1))
    >>> row.skip_reason, state.counters.updates, state.skip_count
    ('non_finite_loss', 1, 1)
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-2,
        max_norm: float = DEFAULT_MAX_NORM,
        device_type: str = "cpu",
        weight_decay: float = 0.01,
        amp_dtype: torch.dtype | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        loss_fn: LossFn | None = None,
        inf_post_clip_threshold: float = 10.0,
        check_loss_before_backward: bool | None = None,
        init_scale: float = 2.0**16,
        growth_interval: int = 2000,
        loss_weighting: str = "equal",
        loss_jump_factor: float | None = None,
        loss_jump_window: int = 10,
        skip_rate_alert: float = 0.05,
        skip_rate_window: int = 1000,
        keep_rows: int | None = None,
    ) -> None:
        refuse_wrong_kinds(model, amp_dtype, optimizer, scheduler, loss_fn)
        refuse_arguments(max_norm, inf_post_clip_threshold, loss_weighting, loss_jump_factor, keep_rows, scheduler)
        if amp_dtype is None and device_type not in DEFAULT_AMP_DTYPE:
            raise ValueError(
                f"no default amp_dtype for device_type={device_type!r}; pass device_type='cpu' or 'cuda', or for "
                "another device of torch also amp_dtype, torch.float32 for no autocast"
            )
        self.model = model
        self.device_type = device_type
        self.amp_dtype = amp_dtype or DEFAULT_AMP_DTYPE[device_type]
        self.limits = Limits(max_norm, inf_post_clip_threshold)
        self.loss_jump_factor, self.loss_jump_window = loss_jump_factor, loss_jump_window
        trainable = checked_trainable(model, device_type, self.amp_dtype)
        if optimizer is None:
            fused = all(p.device.type in DEFAULT_AMP_DTYPE and p.is_floating_point() for p in trainable)
            optimizer = torch.optim.AdamW(trainable, lr=lr, weight_decay=weight_decay, fused=fused or None)
        else:
            refuse_foreign_optimizer(optimizer, trainable, device_type)
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.device = trainable[0].device
        self.scaling = LossScaling(
            self.device,
            enabled=self.amp_dtype is torch.float16 and not any(p.dtype is torch.bfloat16 for p in trainable),
            init_scale=init_scale,
            growth_interval=growth_interval,
        )
        self.passes = WindowPass(model, loss_fn, device_type, self.amp_dtype, self.scaler, loss_weighting)
        if check_loss_before_backward is None:
            check_loss_before_backward = device_type == "cpu"
        self.check_loss_before_backward = check_loss_before_backward and world_size() == 1

        self.keep_rows = keep_rows
        self.log: list[StepLog] = []
        self.skip_log: list[SkipLog] = []
        self.counters = TrainState()
        self.skip_count = 0
        self.detail: GradientDetail | None = None
        self.requests = 0
        self._finite_by_design: dict[str, bool] = {}
        self.examined()
        self._alert = SkipRateAlert(skip_rate_alert, skip_rate_window)
        self.buffers = BufferKeeper(model)

    def step(self, inputs: Any, targets: Any) -> StepLog:
        """One optimizer step on one batch: ``loss_fn(model(inputs), targets)``. See ``step_window``."""
        return self.step_window([(inputs, targets)])

    def step_window(
        self,
        micro_batches: Iterable[tuple[Any, Any]],
        *,
        detail: bool = False,
        examine: bool = False,
        requests: int = 0,
    ) -> StepLog:
        """One optimizer step on K micro-batches: losses weighted, the clip once at the end, one sync between ranks.

        Args:
            micro_batches: ``(inputs, targets)`` pairs; a short last window divides by what it has.
            detail: also leave the gradients' norms in ``self.detail``.
            examine: also look for NaN and Inf in the weights and buffers themselves, before the step (one more pass and
                host read); where there is one, the step is refused as ``non_finite_state``.
            requests: what this rank asks of all, see ``distributed.agree``; ``self.requests`` is then what any asks.

        Returns:
            The row of this attempt, also appended to ``log``.

        Raises:
            ValueError: an empty window; data on another device than the model; a loss that is not a scalar or not
                connected to any weight of the optimizer. Whatever is raised before the update, model and optimizer are
                as before.
        """
        window, scale = checked_window(micro_batches), self.scale
        lr = self.lr
        self.begin_window()
        try:
            poisoned = examine and not all_finite(self.examined()).item()
            verdict = self._judge(window, detail, requests + (poisoned and NON_FINITE_STATE))
            if verdict.reason is None:
                self.scaling.take(self.optimizer)
            else:
                self.leave_no_trace(overflowed=verdict.reason == "non_finite_grad")
        except BaseException:  # a Ctrl-C too: a window that was started ends in update()
            self.leave_no_trace(overflowed=False)
            raise
        self.detail, self.requests = verdict.detail, verdict.requests
        row = self.record(verdict, lr, scale)
        if verdict.reason is None:
            self.advance_schedule()
        return row

    def examined(self) -> list[Tensor]:
        """Weights and buffers that must be finite: all but buffers that were not when first seen (a mask of -inf)."""
        known, buffers = self._finite_by_design, []
        for name, buffer in self.model.named_buffers():
            if name not in known:
                known[name] = bool(all_finite([buffer]).item())
            if known[name]:
                buffers.append(buffer)
        return [*self.model.parameters(), *buffers]

    def _judge(self, window: list[tuple[Any, Any]], detail: bool, code: int) -> Verdict:
        losses, weights = self.passes.backward(window, look_early=self.check_loss_before_backward)
        early = next((loss for loss in losses if isinstance(loss, float) and not math.isfinite(loss)), None)
        if early is not None:  # one process alone looks early
            known = code & VERDICT
            return Verdict(SKIP_REASONS[known - 1] if known else "non_finite_loss", early, requests=code - known)
        return judge(self.unscaled_params(), losses, weights, self.limits_now(), detail=detail, code=code)

    def unscaled_params(self) -> list[Tensor]:
        """The optimizer's weights that have a gradient, now unscaled: before the norm and the clip act on it."""
        held = params_with_grad(p for group in self.optimizer.param_groups for p in group["params"])
        if not held:
            raise ValueError(UNCONNECTED)
        self.scaler.unscale_(self.optimizer)
        return held

    def limits_now(self) -> Limits:
        """The limits of the next step: those that are fixed, and the largest loss that is no jump."""
        return self.limits._replace(loss=self.counters.loss_limit(self.loss_jump_factor, self.loss_jump_window))

    def begin_window(self) -> None:
        """Clear gradients, and keep the buffers in case the step is refused."""
        self.buffers.keep()
        if self.passes.flush():
            self.buffers.restore()
        self._clear_gradients()

    def leave_no_trace(self, *, overflowed: bool) -> None:
        """End a refused window: gradients cleared, buffers put back, the scaler told."""
        self._clear_gradients()
        self.buffers.restore()
        self.scaling.give_up(overflowed=overflowed)

    def _clear_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.model.zero_grad(set_to_none=True)

    def advance_schedule(self) -> None:
        """The schedule moves once per optimizer step taken."""
        if self.scheduler is not None:
            self.scheduler.step()

    def record(self, verdict: Verdict, lr: float, scale: float | None) -> StepLog:
        """Count the attempt and keep its row."""
        self.counters.step += 1
        skipped = verdict.reason is not None
        row = StepLog(
            self.counters.step, lr, verdict.pre_clip, verdict.post_clip, verdict.loss, scale, skipped, verdict.reason
        )
        self.log.append(row)
        if skipped:
            self.skip_count += 1
            self.skip_log.append(SkipLog.from_row(row))
        else:
            self.counters.accept(verdict.loss)
        if self.keep_rows is not None:
            del self.log[: -self.keep_rows], self.skip_log[: -self.keep_rows]
        self._alert.see(row.step, row.skipped)
        return row

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """The GradScaler, disabled where ``amp_dtype`` is not float16."""
        return self.scaling.scaler

    @property
    def scale(self) -> float | None:
        """The loss scaling factor that the next step will use; None without a scaler."""
        return self.scaling.factor

    def state_dict(self) -> dict[str, Any]:
        """Optimizer, scaler, schedule and counters; not the model's weights, not the rows.

        A disabled scaler's state is an empty dict.
        """
        return {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaling.state_dict(),
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
            "counters": self.counters.to_dict(),
            "skip_count": self.skip_count,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``.

        A scaler saved disabled and loaded into an enabled one leaves it as it is, and the reverse drops the saved
        factor; both are logged.

        Raises:
            ValueError: keys missing or too many, a schedule on one side only, or an optimizer of other groups;
                nothing is changed then.
        """
        expected = set(self.state_dict())
        if set(state) != expected:
            raise ValueError(f"AmpTrainState state has keys {sorted(state)}, expected {sorted(expected)}")
        if (state["scheduler"] is None) != (self.scheduler is None):
            there, here = ("without", "with") if state["scheduler"] is None else ("with", "without")
            raise ValueError(f"state was saved {there} a scheduler, and this AmpTrainState is {here} one")
        TrainState.from_dict(state["counters"])  # refuses before anything is changed
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.scaling.load_state_dict(state["scaler"])
        self.counters.load_dict(state["counters"])
        self.skip_count = state["skip_count"]

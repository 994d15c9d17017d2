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
from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..distributed import agree, world_size
from ..records import SKIP_REASONS, SkipLog, SkipRateAlert, StepLog, TrainState
from .buffers import BufferKeeper
from .gradients import (
    DEFAULT_MAX_NORM,
    exact_norm,
    global_norm_tensor,
    gradients_of,
    largest_magnitude,
    scale_to_norm,
)
from .refusals import checked_trainable, refuse_data_elsewhere, refuse_foreign_optimizer
from .scaling import LossScaling

__all__ = ["AmpTrainState"]

LossFn = Callable[[Any, Any], Tensor]

#: FP32 rounding may leave max|g| this much, relatively, above a threshold equal to the clip norm.
POST_CLIP_SLACK = 1e-3

UNCONNECTED = (
    "the loss reached no weight of the optimizer, so there is no gradient; "
    "check that loss_fn uses the model's output and that nothing detaches it"
)

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
        scheduler: a learning-rate schedule that advances once per optimizer step taken, never on a skip.
        loss_fn: ``loss_fn(output, target) -> scalar``; by default ``mse_loss`` for floating-point targets, else
            ``cross_entropy``.
        inf_post_clip_threshold: refuse the step if max|g| after the clip is above this; 0 = no check. After a clip
            to tau, max|g| <= tau: with a threshold >= tau this can only fire when clipping is off (max_norm=0).
        check_loss_before_backward: look at each loss before its backward (a host read per micro-batch, which stalls
            an accelerator). None = on a CPU only. Always off with several ranks, where a rank that left out its
            backward would hang the others. Rows, weights, moments and scale are the same either way.
        init_scale: first loss scaling factor. growth_interval: clean steps before it doubles.
        skip_rate_alert: warn when more than this share of the last ``skip_rate_window`` steps was skipped.
        keep_rows: rows kept in ``log`` and ``skip_log``; None = all.

    Attributes:
        log: every attempt, a ``StepLog`` each. skip_log: the refused ones, a ``SkipLog`` each.
        counters: a ``TrainState``: attempts, optimizer steps taken, the last accepted losses. skip_count: refused.
        optimizer, scheduler, model: as used.

    Raises:
        ValueError: device mismatch between model, optimizer, autocast or data; float16 weights with a scaler; an
            optimizer that holds none of the model's weights; no trainable weight.

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
        skip_rate_alert: float = 0.05,
        skip_rate_window: int = 1000,
        keep_rows: int | None = None,
    ) -> None:
        for name, value in (("max_norm", max_norm), ("inf_post_clip_threshold", inf_post_clip_threshold)):
            if not value >= 0:
                raise ValueError(f"{name}={value} must be at least 0 (0 = off)")
        if keep_rows is not None and keep_rows < 1:
            raise ValueError(f"keep_rows={keep_rows} must be at least 1, or None to keep all")
        if amp_dtype is None and device_type not in DEFAULT_AMP_DTYPE:
            raise ValueError(
                f"no default amp_dtype for device_type={device_type!r}; pass amp_dtype, torch.float32 for no autocast"
            )
        self.model = model
        self.max_norm = max_norm
        self.device_type = device_type
        self.amp_dtype = amp_dtype or DEFAULT_AMP_DTYPE[device_type]
        self.loss_fn = loss_fn or _default_loss
        self.inf_post_clip_threshold = inf_post_clip_threshold
        trainable = checked_trainable(model, device_type, self.amp_dtype)
        if optimizer is None:
            fused = all(p.device.type in DEFAULT_AMP_DTYPE and p.is_floating_point() for p in trainable)
            optimizer = torch.optim.AdamW(trainable, lr=lr, weight_decay=weight_decay, fused=fused or None)
        else:
            refuse_foreign_optimizer(optimizer, trainable, device_type)
        self.optimizer = optimizer
        self.scheduler = scheduler
        self._device = trainable[0].device
        self._scaling = LossScaling(
            self._device,
            enabled=self.amp_dtype is torch.float16 and not any(p.dtype is torch.bfloat16 for p in trainable),
            init_scale=init_scale,
            growth_interval=growth_interval,
        )
        if check_loss_before_backward is None:
            check_loss_before_backward = device_type == "cpu"
        self.check_loss_before_backward = check_loss_before_backward and world_size() == 1

        self.keep_rows = keep_rows
        self.log: list[StepLog] = []
        self.skip_log: list[SkipLog] = []
        self.counters = TrainState()
        self.skip_count = 0
        self._alert = SkipRateAlert(skip_rate_alert, skip_rate_window)
        self._buffers = BufferKeeper(model)

    # --- one step ---------------------------------------------------------------------------------------------

    def step(self, inputs: Any, targets: Any) -> StepLog:
        """One optimizer step on one batch: ``loss_fn(model(inputs), targets)``. See ``step_window``."""
        return self.step_window([(inputs, targets)])

    def step_window(self, micro_batches: Iterable[tuple[Any, Any]]) -> StepLog:
        """One optimizer step on K micro-batches, each loss divided by K, the clip once at the end.

        Args:
            micro_batches: ``(inputs, targets)`` pairs; a short last window divides by what it has.

        Returns:
            The row of this attempt, also appended to ``log``.

        Raises:
            ValueError: an empty window; data on another device than the model; a loss that is not a scalar or not
                connected to any weight of the optimizer. Whatever is raised, model and optimizer are as before.
        """
        window = list(micro_batches)
        if not window:
            raise ValueError("the window has 0 micro-batches; it needs at least 1 (inputs, targets) pair")
        lr, scale = float(self.optimizer.param_groups[0]["lr"]), self.scale
        self._buffers.keep()
        self._clear_gradients()
        try:
            reason, loss, pre, post = self._judge(window)
            code = agree(0 if reason is None else 1 + SKIP_REASONS.index(reason), self._device)
            reason = SKIP_REASONS[code - 1] if code else None
            if reason is None:
                self._scaling.take(self.optimizer)
                if self.scheduler is not None:
                    self.scheduler.step()
            else:
                self._leave_no_trace(overflowed=reason == "non_finite_grad")
        except BaseException:  # a Ctrl-C too: a window that was started ends in update()
            self._leave_no_trace(overflowed=False)
            raise
        self.counters.step += 1
        if reason is None:
            self.counters.accept(loss)
        row = StepLog(self.counters.step, lr, pre, post, loss, scale, reason is not None, reason)
        self._record(row)
        return row

    def _record(self, row: StepLog) -> None:
        self.log.append(row)
        if row.skipped:
            self.skip_count += 1
            self.skip_log.append(SkipLog.from_row(row))
        if self.keep_rows is not None:
            del self.log[: -self.keep_rows], self.skip_log[: -self.keep_rows]
        self._alert.see(row.step, row.skipped)

    def _judge(self, window: list[tuple[Any, Any]]) -> tuple[str | None, float, float | None, float | None]:
        """Forward, backward, unscale, norm, clip: (reason to refuse or None, loss, norm before, norm after)."""
        losses: list[Tensor] = []
        seen: list[float] = []
        for inputs, targets in window:
            loss = self.forward_loss(inputs, targets)
            if self.check_loss_before_backward:
                seen.append(float(loss.item()))
                if not math.isfinite(seen[-1]):
                    return "non_finite_loss", seen[-1], None, None
            else:
                losses.append(loss.detach())
            if not loss.requires_grad:
                raise ValueError(UNCONNECTED)
            self.scaler.scale(loss if len(window) == 1 else loss / len(window)).backward()
        grads = gradients_of(p for group in self.optimizer.param_groups for p in group["params"])
        if not grads:
            raise ValueError(UNCONNECTED)
        self.scaler.unscale_(self.optimizer)  # before the norm and the clip, or both act on scaled gradients
        with torch.no_grad():
            norm_tensor = global_norm_tensor(grads)
            wide = reduce(torch.promote_types, (t.dtype for t in losses), norm_tensor.dtype)
            # The one host read of this step, outside the optimizer's own.
            *late, norm = torch.stack([t.to(norm_tensor.device, wide) for t in (*losses, norm_tensor)]).tolist()
            seen += late
            bad = next((x for x in seen if not math.isfinite(x)), None)
            if bad is not None:
                return "non_finite_loss", bad, None, None
            loss_value = sum(seen) / len(seen)
            norm = exact_norm(grads, norm)
            if not math.isfinite(norm):
                return "non_finite_grad", loss_value, norm, None
            post = scale_to_norm(grads, norm, self.max_norm) if self.max_norm > 0 else norm
            limit = self.inf_post_clip_threshold
            # max|g| <= norm: only a norm above the threshold needs the second pass.
            if limit > 0 and post > limit and largest_magnitude(grads) > limit * (1 + POST_CLIP_SLACK):
                return "post_clip_explosion", loss_value, norm, post
        return None, loss_value, norm, post

    def forward_loss(self, inputs: Any, targets: Any) -> Tensor:
        """``loss_fn(model(inputs), targets)`` under this state's autocast: a 0-dim tensor, still on its device.

        Raises:
            ValueError: data on another device than the model, or a loss that is not a scalar.
        """
        refuse_data_elsewhere(inputs, targets, self.device_type)
        enabled = self.amp_dtype is not torch.float32
        with torch.autocast(self.device_type, dtype=self.amp_dtype if enabled else None, enabled=enabled):
            loss = self.loss_fn(self.model(inputs), targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn returned {shape}, expected a scalar tensor; reduce it, for example .mean()")
        return loss.reshape(())

    def _leave_no_trace(self, *, overflowed: bool) -> None:
        self._clear_gradients()
        self._buffers.restore()
        self._scaling.give_up(overflowed=overflowed)

    def _clear_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.model.zero_grad(set_to_none=True)

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """The GradScaler, disabled where ``amp_dtype`` is not float16."""
        return self._scaling.scaler

    @property
    def scale(self) -> float | None:
        """The loss scaling factor that the next step will use; None without a scaler."""
        return self._scaling.factor

    # --- state ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Optimizer, scaler, schedule and counters; not the model's weights, not the rows.

        A disabled scaler's state is an empty dict.
        """
        return {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self._scaling.state_dict(),
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
        counters = TrainState.from_dict(state["counters"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self._scaling.load_state_dict(state["scaler"])
        self.counters = counters
        self.skip_count = state["skip_count"]


def _default_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target) if target.is_floating_point() else F.cross_entropy(output, target)

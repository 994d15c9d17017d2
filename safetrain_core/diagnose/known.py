"""What the probes can find: each fault's severity, cause, fix and lesson, once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .finding import Evidence, Finding

__all__ = ["KNOWN", "Fault", "found"]


class Fault(NamedTuple):
    """All of a finding that does not depend on the run."""

    severity: str
    cause: str
    fix: str
    lesson: str


#: Rule -> the fault. A run with an ``error`` is broken; a ``warning`` may be meant so.
KNOWN = {
    # probe_accumulation
    "step_per_micro_batch": Fault(
        "error",
        "the optimizer steps inside the loop over micro-batches, so nothing is accumulated",
        "step once, after the last micro-batch of the window",
        "02_accumulation",
    ),
    "not_a_sum": Fault(
        "warning",
        "something acts on single micro-batches or between them: a clip, or a state that the loss keeps",
        "clip and step once, at the end of the window",
        "02_accumulation",
    ),
    "micro_batches_lost": Fault(
        "error",
        "gradients are cleared between micro-batches, or a micro-batch never gets its backward",
        "call zero_grad once per window, before its first micro-batch",
        "02_accumulation",
    ),
    "loss_not_divided": Fault(
        "error",
        "a micro-batch's loss is not divided by the number K of micro-batches, or by another K than this window has",
        "loss_scaled_for_accum, or divide each loss by the K of its own window",
        "02_accumulation",
    ),
    "loss_divided_twice": Fault(
        "error",
        "the loss is divided by K twice: in the step and in the framework around it, or also the gradients",
        "divide once",
        "02_accumulation",
    ),
    "loss_wrongly_divided": Fault(
        "error",
        "the losses are divided by something else than the number of micro-batches",
        "loss_scaled_for_accum, or divide each loss by the K of its own window",
        "02_accumulation",
    ),
    "unequal_micro_batches": Fault(
        "warning",
        "each loss is a mean over its own micro-batch, so a sample (a token) of a short one counts for more",
        "sum the losses and divide by all samples (valid tokens) of the window, as loss_weighting='tokens' does; "
        "harmless where all micro-batches hold equally many",
        "02_accumulation",
    ),
    # probe_clip_order
    "clip_before_unscale": Fault(
        "error",
        "the clip acts on gradients that are still multiplied by the loss scaling factor, so it clips every step to "
        "nearly nothing",
        "call scaler.unscale_(optimizer) before the norm and the clip",
        "01_clipping_amp",
    ),
    "clip_without_effect": Fault(
        "error",
        "there is no clip, or it runs after the optimizer step, or on other weights than the optimizer holds",
        "clip_global_l2_norm(model.parameters(), max_norm) between the last backward and the optimizer step",
        "01_clipping_amp",
    ),
    "clip_at_another_norm": Fault(
        "warning",
        "the step clips to another norm than the one given here, or twice",
        "give one max_norm, in one place",
        "01_clipping_amp",
    ),
    "clip_bends_gradient": Fault(
        "warning",
        "values or layers are clipped one by one, or single micro-batches are: small gradients gain on large ones",
        "clip by the global norm, once per window",
        "01_clipping_amp",
    ),
    "clip_below_threshold": Fault(
        "warning",
        "gradients are rescaled although their norm is below the threshold",
        "multiply by max_norm / norm only where norm > max_norm",
        "01_clipping_amp",
    ),
    # probe_skip_leaves_state_untouched
    "nan_reaches_weights": Fault(
        "error",
        "the step is taken although the loss or a gradient is not finite, and good data cannot wash a NaN out",
        "look at loss and gradients before the step and leave it out: AmpTrainState does, or a GradScaler with float16",
        "01_clipping_amp",
    ),
    "nan_reaches_moments": Fault(
        "error",
        "the step is taken although a gradient is not finite; the optimizer (Lion takes signs) hides it from the "
        "weights and keeps it in its moments for ever",
        "look at loss and gradients before the step and leave it out: AmpTrainState does",
        "01_clipping_amp",
    ),
    "skip_moves_weights": Fault(
        "error",
        "an update is made of gradients that are not its own: of zeros put in for NaN, of what is left, or by momentum "
        "and weight decay alone",
        "leave the optimizer step out; clear the gradients",
        "01_clipping_amp",
    ),
    "skip_moves_moments": Fault(
        "error",
        "the optimizer is stepped on a refused window: its moments and its step count move",
        "leave optimizer.step() out where the window is refused",
        "01_clipping_amp",
    ),
    "nan_reaches_buffers": Fault(
        "error",
        "BatchNorm and the like have taken the bad batch into their running statistics before anyone looked",
        "keep a copy of the buffers and put it back on a skip, as AmpTrainState does",
        "01_clipping_amp",
    ),
    "skip_moves_buffers": Fault(
        "warning",
        "the forward pass of a refused window stays in BatchNorm's running statistics",
        "keep a copy of the buffers and put it back on a skip, as AmpTrainState does",
        "01_clipping_amp",
    ),
    "skip_moves_schedule": Fault(
        "warning",
        "the schedule advances on a refused window, so it runs ahead of the updates taken",
        "step the schedule only where the optimizer has stepped",
        "01_clipping_amp",
    ),
    "no_scaler_update_on_skip": Fault(
        "error",
        "the way out of a refused window leaves scaler.update() out, so the factor that overflowed stays",
        "call scaler.update() in every window, refused or not",
        "01_clipping_amp",
    ),
    "bad_gradients_stay": Fault(
        "error",
        "the gradients of the refused window are still there and are added to the next window's",
        "optimizer.zero_grad(set_to_none=True) on the way out, or at the beginning of each window",
        "01_clipping_amp",
    ),
    "step_after_skip_fails": Fault(
        "error",
        "the way out of a refused window leaves something half done",
        "end each window alike: scaler.update(), gradients cleared",
        "01_clipping_amp",
    ),
    # probe_resume
    "resume_without_weights": Fault(
        "error",
        "weights or buffers after the load are not those that were saved",
        "save and load model.state_dict(); build the model before its optimizer",
        "03_checkpoint_resume",
    ),
    "resume_without_optimizer": Fault(
        "error",
        "the optimizer's moments and step counts are not in the checkpoint, or not loaded",
        "save_checkpoint and load_checkpoint, or optimizer.state_dict() in the file",
        "03_checkpoint_resume",
    ),
    "resume_without_schedule": Fault(
        "error",
        "the schedule begins anew: its position is not in the checkpoint, or not loaded",
        "save scheduler.state_dict(), and load it after the optimizer's",
        "03_checkpoint_resume",
    ),
    "resume_without_scaler": Fault(
        "warning",
        "the loss scaling factor and its growth counter are not in the checkpoint, or not loaded",
        "save scaler.state_dict()",
        "03_checkpoint_resume",
    ),
    "resume_without_rng": Fault(
        "error",
        "the random states are not in the checkpoint, or something draws from them in save, or after they were loaded",
        "save capture_rng_state() and call restore_rng_state() last",
        "03_checkpoint_resume",
    ),
    "resume_at_wrong_data": Fault(
        "error",
        "the data position is not in the checkpoint, or the loader begins its epoch anew",
        "save the position: SafeTrainer's cursor, torchdata's StatefulDataLoader, or skip the batches already seen",
        "03_checkpoint_resume",
    ),
    "resume_differs": Fault(
        "error",
        "something that the run depends on is in none of model, optimizer, schedule, scaler and random states",
        "look for what else changes in a step (averaged weights, counters, caches) and save it",
        "03_checkpoint_resume",
    ),
    "not_reproducible": Fault(
        "info",
        "two fresh runs of the same seed differ already, so a resume cannot be judged by its losses",
        "seed in make_run whatever is drawn from; on a GPU, torch.use_deterministic_algorithms(True)",
        "03_checkpoint_resume",
    ),
}


def found(rule: str, symptom: str, *evidence: Evidence, among: Mapping[str, Fault] = KNOWN) -> Finding:
    """The finding of a known fault, with what was seen.

    >>> found("loss_divided_twice", "a quarter of the gradient").severity
    'error'
    """
    fault = among[rule]
    return Finding(symptom, rule, fault.severity, evidence, fault.cause, fault.fix, fault.lesson)

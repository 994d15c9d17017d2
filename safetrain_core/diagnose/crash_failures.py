"""What only a crash tells of: severity, cause, fix and lesson of each, once."""

from __future__ import annotations

from .known import Fault

__all__ = ["CRASH_FAILURES"]

CLIPPING, ACCUMULATION, RESUME = "01_clipping_amp", "02_accumulation", "03_checkpoint_resume"
RECOMPUTE, THERMAL, RANKS = "05_gradient_checkpointing", "06_thermal_guard", "08_distributed_run"

#: Rule -> the fault, for ``known.found``.
CRASH_FAILURES = {
    "out_of_memory": Fault(
        "error",
        "in the forward or backward pass it is activations; in optimizer.step() or .to(device) the state itself",
        "the traceback above this line says where; probe_memory(step, make_model, [batch]) what takes it",
        RECOMPUTE,
    ),
    "unscale_twice": Fault(
        "error",
        "unscale_() is called twice in one window, or the way out of the last window left scaler.update() out",
        "unscale once, before the norm and the clip, and end every window, skipped or not, in scaler.update()",
        CLIPPING,
    ),
    "no_inf_checks": Fault(
        "error",
        "the scaler saw no gradient of this optimizer's weights: backward did not reach them, they belong to another "
        "optimizer, or the loss was not scaled",
        "scaler.scale(loss).backward() before scaler.step(optimizer); leave a window without gradients out of both",
        CLIPPING,
    ),
    "graph_used_twice": Fault(
        "error",
        "a second backward() goes through a graph that the first has freed: a sum of losses, or a state that is "
        "carried over from the window before",
        "detach what is carried over; one backward() for each micro-batch's own loss",
        ACCUMULATION,
    ),
    "recompute_differs": Fault(
        "error",
        "the second run of a recomputed layer is not the first: random numbers without preserve_rng_state, a global or "
        "a buffer that the first run has moved, eval() in between",
        "apply_recompute, which keeps random states, buffers and kernels; no side effects in forward()",
        RECOMPUTE,
    ),
    "other_model": Fault(
        "error",
        "the checkpoint is of a model of other sizes or names: another configuration, or saved from inside DDP "
        "(`module.`) or torch.compile (`_orig_mod.`)",
        "build the model from the configuration that it was saved with; save_checkpoint unwraps it first",
        RESUME,
    ),
    "disk_full": Fault(
        "error",
        "a save found no room; a file that is written in place is now torn, and the one before it is gone",
        "free some, keep fewer (rotate_checkpoints); atomic_save leaves the old file whole",
        RESUME,
    ),
    "collective_timeout": Fault(
        "error",
        "one rank never came to a collective that the others wait in: it skipped a step or a backward alone, has fewer "
        "batches, or has fallen",
        "decide a skip together (agree()), give every rank as many batches; look for the first rank's own error",
        RANKS,
    ),
    "rank_fell": Fault(
        "error",
        "a rank was ended from outside; without a message of its own it was mostly the kernel, out of memory",
        "look at the kernel's log for the process; fewer loader workers, or save and load shard by shard",
        RANKS,
    ),
    "retries_used": Fault(
        "error",
        "more steps went bad than max_nan_retries allows: the values themselves are the cause, not one batch",
        "resume from the checkpoint that the message names at a lower learning rate, in bfloat16, or with mended data",
        CLIPPING,
    ),
    "thermal_abort": Fault(
        "error",
        "the device passed its critical temperature, or its sensor was lost; a checkpoint was saved first",
        "look at fans, airflow and nvidia-smi; then resume from the checkpoint that the message names",
        THERMAL,
    ),
}

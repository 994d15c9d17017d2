"""What can be wrong with the memory of a step: severity, cause, fix and lesson of each, once."""

from __future__ import annotations

from .known import Fault

__all__ = ["MEMORY_FAILURES"]

ACCUMULATION, RECOMPUTE, LOW_RANK = "02_accumulation", "05_gradient_checkpointing", "07_low_rank_gradients"

#: Rule -> the fault, for ``known.found``.
MEMORY_FAILURES = {
    "weights_do_not_fit": Fault(
        "error",
        "weights, gradients and optimizer state alone need more than there is; activations are not the cause, and "
        "neither recomputation nor a smaller batch can help",
        "smaller optimizer state (GaLore, SGD), weights sharded over ranks (fully_shard), or a smaller model",
        LOW_RANK,
    ),
    "does_not_fit": Fault(
        "error",
        "the weights fit; what every layer keeps for the backward pass comes on top, and grows with the micro-batch",
        "apply_recompute(model, 'full'), or smaller micro-batches with accumulation; `safetrain plan` and "
        "plan_recompute_for say which policy fits",
        RECOMPUTE,
    ),
    "activations_dominate": Fault(
        "warning",
        "what every layer keeps for the backward pass takes most of the memory: the next larger batch, sequence or "
        "model runs out of it",
        "nothing while it fits; else apply_recompute(model, 'full'), or smaller micro-batches with accumulation; "
        "`safetrain plan` and plan_recompute_for say which policy fits",
        RECOMPUTE,
    ),
    "micro_batches_at_once": Fault(
        "warning",
        "the losses of the window are summed with their graphs, and go back once: the gradient is right, and "
        "accumulation saves no memory",
        "call backward() for each micro-batch, its loss divided by K; only where a loss needs the whole window "
        "(contrastive) must it stay",
        ACCUMULATION,
    ),
    "graph_kept": Fault(
        "error",
        "a loss or an output is stored with its graph (total += loss, outputs.append(logits)), so memory grows with "
        "each step until it is full",
        "store loss.item() or .detach(); compute what is only measured under torch.no_grad()",
        RECOMPUTE,
    ),
}

"""Recomputation: the planner's prediction against the count, policies against their promises, ckptplan beside ours."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from safetrain_core import (
    MiniGPT,
    MiniGPTConfig,
    apply_recompute,
    measure_recompute,
    plan_recompute,
    plan_recompute_for,
)
from safetrain_core.memory.count import Counter

AREA = "memory"
KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}

#: layers, width, heads, sequence, batch, vocabulary
SHAPES = [
    (2, 32, 4, 32, 2, 96),
    (4, 64, 4, 512, 1, 96),
    (6, 96, 6, 384, 1, 96),
    (8, 128, 8, 64, 4, 96),
    (12, 128, 4, 256, 1, 500),
    (16, 32, 2, 512, 1, 96),
    (16, 64, 8, 128, 2, 96),
    (16, 64, 8, 192, 2, 96),
]


def gpt(shape):
    layers, width, heads, seq, batch, vocab = shape
    torch.manual_seed(0)
    tokens = torch.randint(0, vocab, (batch, seq))
    return MiniGPT(MiniGPTConfig(vocab, seq, layers, heads, width)), (tokens, tokens)


def count(shape, policy, k=4, attention="math"):
    model, batch = gpt(shape)
    with sdpa_kernel(KERNELS[attention]):
        return measure_recompute(model, batch, policy, k, timed_runs=0)


@pytest.mark.parametrize("attention", ["flash", "math"])
def test_predicted_against_counted_peak(claim, attention):
    print(
        f"\n{attention}: predicted / counted peak bytes of activations, by layers-width-heads-sequence-batch-vocabulary"
    )
    worst_bytes = worst_flops = 0.0
    for shape in SHAPES:
        layers, width, heads, seq, batch, vocab = shape
        plan = plan_recompute(layers, width, seq, batch, heads, "float32", 10**12, attention, vocab)
        told = []
        for option in plan.options:
            if option.policy == "offload":  # a CPU keeps all on the host; tests/gpu counts it
                continue
            cost = count(shape, option.policy, option.k or 4, attention)
            ratio = option.activation_bytes / cost.activation_bytes
            worst_bytes = max(worst_bytes, abs(ratio - 1))
            worst_flops = max(worst_flops, abs(option.overhead - cost.overhead))
            told.append(f"{option.name.replace('every_k, ', '')} {cost.activation_bytes / 1e6:.2f} MB x {ratio:.3f}")
        print(f"{'-'.join(map(str, shape)):<20}", "; ".join(told))
    claim(f"predicted against counted peak bytes, {attention}, largest error", 100 * worst_bytes, "<=", 10, "%")
    claim(f"predicted - counted recompute overhead, {attention}", worst_flops, "<=", 1e-9)


def test_what_the_policies_save_and_cost(claim):
    at_128, at_192 = SHAPES[-2], SHAPES[-1]
    plain, full, sqrt = (count(at_128, policy) for policy in ("none", "full", "sqrt"))
    share = 100 / plain.activation_bytes
    kept = 100 * full.kept_bytes / plain.kept_bytes
    claim("full: bytes kept / none, math, 16 layers, seq 128", kept, "<=", 6, "%")
    claim("full: peak / none (1/16 is the floor)", full.activation_bytes * share, "<=", 14, "%")
    claim("full: FLOPs recomputed / plain step", 100 * full.overhead, "<=", 26, "%")
    claim("sqrt: peak / none", sqrt.activation_bytes * share, "<=", 30, "%")
    plain, selective = (count(at_192, policy) for policy in ("none", "selective"))
    peak = 100 * selective.activation_bytes / plain.activation_bytes
    claim("selective: peak / none, seq 192", peak, "<=", 50, "%")
    claim("selective: FLOPs recomputed / plain step", 100 * selective.overhead, "<=", 6, "%")
    plain, ops = (count(at_128, policy, attention="flash") for policy in ("none", "selective_ops"))
    claim("selective_ops: peak / none, flash", 100 * ops.activation_bytes / plain.activation_bytes, "<=", 75, "%")
    claim("selective_ops: FLOPs recomputed / plain step", 100 * ops.overhead, "<=", 0, "%")


def unequal_gpt():
    torch.manual_seed(0)
    model = MiniGPT(MiniGPTConfig(96, context=64, layers=8, heads=4, width=32))
    for block, width in zip(model.blocks, (2, 16, 4, 1, 8, 4, 12, 3), strict=True):
        block.mlp = nn.Sequential(nn.Linear(32, 32 * width), nn.GELU(), nn.Linear(32 * width, 32))
    tokens = torch.randint(0, 96, (4, 64))
    return model, (tokens, tokens)


def test_beside_ckptplan(claim):
    """Both plan the same blocks for the same budgets; both plans are run by the same engine and counted.

    On a CPU ckptplan times blocks but does not measure their bytes, and then refuses to plan. So that it can, and at
    its best, it is given exact counts: of each block's bytes as it defines them, and of FLOPs for its noisy times. Its
    budget is the sum over blocks, and leaves out the rest of the peak: it is asked both with the budget as it is, and
    with that rest taken off first.
    """
    ckptplan = pytest.importorskip("ckptplan", reason="ckptplan is not installed; make bench installs it")
    model, batch = unequal_gpt()
    x = torch.randn(4, 64, 32)
    blocks = ckptplan.declare_blocks(model, [(f"blocks.{i}", block) for i, block in enumerate(model.blocks)])
    profiles = []
    for block, profile in zip(
        blocks, ckptplan.profile_blocks(blocks, (x,), device="cpu", num_warmup=1, num_trials=2), strict=True
    ):
        with Counter(block.module, [x]) as counter:
            output = block.module(x)
        cost = measure_recompute(model, batch, [block.block_id], timed_runs=0).recompute_flops
        assert output.requires_grad
        profiles.append(
            dataclasses.replace(
                profile,
                timing_only=False,
                activation_bytes_estimate=counter.now,
                recompute_time_upper_bound_ms_mean=float(cost),
            )
        )
    plain = measure_recompute(model, batch, "none", timed_runs=0).activation_bytes
    least = plan_recompute_for(model, batch, 1).activation_bytes
    inside = sum(profile.activation_bytes_estimate for profile in profiles)
    missed, met, dearer = 0, 0, 0.0
    print(f"\nkept whole {plain / 1e6:.2f} MB, all recomputed {least / 1e6:.2f} MB; counted MB and MFLOPs recomputed")
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        budget = int(least + share * (plain - least))
        ours = plan_recompute_for(model, batch, budget)
        line = f"budget {budget / 1e6:.2f}: ours {ours.activation_bytes / 1e6:.2f} {ours.recompute_flops / 1e6:6.2f}"
        for name, target in (("as it is", budget), ("rest off", max(0, budget - (plain - inside)))):
            plan = ckptplan.plan_checkpoints(
                profiles,
                blocks,
                target_kind="activation_budget_bytes",
                target_value=target,
                activation_bucket_bytes=1024,
            )
            chosen = [decision.block_id for decision in plan.decisions if decision.checkpointed]
            theirs = measure_recompute(model, batch, chosen, timed_runs=0)
            fits = theirs.activation_bytes <= budget
            line += f" | ckptplan {name} {theirs.activation_bytes / 1e6:.2f}{'' if fits else ' over'}"
            line += f" {theirs.recompute_flops / 1e6:6.2f}"
            if fits:
                met += 1
                missed += not ours.fits
                dearer = max(dearer, ours.recompute_flops / theirs.recompute_flops if theirs.recompute_flops else 1.0)
        print(line)
    apply_recompute(model, "none")
    claim("budgets that ckptplan meets and ours does not", missed, "<=", 0, "of 10")
    claim("our recompute FLOPs / ckptplan's where it meets the budget, largest", dearer, "<=", 1.0, "x")
    claim("plans of ckptplan that met their budget", met, ">=", 1, "of 10")

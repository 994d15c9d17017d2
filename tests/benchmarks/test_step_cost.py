"""What the guard and the safe step cost, as ratios to the bare PyTorch they replace, and to two peers' loops."""

import math

import pytest
import torch
from measure import Watch, paired_ratio, ratios_to
from peer_loops import LOOPS, gpt, loss_of, tokens
from torch import nn

from safetrain_core import AmpTrainState, clip_global_l2_norm

AREA = "step"


def gradients(scale):
    """200 tensors of 250,000 floats, as gradients."""
    generator = torch.Generator().manual_seed(0)
    weights = []
    for _ in range(200):
        weight = nn.Parameter(torch.empty(250_000))
        weight.grad = torch.randn(250_000, generator=generator) * scale
        weights.append(weight)
    return weights


def per_parameter_guard(weights, max_norm):
    """The guard as it is usually written: finiteness, norm and clip, each parameter by itself."""
    if any(not torch.isfinite(w.grad).all().item() for w in weights):
        return
    norm = math.sqrt(sum(w.grad.pow(2).sum().item() for w in weights))
    factor = max_norm / (norm + 1e-12)
    if factor < 1:
        for w in weights:
            w.grad.mul_(factor)


def passes(watch, tensors):
    """Reading passes over all gradients: a fused norm each, or a span of each tensor."""
    return watch.ops["_foreach_norm"] + watch.ops["aminmax"] / tensors


def test_the_guard_where_no_clip_is_due(claim, compare):
    weights = gradients(1e-6)
    assert clip_global_l2_norm(weights, 1.0)[0] < 1
    with Watch() as watch:
        clip_global_l2_norm(weights, 1.0)
    claim("guard, no clip due: passes over the gradients", passes(watch, len(weights)), "<=", 1)
    claim("guard, no clip due: host reads", sum(watch.reads.values()), "<=", 1)
    with Watch() as watch:
        per_parameter_guard(weights, 1.0)
    compare("per-parameter guard with item(), 200 tensors: host reads", sum(watch.reads.values()))
    ratio = paired_ratio(
        lambda: clip_global_l2_norm(weights, 1.0), lambda: nn.utils.clip_grad_norm_(weights, 1.0), rounds=41
    )
    claim("guard / clip_grad_norm_, 200 x 250,000, no clip due", ratio, "<=", 0.80, "x")
    ratio = paired_ratio(
        lambda: per_parameter_guard(weights, 1.0), lambda: clip_global_l2_norm(weights, 1.0), rounds=21
    )
    claim("per-parameter guard with item() / guard, no clip due", ratio, ">=", 4.0, "x")


def test_the_guard_where_a_clip_is_due(claim):
    weights = gradients(1.0)
    limit = [4000.0]  # below the norm of about 7071, and lower at each call, so that a clip is due each time

    def lower():
        limit[0] *= 0.98
        return limit[0]

    def ours():
        pre, post = clip_global_l2_norm(weights, lower())
        assert pre > post

    with Watch() as watch:
        ours()
    claim("guard, clip due: writing passes over the gradients", watch.ops["_foreach_mul_"], "<=", 1)
    ratio = paired_ratio(ours, lambda: nn.utils.clip_grad_norm_(weights, lower()), rounds=41)
    claim("guard / clip_grad_norm_, 200 x 250,000, clip due", ratio, "<=", 1.10, "x")


def safe_step(dtype, **options):
    state = AmpTrainState(
        gpt(), 1e-3, amp_dtype=dtype, loss_fn=loss_of, check_loss_before_backward=False, keep_rows=10, **options
    )
    return lambda: state.step(*tokens()), state


def test_what_a_step_does_is_counted(claim, compare):
    bare, (safe, state) = LOOPS["bare loop"](torch.float32), safe_step(torch.float32)
    bare(), safe()
    with Watch(bare.optimizer) as theirs:
        bare()
    with Watch(state.optimizer) as ours:
        safe()
    claim("safe step: host reads", sum(ours.reads.values()), "<=", 1)
    compare("bare loop with loss.item(): host reads", sum(theirs.reads.values()))
    claim("safe step: passes over the gradients", passes(ours, len(list(state.model.parameters()))), "<=", 1)
    compare("safe step: operations dispatched", sum(ours.ops.values()))
    compare("bare loop: operations dispatched", sum(theirs.ops.values()))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_whole_step_beside_bare_pytorch_and_itself(claim, compare, precision):
    dtype = getattr(torch, precision)
    ours, bare, bare_too = safe_step(dtype)[0], LOOPS["bare loop"](dtype), LOOPS["bare loop"](dtype)
    rounds = 151 if precision == "float32" else 51
    ratios = ratios_to({"ours": ours, "same": bare_too}, bare, rounds=rounds, warmup=10)
    claim(f"safe step / bare loop, {precision}, MiniGPT 4 x 128", ratios["ours"], "<=", 1.03, "x")
    compare(f"bare loop / bare loop, {precision}: what the measurement itself is worth", ratios["same"], "x")


@pytest.mark.parametrize("peer", ["Lightning Fabric", "Accelerate"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_whole_step_beside(claim, compare, peer, precision):
    """Same model, batch, optimizer and clip; a loss that is read at each step, as each of them is used."""
    dtype = getattr(torch, precision)
    theirs = LOOPS[peer](dtype)
    ours, bare = safe_step(dtype)[0], LOOPS["bare loop"](dtype)
    for _ in range(3):
        losses = [theirs(), bare(), ours().loss]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[2] == pytest.approx(losses[1], rel=1e-3), "the three train alike"
    rounds = 101 if precision == "float32" else 31
    ratios = ratios_to({"ours": ours, "bare": bare}, theirs, rounds=rounds, warmup=7)
    claim(f"safe step / {peer} loop, {precision}", ratios["ours"], "<=", 1.03, "x")
    compare(f"bare loop / {peer} loop, {precision}", ratios["bare"], "x")


@pytest.mark.parametrize("name", [*LOOPS, "safe step"])
def test_one_infinite_gradient_in(claim, compare, name):
    """How many of the weights are no numbers any more after one step whose gradient was infinite in one of them."""
    if name == "safe step":
        step, state = safe_step(torch.float32)
        model = state.model
    else:
        step = LOOPS[name](torch.float32)
        model = step.model
    handle = model.head.weight.register_hook(lambda grad: grad * math.inf)
    stops = ""
    try:
        step()
    except RuntimeError:  # "The total norm ... is non-finite"
        stops = ", which stops the run"
    handle.remove()
    lost = sum(not bool(torch.isfinite(p).all()) for p in model.parameters())
    if name == "safe step":
        claim("weights ruined by one infinite gradient: safe step, which goes on", lost, "<=", 0)
        assert math.isfinite(step().loss)
    else:
        compare(f"weights ruined by one infinite gradient: {name}{stops}", lost)

"""What the guard and the safe step cost, as ratios to the bare PyTorch they replace."""

import math
import subprocess
import sys

import torch
from measure import Watch, paired_ratio
from torch import nn

from safetrain_core import AmpTrainState, MiniGPT, MiniGPTConfig, clip_global_l2_norm, next_token_loss


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


def test_guard_against_clip_grad_norm_where_no_clip_is_due(claim):
    weights = gradients(1e-6)
    assert clip_global_l2_norm(weights, 1.0)[0] < 1
    ratio = paired_ratio(
        lambda: clip_global_l2_norm(weights, 1.0), lambda: nn.utils.clip_grad_norm_(weights, 1.0), rounds=41
    )
    claim("guard / clip_grad_norm_, 200 x 250,000, no clip due", ratio, "<=", 0.80)


def test_guard_against_clip_grad_norm_where_a_clip_is_due(claim):
    weights = gradients(1.0)
    limit = [4000.0]  # below the norm of about 7071, and lower at each call, so that a clip is due each time

    def lower():
        limit[0] *= 0.98
        return limit[0]

    def ours():
        pre, post = clip_global_l2_norm(weights, lower())
        assert pre > post

    ratio = paired_ratio(ours, lambda: nn.utils.clip_grad_norm_(weights, lower()), rounds=41)
    claim("guard / clip_grad_norm_, 200 x 250,000, clip due", ratio, "<=", 1.10)


def test_per_parameter_guard_against_ours(claim):
    weights = gradients(1e-6)
    ratio = paired_ratio(
        lambda: per_parameter_guard(weights, 1.0), lambda: clip_global_l2_norm(weights, 1.0), rounds=21
    )
    claim("per-parameter guard with item() / guard", ratio, ">=", 4.0)


def gpt():
    torch.manual_seed(0)
    return MiniGPT(MiniGPTConfig(vocab_size=96, context=64, layers=4, heads=4, width=128))


def bare_loop(model, ids):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = next_token_loss(model(ids[:, :-1]), ids[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step, optimizer


def test_whole_step_against_the_bare_loop(claim):
    ids = torch.randint(0, 96, (4, 65), generator=torch.Generator().manual_seed(0))
    bare, optimizer = bare_loop(gpt(), ids)
    bare_too, _ = bare_loop(gpt(), ids)
    state = AmpTrainState(
        gpt(), 1e-3, amp_dtype=torch.float32, loss_fn=next_token_loss, check_loss_before_backward=False, keep_rows=10
    )

    def safe():
        state.step(ids[:, :-1], ids[:, 1:])

    with Watch(optimizer) as theirs:
        bare()
    safe()
    with Watch(state.optimizer) as ours:
        safe()
    print(f"\noperations per step: ours {sum(ours.ops.values())}, bare loop {sum(theirs.ops.values())}")
    print(f"host reads per step: ours {sum(ours.reads.values())}, bare loop {sum(theirs.reads.values())}")
    extra = {op: n - theirs.ops[op] for op, n in ours.ops.items() if n != theirs.ops[op]}
    print(f"more or fewer of: {extra}, not in ours: {set(theirs.ops) - set(ours.ops)}")
    print(f"the bare loop against itself: {paired_ratio(bare, bare_too, rounds=101, warmup=10):.3f}")
    claim("safe step / bare loop, MiniGPT 4 x 128, 4 x 64", paired_ratio(safe, bare, rounds=201, warmup=10), "<=", 1.03)


def test_import_time(claim):
    code = "import time, torch; s = time.perf_counter(); import safetrain_core; print(time.perf_counter() - s)"
    seconds = sorted(
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(5)
    )
    claim("import safetrain_core after torch, s", seconds[2], "<=", 0.1)

"""Counts: against torch's own counters, against closed forms, repeatable, and leaving no trace."""

import pytest
import torch
from recompute_cases import POLICIES, gpt, gpt_loss, ids, normed, plain_stack, vectors
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from safetrain_core import (
    MiniGPT,
    MiniGPTConfig,
    apply_recompute,
    checkpoint_cost,
    measure_recompute,
    next_token_loss,
    optimal_segment,
)
from safetrain_core.memory.count import Counter


def big(layers=16, seq=128, **changes):
    torch.manual_seed(0)
    return MiniGPT(MiniGPTConfig(96, context=seq, layers=layers, heads=8, width=64, **changes))


def batch_of(model, rows=2):
    tokens = torch.randint(0, 96, (rows, model.config.context), generator=torch.Generator().manual_seed(0))
    return tokens, tokens


def counted(model, policy, k=4, kernel=SDPBackend.MATH):
    with sdpa_kernel(kernel):
        return measure_recompute(model, batch_of(model), policy, k, timed_runs=0)


@pytest.mark.parametrize(("policy", "k"), [("none", 4), *POLICIES])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_flops_are_those_of_torchs_flop_counter(policy, k, dropout):
    """With the math kernel: torch's counter knows no formula for the CPU's fused one."""
    model = apply_recompute(gpt(dropout), policy, k)
    with sdpa_kernel(SDPBackend.MATH):
        ours = measure_recompute(model, (ids(), ids()), timed_runs=0)
        with FlopCounterMode(display=False) as torchs:
            gpt_loss(model).backward()
    assert ours.forward_flops + ours.backward_flops + ours.recompute_flops == torchs.get_total_flops() > 0


def test_the_cpus_fused_attention_counts_as_torch_counts_a_gpus():
    q = torch.ones(2, 3, 5, 4, requires_grad=True)
    with Counter(nn.Linear(1, 1), [q]) as counter:
        mixed = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        counter.phase = "backward"
        mixed.sum().backward()
    square = 2 * 2 * 3 * 5 * 5 * 4
    assert counter.flops == {"forward": 2 * square, "backward": 5 * square}


@pytest.mark.parametrize(("policy", "k"), [("none", 4), *POLICIES])
def test_the_peak_is_that_of_torchs_memory_tracker(policy, k):
    model = apply_recompute(gpt(), policy, k)
    ours = measure_recompute(model, (ids(), ids()), timed_runs=0)
    tokens = ids()
    tracker = MemTracker()
    tracker.track_external(model, tokens)
    with tracker:
        next_token_loss(model(tokens), tokens).backward()
    (peak,) = [device["Total"] for device in tracker.get_tracker_snapshot("peak").values()]
    weights = sum(p.untyped_storage().nbytes() for p in model.parameters())
    assert ours.step_bytes == peak - weights - tokens.untyped_storage().nbytes()


def test_bytes_kept_are_the_closed_form_of_a_stack_of_products():
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    batch = torch.ones(16, 8), torch.ones(16, 8)
    cost = measure_recompute(model, batch, "none", loss_fn=lambda out, _: out.square().sum(), timed_runs=0)
    value = 16 * 8 * 4
    assert cost.kept_bytes == 4 * value + 4  # each layer's output, and the loss
    assert cost.parameter_bytes == cost.gradient_bytes == 4 * 64 * 4
    assert (cost.forward_flops, cost.backward_flops) == (4 * 2 * 16 * 64, 7 * 2 * 16 * 64)  # the input needs none


@pytest.mark.parametrize("policy", ["none", "full", "sqrt", "selective", "selective_ops", "offload"])
def test_a_count_repeats_exactly(policy):
    first, second = (measure_recompute(gpt(), (ids(), ids()), policy, timed_runs=0) for _ in range(2))
    assert first == second
    model = gpt()
    assert measure_recompute(model, (ids(), ids()), policy, timed_runs=0) == first
    assert measure_recompute(model, (ids(), ids()), policy, timed_runs=0) == first


def test_fake_tensors_count_the_same_as_real_ones():
    with FakeTensorMode():
        fake = big(layers=3, dropout=0.1)
        tokens = torch.zeros(2, 128, dtype=torch.int64)
    for policy in ("none", "full", "sqrt", "selective", "selective_ops"):
        assert measure_recompute(fake, (tokens, tokens), policy) == measure_recompute(
            big(layers=3, dropout=0.1), batch_of(fake), policy, timed_runs=0
        )


def test_measuring_leaves_no_trace():
    model = apply_recompute(plain_stack(normed), "every_k", 2)
    model[1].eval()
    model[0][0].weight.grad = torch.ones(6, 6)
    wrappers = [vars(m).get("forward") for m in model.modules()]
    flags = [m.training for m in model.modules()]
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    torch.manual_seed(3)
    random = torch.get_rng_state()
    for policy in (None, "full", "offload", ["2"]):
        assert measure_recompute(model, (vectors(), vectors()), policy, timed_runs=2).seconds > 0
    assert [vars(m).get("forward") for m in model.modules()] == wrappers
    assert [m.training for m in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())
    assert torch.equal(model[0][0].weight.grad, torch.ones(6, 6))
    assert model[0][0].bias.grad is None


def test_a_failing_step_leaves_no_trace_either():
    model = plain_stack(normed)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        measure_recompute(model, (torch.ones(4, 5), torch.ones(4, 6)), "full")
    assert not any("forward" in vars(m) for m in model.modules())
    with pytest.raises(ValueError, match="timed_runs=-1"):
        measure_recompute(model, (vectors(), vectors()), timed_runs=-1)


def test_without_a_policy_the_model_is_counted_as_it_is():
    model = apply_recompute(gpt(), "full")
    batch = ids(), ids()
    assert measure_recompute(model, batch, timed_runs=0) == measure_recompute(gpt(), batch, "full", timed_runs=0)


# --- what the policies save and cost, with the kernel that keeps its scores ------------------------------------------


def test_full_keeps_at_most_6_percent_and_recomputes_at_most_26():
    plain, full = counted(big(), "none"), counted(big(), "full")
    assert full.kept_bytes <= 0.06 * plain.kept_bytes
    # The peak has one of 16 layers' insides in it, 1/16 at the very least, and that layer's gradients.
    assert full.activation_bytes <= 0.14 * plain.activation_bytes
    assert 0.22 <= full.overhead <= 0.26
    assert (full.forward_flops, full.backward_flops) == (plain.forward_flops, plain.backward_flops)


def test_without_early_stop_full_costs_the_textbooks_third():
    with set_checkpoint_early_stop(False):
        cost = counted(big(), "full")
    assert cost.overhead == pytest.approx(checkpoint_cost(16)["overhead_vs_no_ckpt"], abs=0.005)


def test_sqrt_peaks_at_most_at_30_percent():
    plain, cost = counted(big(), "none"), counted(big(), "sqrt")
    assert cost == counted(big(), "every_k", optimal_segment(16))
    assert cost.activation_bytes <= 0.30 * plain.activation_bytes


def test_selective_peaks_at_most_at_half_for_6_percent():
    plain, cost = counted(big(seq=192), "none"), counted(big(seq=192), "selective")
    assert cost.activation_bytes <= 0.50 * plain.activation_bytes
    assert 0 < cost.overhead <= 0.06


def test_with_a_fused_kernel_selective_saves_next_to_nothing_and_selective_ops_a_quarter_for_no_flops():
    plain, core, ops = (
        counted(big(), p, kernel=SDPBackend.FLASH_ATTENTION) for p in ("none", "selective", "selective_ops")
    )
    assert core.activation_bytes > 0.97 * plain.activation_bytes
    assert ops.activation_bytes < 0.75 * plain.activation_bytes
    assert ops.recompute_flops == 0


def test_memory_rises_with_the_segment_where_a_boundary_is_cheap():
    """The textbook's knee at sqrt(L) is not there: a boundary is a sixteenth of a layer."""
    plain = counted(big(), "none", kernel=SDPBackend.FLASH_ATTENTION)
    costs = [counted(big(), "every_k", k, kernel=SDPBackend.FLASH_ATTENTION) for k in (1, 2, 4, 8, 16)]
    shares = [cost.activation_bytes / plain.activation_bytes for cost in costs]
    assert shares == pytest.approx([0.14, 0.17, 0.28, 0.51, 1.0], abs=0.01)
    assert [cost.overhead for cost in costs] == sorted(cost.overhead for cost in costs)


def test_offload_counts_what_would_wait_on_the_host_and_on_another_device_takes_it_off_this_one():
    assert counted(big(), "offload").activation_bytes == counted(big(), "none").activation_bytes
    assert counted(big(), "offload").host_bytes > 0 == counted(big(), "full").host_bytes
    with FakeTensorMode(), torch.device("meta"):  # a device that is not the host, without needing one
        fake = big()
        tokens = torch.zeros(2, 128, dtype=torch.int64)
    plain, cost = (measure_recompute(fake, (tokens, tokens), policy) for policy in ("none", "offload"))
    assert cost.activation_bytes < 0.2 * plain.activation_bytes
    assert cost.host_bytes > 0.9 * plain.kept_bytes
    assert cost.recompute_flops == 0


@pytest.mark.parametrize("batch", [torch.ones(2, 4), torch.ones(16, 4), (torch.ones(2, 4),)])
def test_a_batch_without_targets_is_refused_not_cut_in_two(batch):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"batch must be a tuple \(inputs, targets\)"):
        measure_recompute(model, batch)


def test_a_model_that_answers_with_a_tuple_needs_a_loss_fn_and_is_told_so():
    class Answering(torch.nn.Sequential):
        def forward(self, x):
            return (super().forward(x),)

    model, batch = Answering(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), (torch.ones(2, 4), torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"the model's output is a tuple.*pass loss_fn"):
        measure_recompute(model, batch)
    cost = measure_recompute(model, batch, loss_fn=lambda output, y: torch.nn.functional.mse_loss(output[0], y))
    assert cost.activation_bytes > 0

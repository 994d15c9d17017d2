"""Recomputation on a real GPU: one short script, skipped where there is none. `pytest tests/gpu -q -s`"""

import copy

import pytest
import torch
from recompute_cases import POLICIES, outcome, same
from torch.nn.attention import SDPBackend, sdpa_kernel

from safetrain_core import (
    MiniGPT,
    MiniGPTConfig,
    apply_recompute,
    measure_recompute,
    next_token_loss,
    plan_recompute,
    plan_recompute_for,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")

#: layers, width, heads, sequence, batch, vocabulary: some GB of activations, so that workspaces do not matter
SHAPE = (16, 1024, 16, 1024, 8, 8192)


def gpt(shape, dtype=torch.float32, dropout=0.0):
    layers, width, heads, seq, batch, vocab = shape
    torch.manual_seed(0)
    model = MiniGPT(MiniGPTConfig(vocab, seq, layers, heads, width, dropout)).to("cuda", dtype)
    tokens = torch.randint(0, vocab, (batch, seq), device="cuda")
    return model, (tokens, tokens)


def gpu_outcome(model, batch, autocast):
    def losses(net):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = next_token_loss(net(batch[0]), batch[1])
        loss.backward()
        return [loss]

    torch.cuda.manual_seed(5)
    told = outcome(model, losses)
    return {**told, "gpu random": torch.cuda.get_rng_state()}


@pytest.mark.parametrize(("policy", "k"), POLICIES)
@pytest.mark.parametrize(("dropout", "autocast"), [(0.0, False), (0.2, False), (0.2, True)])
def test_gradients_and_random_states_are_those_of_the_plain_run(policy, k, dropout, autocast):
    """Bit for bit wherever the plain run repeats itself; some GPU kernels add in no fixed order."""
    model, batch = gpt((5, 64, 4, 64, 3, 96), dropout=dropout)
    first, second, again = (copy.deepcopy(model) for _ in range(3))
    plain = gpu_outcome(first, batch, autocast)
    wavers = same(plain, gpu_outcome(second, batch, autocast))
    ours = gpu_outcome(apply_recompute(again, policy, k), batch, autocast)
    assert [name for name in same(plain, ours) if name not in wavers] == []
    for name in wavers:
        torch.testing.assert_close(ours[name], plain[name], rtol=1e-3, atol=1e-5)


def test_the_allocator_saw_what_was_counted_and_what_was_predicted():
    model, batch = gpt(SHAPE, torch.bfloat16)
    layers, width, heads, seq, rows, vocab = SHAPE
    plan = plan_recompute(layers, width, seq, rows, heads, torch.bfloat16, 10**12, "flash", vocab)
    print(f"\n{torch.cuda.get_device_name()}: GB of activations predicted, counted; with gradients counted, allocated")
    wrong = []
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        measure_recompute(model, batch, "none")  # the libraries' workspaces come with the first step
        for option in plan.options:
            cost = measure_recompute(model, batch, option.policy, option.k or 4, timed_runs=2)
            figures = (option.activation_bytes, cost.activation_bytes, cost.step_bytes, cost.cuda_bytes)
            told = " ".join(f"{figure / 1e9:8.3f}" for figure in figures)
            print(f"{option.name:<15} {told}  FLOPs {option.overhead:+.3f} {cost.overhead:+.3f}  {cost.seconds:.4f} s")
            if abs(cost.cuda_bytes / cost.step_bytes - 1) > 0.10:
                wrong.append(f"{option.name}: allocated {cost.cuda_bytes}, counted {cost.step_bytes}")
            if abs(option.activation_bytes / cost.activation_bytes - 1) > 0.10:
                wrong.append(f"{option.name}: predicted {option.activation_bytes}, counted {cost.activation_bytes}")
    assert not wrong


def test_offload_moves_what_is_kept_to_the_host_and_brings_it_back():
    model, batch = gpt((8, 256, 8, 256, 4, 96))
    plain, cost = (measure_recompute(model, batch, policy) for policy in ("none", "offload"))
    assert cost.activation_bytes < 0.35 * plain.activation_bytes
    assert cost.cuda_bytes < 0.5 * plain.cuda_bytes
    assert cost.host_bytes > 0.8 * plain.kept_bytes


def test_a_plan_for_a_model_in_hand_fits_by_the_allocator():
    model, batch = gpt((12, 512, 8, 512, 8, 96), torch.bfloat16)
    plain = measure_recompute(model, batch, "none").activation_bytes
    plan = plan_recompute_for(model, batch, plain // 2, headroom=0.1)
    assert plan.fits
    assert 0 < len(plan.layers) < 12
    cost = measure_recompute(model, batch, plan.layers, timed_runs=2)
    assert cost.cuda_bytes - cost.gradient_bytes <= plain // 2


def test_measuring_leaves_the_gpus_random_state_alone():
    model, batch = gpt((2, 64, 4, 64, 2, 96), dropout=0.2)
    before = torch.cuda.get_rng_state()
    measure_recompute(model, batch, "every_k", 2)
    assert torch.equal(torch.cuda.get_rng_state(), before)

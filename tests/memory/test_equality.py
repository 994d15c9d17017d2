"""Recomputation changes no bit: gradients, losses, buffers and random state, for every policy."""

import functools
import itertools

import pytest
import torch
from recompute_cases import (
    LAYER_POLICIES,
    POLICIES,
    OddLoop,
    TwoStreams,
    WithKwargs,
    dense,
    differences,
    gpt,
    gpt_loss,
    made,
    normed,
    outcome,
    plain_stack,
    same,
    spectral,
    vectors,
)
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from safetrain_core import apply_recompute


def backward(*losses):
    for loss in losses:
        loss.backward()
    return losses


def squares(model, x):
    return backward(model(x).square().sum())


@pytest.mark.parametrize(("policy", "k"), POLICIES)
@pytest.mark.parametrize("early_stop", [True, False])
def test_a_gpt_with_dropout(policy, k, early_stop):
    with set_checkpoint_early_stop(early_stop):
        assert differences(gpt(), lambda m: backward(gpt_loss(m)), policy, k) == []


@pytest.mark.parametrize(("policy", "k"), POLICIES)
def test_a_gpt_whose_attention_has_no_dropout_and_so_a_fused_kernel(policy, k):
    assert differences(gpt(dropout=0.0), lambda m: backward(gpt_loss(m)), policy, k) == []


@pytest.mark.parametrize(("policy", "k"), LAYER_POLICIES)
def test_layers_with_keyword_arguments(policy, k):
    inputs = lambda: (vectors(True),)  # noqa: E731
    assert differences(made(WithKwargs), squares, policy, k, inputs) == []


@pytest.mark.parametrize(("policy", "k"), LAYER_POLICIES)
def test_layers_with_several_inputs_and_outputs(policy, k):
    assert differences(made(TwoStreams), squares, policy, k, lambda: (vectors(True),)) == []


@pytest.mark.parametrize(("policy", "k"), LAYER_POLICIES)
def test_a_loop_that_does_odd_things_between_its_layers(policy, k):
    assert differences(made(OddLoop), squares, policy, k, lambda: (vectors(True),)) == []


@pytest.mark.parametrize(("policy", "k"), LAYER_POLICIES)
@pytest.mark.parametrize("frozen", [False, True])
def test_an_input_that_needs_no_gradient_and_frozen_layers(policy, k, frozen):
    model = plain_stack(dense)
    if frozen:
        model[0].requires_grad_(False)
        model[3].requires_grad_(False)
    assert differences(model, squares, policy, k, lambda: (vectors(),)) == []


@pytest.mark.parametrize(("policy", "k"), POLICIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(policy, k, dtype):
    def step(model):
        with torch.autocast("cpu", dtype=dtype):
            loss = gpt_loss(model)
        return backward(loss)  # the second run is outside the context

    assert differences(gpt(), step, policy, k) == []


@pytest.mark.parametrize(("policy", "k"), POLICIES)
def test_accumulation_over_micro_batches(policy, k):
    def one_after_the_other(model):
        return [backward(gpt_loss(model, seed) / 3)[0] for seed in range(3)]

    def all_forward_first(model):
        return backward(*[gpt_loss(model, seed) / 3 for seed in range(3)])

    def in_one_loss(model):
        return backward(sum(gpt_loss(model, seed) for seed in range(3)) / 3)

    for step in (one_after_the_other, all_forward_first, in_one_loss):
        assert differences(gpt(), step, policy, k) == []


@pytest.mark.parametrize(("policy", "k"), LAYER_POLICIES)
@pytest.mark.parametrize("kind", [normed, spectral])
def test_buffers_that_the_forward_moves_move_once(policy, k, kind):
    """BatchNorm's statistics; and spectral norm's vectors, on which the output depends."""

    def three_steps(model, x):
        return backward(*[model(x * i).square().sum() for i in (1, 2, 3)])

    assert differences(plain_stack(kind), three_steps, policy, k, lambda: (vectors(True),)) == []


def test_a_frozen_batch_norm_inside_a_training_layer():
    model = plain_stack(normed)
    model[1][1].eval()
    for policy, k in LAYER_POLICIES:
        assert differences(model, squares, policy, k, lambda: (vectors(),)) == []


@pytest.mark.parametrize(("policy", "k"), [case for case in LAYER_POLICIES if case[0] != "selective_ops"])
def test_a_graph_that_is_kept_and_walked_twice(policy, k):
    def twice(model, x):
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return [loss]

    assert differences(plain_stack(normed), twice, policy, k, lambda: (vectors(True),)) == []


def test_selective_ops_refuses_a_second_walk_rather_than_compute_something_else():
    loss = apply_recompute(plain_stack(dense), "selective_ops")(vectors()).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward an extra time"):
        loss.backward()


@pytest.mark.parametrize(("policy", "k"), LAYER_POLICIES)
def test_a_part_of_the_graph_walked_alone(policy, k):
    def two_ends(model, x):
        middle = model[:3](x)
        end = model[3:](middle)
        middle.sum().backward(retain_graph=True)
        return backward(end.square().sum())

    if policy != "selective_ops":
        assert differences(plain_stack(dense), two_ends, policy, k, lambda: (vectors(True),)) == []

    def gradient_of_the_input_only(model, x):
        (x.grad,) = torch.autograd.grad(model(x).square().sum(), x)
        return [x.grad.sum()]

    assert differences(plain_stack(dense), gradient_of_the_input_only, policy, k, lambda: (vectors(True),)) == []


@pytest.mark.parametrize(("policy", "k"), POLICIES)
def test_the_attention_kernel_of_the_forward_is_that_of_the_second_run(policy, k):
    """``sdpa_kernel`` around the forward alone: without care the second run takes another kernel."""

    def step(model):
        with sdpa_kernel(SDPBackend.MATH):
            loss = gpt_loss(model)
        return backward(loss)

    assert differences(gpt(dropout=0.0), step, policy, k) == []
    assert torch.backends.cuda.flash_sdp_enabled()


def test_any_subset_of_layers_by_name():
    names = [f"blocks.{i}" for i in range(5)]
    for subset in itertools.chain.from_iterable(itertools.combinations(names, n) for n in (0, 1, 2, 5)):
        assert differences(gpt(), lambda m: backward(gpt_loss(m)), subset) == []


def test_a_convolutional_stack():
    def block(i):
        return nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.SiLU(inplace=True))

    def images():
        return (torch.randn(2, 2, 6, 6, generator=torch.Generator().manual_seed(0)).requires_grad_(),)

    for policy, k in LAYER_POLICIES:
        assert differences(plain_stack(block), squares, policy, k, images) == []


def test_torchs_own_transformer_encoder():
    def encoder():
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def sequences():
        return (torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0)).requires_grad_(),)

    for policy, k in LAYER_POLICIES:
        assert differences(made(encoder), squares, policy, k, sequences) == []


def test_the_comparison_sees_a_second_run_with_other_dropout():
    def careless(model):
        for block in model.blocks:
            block.forward = functools.partial(
                checkpoint, type(block).forward, block, use_reentrant=False, preserve_rng_state=False
            )
        return model

    plain = outcome(gpt(), lambda m: backward(gpt_loss(m)))
    assert same(plain, outcome(careless(gpt()), lambda m: backward(gpt_loss(m)))) != []

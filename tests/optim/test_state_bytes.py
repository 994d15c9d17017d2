"""Bytes of optimizer state: counted in closed form, and predicted before training."""

import pytest
import torch
from galore_cases import adamw, skip_if_missing, train, weights
from torch import nn

from safetrain_core import GaLore, MiniGPT, MiniGPTConfig, optimizer_state_bytes, predict_state_bytes
from safetrain_core.optim.build import OPTIMIZERS, build_optimizer


@pytest.mark.parametrize("rank", [1, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adamw_at_a_rank_holds_two_projected_moments_a_basis_and_a_step_count(rank, dtype):
    params = weights((8, 20), (20, 8), (8, 8), (5,), dtype=dtype)
    optimizer = GaLore(params, adamw, rank=rank)
    train(params, optimizer, 3)
    numbers = 2 * (rank * 20 + 20 * rank + rank * 8 + 5) + 3 * 8 * rank
    assert optimizer_state_bytes(optimizer) == numbers * dtype.itemsize + 4 * 4
    assert predict_state_bytes(params, adamw, rank=rank) == optimizer_state_bytes(optimizer)


def test_a_view_counts_as_what_it_keeps_alive_once_and_objects_are_looked_into():
    class Projector:
        def __init__(self, matrix):
            self.rank, self.matrix = 2, matrix

    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    whole = torch.zeros(10, 10)
    optimizer.state[weight] = {"a": whole[:1], "b": Projector(whole[:, :2]), "c": [torch.zeros(3)], "d": 7}
    assert optimizer_state_bytes(optimizer) == 400 + 12


@pytest.mark.parametrize("rank", [None, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_prediction_is_what_is_counted_after_an_update(name, rank):
    skip_if_missing(name)
    torch.manual_seed(0)
    model = MiniGPT(MiniGPTConfig(vocab_size=20, context=8, layers=2, heads=2, width=16))
    optimizer = build_optimizer(model, name, lr=0.01, weight_decay=0.1, galore_rank=rank)
    # The groups with their options, and the factory that the name stands for.
    from safetrain_core.optim.build import _BUILDERS

    groups = [dict(group) for group in optimizer.param_groups]
    predicted = predict_state_bytes(groups, lambda given: _BUILDERS[name](given, 0.01), rank=rank)
    assert not optimizer.state or name == "apollo"
    for weight in model.parameters():
        weight.grad = torch.randn(weight.shape)
    optimizer.step()
    assert predicted == optimizer_state_bytes(optimizer)


def test_the_prediction_follows_max_dim_and_exclude_and_touches_no_weight():
    params = weights((8, 40), (8, 20), (20, 8))
    before = [weight.detach().clone() for weight in params]
    options = {"rank": 3, "max_dim": 30, "exclude": [params[2]]}
    predicted = predict_state_bytes(params, adamw, **options)
    assert all(weight.grad is None and torch.equal(weight, was) for weight, was in zip(params, before, strict=True))
    optimizer = GaLore(params, adamw, **options)
    train(params, optimizer, 1)
    assert predicted == optimizer_state_bytes(optimizer)


def test_for_eight_weights_of_512_by_1024_at_rank_64_moments_are_an_eighth():
    params = [nn.Parameter(torch.zeros(512, 1024)) for _ in range(8)]
    plain = predict_state_bytes(params, adamw)
    steps, bases = 8 * 4, 8 * 512 * 64 * 4
    ours = predict_state_bytes(params, adamw, rank=64)
    assert (ours - bases - steps) / (plain - steps) == 0.125
    assert bases / (plain - steps) == 0.03125

"""APOLLO from its own package, where it is installed."""

import copy

import pytest
import torch
from galore_cases import same, skip_if_missing, train, weights

from safetrain_core import GaLore, optimizer_state_bytes
from safetrain_core.optim.apollo import apollo


@pytest.fixture(autouse=True)
def _installed():
    skip_if_missing("apollo")


@pytest.mark.parametrize("rank", [1, 4])
def test_it_is_the_packages_own_and_its_state_is_plain(rank, tmp_path):
    from apollo_torch import APOLLOAdamW

    ours, theirs = weights((8, 12), (12, 8), (5,)), weights((8, 12), (12, 8), (5,))
    optimizer = apollo([{"params": ours, "weight_decay": 0.1}], lr=0.01, rank=rank)
    options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    plain = {key: options[key] for key in ("lr", "weight_decay")}
    reference = APOLLOAdamW([{**options, "params": theirs[:2]}, {**plain, "params": theirs[2:]}])
    for a, b in zip(train(ours, optimizer, 5), train(theirs, reference, 5), strict=True):
        assert torch.equal(a, b)
    torch.save(optimizer.state_dict(), tmp_path / "a.pt")
    again = weights((8, 12), (12, 8), (5,))
    for weight, value in zip(again, ours, strict=True):
        weight.data.copy_(value)
    resumed = apollo([{"params": again, "weight_decay": 0.1}], lr=0.01, rank=rank)
    resumed.load_state_dict(torch.load(tmp_path / "a.pt", weights_only=True))
    assert same(train(ours, optimizer, 3), train(again, resumed, 3))


def test_a_rank_of_the_smaller_side_and_tables_are_left_to_adamw():
    params = weights((8, 12), (30, 8))
    optimizer = apollo([{"params": params[:1]}, {"params": params[1:], "matrix": False}], lr=0.01, rank=8)
    assert not any("rank" in group for group in optimizer.param_groups)


def test_inside_galore_it_keeps_a_row_of_moments_per_weight():
    params = weights((32, 48))
    optimizer = GaLore(params, lambda groups: apollo(groups, lr=0.01), rank=8, update_interval=3)
    train(params, optimizer, 5)
    inner = optimizer.state[params[0]]["inner"]
    assert inner["exp_avg"].shape == (1, 48)
    assert optimizer_state_bytes(optimizer) < 4 * (32 * 8 + 3 * 48 + 8 + 4)
    twin = weights((32, 48))
    twin[0].data.copy_(params[0])
    resumed = GaLore(twin, lambda groups: apollo(groups, lr=0.01), rank=8, update_interval=3)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert same(train(params, optimizer, 3), train(twin, resumed, 3))

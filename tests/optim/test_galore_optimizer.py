"""GaLore as one of torch's optimizers: schedules, closures, groups, and every optimizer by name inside it."""

import copy

import pytest
import torch
from galore_cases import adamw, skip_if_missing, train, weights

from safetrain_core import GaLore, MiniGPT, MiniGPTConfig, next_token_loss
from safetrain_core.optim.build import OPTIMIZERS, build_optimizer
from safetrain_core.optim.schedule import make_schedule

IDS = torch.randint(0, 20, (4, 9), generator=torch.Generator().manual_seed(0))


def test_a_schedule_moves_the_inner_learning_rate_and_momentum():
    (weight,) = weights((8, 12))
    optimizer = GaLore([weight], lambda g: torch.optim.SGD(g, lr=0.4, momentum=0.5), rank=8, scale=1.0)
    cosine = make_schedule(optimizer, "cosine", total_steps=4)
    rates = []
    for _ in range(3):
        train([weight], optimizer, 1)
        rates.append(optimizer.inner.param_groups[0]["lr"])
        cosine.step()
    assert rates == pytest.approx([0.4, 0.4 * (1 + 0.5**0.5) / 2, 0.2])
    once = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
    train([weight], optimizer, 1)
    assert optimizer.inner.param_groups[0]["momentum"] == once.optimizer.param_groups[0]["momentum"] != 0.5


def test_a_closure_is_evaluated_once_with_gradients_on():
    (weight,) = weights((8, 12))
    optimizer, calls = GaLore([weight], adamw, rank=3), []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert first.item() > optimizer.step(closure).item()
    assert calls == [True, True]


def test_a_callers_autocast_rounds_nothing():
    def one(enabled):
        (weight,) = weights((8, 12))
        optimizer = GaLore([weight], adamw, rank=3)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            train([weight], optimizer, 2)
        return weight.detach()

    assert torch.equal(one(True), one(False))


def test_a_group_added_later_is_projected_and_counts_its_own_updates():
    first, second = weights((8, 12), (12, 8))
    optimizer = GaLore([first], adamw, rank=3, update_interval=4)
    train([first], optimizer, 2)
    optimizer.add_param_group({"params": [second], "lr": 0.5})
    train([first, second], optimizer, 1)
    assert optimizer.param_groups[1]["params"][0] is second
    assert [group["galore_updates"] for group in optimizer.param_groups] == [3, 1]
    assert [group["lr"] for group in optimizer.inner.param_groups] == [0.01, 0.5]
    assert optimizer.state[second]["inner"]["exp_avg"].shape == (12, 3)


def gpt():
    torch.manual_seed(0)
    return MiniGPT(MiniGPTConfig(vocab_size=20, context=8, layers=2, heads=2, width=16))


def losses(model, optimizer, updates):
    told = []
    for _ in range(updates):
        optimizer.zero_grad()
        loss = next_token_loss(model(IDS[:, :-1]), IDS[:, 1:])
        loss.backward()
        optimizer.step()
        told.append(loss.item())
    return told


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_by_name_trains_a_tied_minigpt_and_resumes_bit_for_bit(name):
    skip_if_missing(name)
    lr = {"sgd_momentum": 0.2, "adafactor": 0.1, "muon": 0.02, "lion": 0.01}.get(name, 0.03)
    options = {"lr": lr, "weight_decay": 0.01, "galore_rank": 4, "galore_update_interval": 10, "galore_scale": 1.0}
    model = gpt()
    optimizer = build_optimizer(model, name, **options)
    told = losses(model, optimizer, 25)
    assert told[-1] < 0.8 * told[0]
    assert model.head.weight is model.tokens.weight
    assert "projector" in optimizer.state[model.head.weight]
    again = copy.deepcopy(model)
    resumed = build_optimizer(again, name, **options)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert losses(model, optimizer, 12) == losses(again, resumed, 12)

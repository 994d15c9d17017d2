"""Optimizers by name."""

import copy
import sys

import needs
import pytest
import torch
from galore_cases import skip_if_missing
from torch import nn

from safetrain_core import AmpTrainState, MiniGPT, MiniGPTConfig, next_token_loss
from safetrain_core.config import TrainConfig, field_kind
from safetrain_core.optim.build import OPTIMIZERS, OptimizerPair, build_optimizer
from safetrain_core.optim.schedule import make_schedule

IDS = torch.randint(0, 20, (4, 9), generator=torch.Generator().manual_seed(0))


def gpt(tied=True):
    torch.manual_seed(0)
    return MiniGPT(MiniGPTConfig(vocab_size=20, context=8, layers=2, heads=2, width=16, tied=tied))


def train(model, optimizer, steps=25):
    state = AmpTrainState(model, amp_dtype=torch.float32, optimizer=optimizer, loss_fn=next_token_loss)
    return [state.step(IDS[:, :-1], IDS[:, 1:]).loss for _ in range(steps)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_lowers_the_loss_and_resumes_bit_for_bit(name):
    skip_if_missing(name)
    lr = {"sgd_momentum": 0.1, "adafactor": 0.05, "lion": 3e-3}.get(name, 5e-3)
    model = gpt()
    optimizer = build_optimizer(model, name, lr=lr, weight_decay=0.01)
    losses = train(model, optimizer)
    assert losses[-1] < 0.8 * losses[0]
    again = gpt()
    again.load_state_dict(model.state_dict())
    resumed = build_optimizer(again, name, lr=lr, weight_decay=0.01)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(model, optimizer, 3) == train(again, resumed, 3)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weight_decay_is_off_for_norms_and_biases_and_on_for_matrices(name):
    skip_if_missing(name)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm((2, 4)), nn.Linear(4, 1))
    optimizer = build_optimizer(model, name, lr=0.1, weight_decay=0.5)
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    expected = {id(p): 0.5 if name in ("0.weight", "2.weight") else 0.0 for name, p in model.named_parameters()}
    assert decay == expected


@needs.muon
def test_muon_takes_the_matrices_and_adamw_the_rest_behind_one_optimizer():
    model = gpt(tied=False)
    optimizer = build_optimizer(model, "muon", lr=0.01, weight_decay=0.1)
    assert isinstance(optimizer, OptimizerPair)
    muon, adamw = optimizer.inner
    names = {id(p): name for name, p in model.named_parameters()}
    in_muon = {names[id(p)] for g in muon.param_groups for p in g["params"]}
    assert in_muon == {n for n, p in model.named_parameters() if p.dim() == 2 and n.split(".")[0] in ("blocks", "head")}
    assert len(in_muon) + sum(len(g["params"]) for g in adamw.param_groups) == len(names)
    schedule = make_schedule(optimizer, "cosine", total_steps=4)
    train(model, optimizer, 1)
    schedule.step()
    assert {g["lr"] for g in (*muon.param_groups, *adamw.param_groups)} == {0.01 * (1 + 2**-0.5) / 2}


@needs.muon
def test_the_pair_equals_its_two_optimizers_by_themselves():
    together, apart = gpt(), gpt()
    pair = build_optimizer(together, "muon", lr=0.01, weight_decay=0.1)
    inner = build_optimizer(apart, "muon", lr=0.01, weight_decay=0.1).inner
    for _ in range(4):
        for model, step in ((together, [pair]), (apart, inner)):
            model.zero_grad()
            next_token_loss(model(IDS[:, :-1]), IDS[:, 1:]).backward()
            for optimizer in step:
                optimizer.step()
    for a, b in zip(together.parameters(), apart.parameters(), strict=True):
        assert torch.equal(a, b)


def test_momentum_of_bfloat16_weights_does_not_start_from_what_is_in_memory():
    model, plain = nn.Linear(64, 8).bfloat16(), nn.Linear(64, 8).bfloat16()
    plain.load_state_dict(model.state_dict())
    ours = build_optimizer(model, "sgd_momentum", lr=0.1, weight_decay=0.0)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, fused=False)
    assert not any(group["fused"] for group in ours.param_groups)
    for module, optimizer in ((model, ours), (plain, theirs)):
        for _ in range(3):
            optimizer.zero_grad()
            module(torch.ones(4, 64, dtype=torch.bfloat16)).float().square().sum().backward()
            optimizer.step()
    assert torch.equal(model.weight, plain.weight)


@needs.muon
def test_a_pair_takes_no_further_group():
    pair = build_optimizer(gpt(), "muon", lr=0.01, weight_decay=0.1)
    with pytest.raises(ValueError, match="takes no further group"):
        pair.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))]})
    assert len(pair.param_groups) == sum(len(optimizer.param_groups) for optimizer in pair.inner)


@needs.muon
def test_muon_without_a_matrix_is_refused():
    with pytest.raises(ValueError, match="needs a 2-D weight"):
        build_optimizer(nn.LayerNorm(3), "muon", lr=0.1, weight_decay=0.0)


def test_a_name_that_is_unknown_or_cannot_be_had_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="choose one of adamw, adam, sgd_momentum, adafactor, muon, lion, apollo"):
        build_optimizer(gpt(), "sgd", lr=0.1, weight_decay=0.0)
    with pytest.raises(ValueError, match="no trainable parameter"):
        build_optimizer(gpt().requires_grad_(False), "adamw", lr=0.1, weight_decay=0.0)
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(ValueError, match=r"needs torch 2\.9"):
        build_optimizer(gpt(), "muon", lr=0.1, weight_decay=0.0)
    monkeypatch.setitem(sys.modules, "apollo_torch", None)
    with pytest.raises(ValueError, match=r"needs the package apollo-torch .*pip install 'safetrain-core\[apollo\]'"):
        build_optimizer(gpt(), "apollo", lr=0.1, weight_decay=0.0)
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(ValueError, match="needs the package pytorch-optimizer"):
        build_optimizer(gpt(), "lion", lr=0.1, weight_decay=0.0)


def test_the_configs_list_is_what_can_be_built():
    choices, _, _ = field_kind("optimizer_class")
    assert set(OPTIMIZERS) == set(choices)
    assert TrainConfig().optimizer_class in OPTIMIZERS

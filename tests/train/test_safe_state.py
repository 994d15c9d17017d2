"""The safe state: what it brings back, what it leaves alone, and what it weighs."""

import copy

import pytest
import torch
from galore_cases import skip_if_missing
from torch import nn

from safetrain_core import AmpTrainState
from safetrain_core.optim.build import OPTIMIZERS, build_optimizer
from safetrain_core.train.safe_state import SafeState

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.zeros(8, 2)


def make(name="adamw"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model[1].register_buffer("scratch", torch.zeros(3), persistent=False)
    optimizer = build_optimizer(model, name, lr=0.01, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return AmpTrainState(
        model, amp_dtype=torch.float16, optimizer=optimizer, scheduler=scheduler, init_scale=64.0, growth_interval=3
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_from_a_restored_state_is_bit_equal_and_again_after_a_second_restore(name):
    skip_if_missing(name)
    amp = make(name)
    for _ in range(4):
        amp.step(X, Y)
    safe = SafeState(amp)
    safe.capture()
    expected = None
    for _ in range(3):
        rows = [(row.loss, row.lr, row.scale, row.pre_clip) for row in (amp.step(X, Y) for _ in range(4))]
        weights = copy.deepcopy(amp.model.state_dict())
        if expected is not None:
            assert rows == expected[0]
            assert all(torch.equal(weights[key], value) for key, value in expected[1].items())
        expected = rows, weights
        amp.model[1].scratch += 1
        safe.restore()
        assert amp.model[1].scratch.tolist() == [0.0, 0.0, 0.0]
    assert amp.counters.step == 16
    assert amp.counters.updates == len(amp.counters.losses) == 4


def test_it_holds_copies_and_one_of_each():
    amp = make()
    amp.step(X, Y)
    safe = SafeState(amp)
    for _ in range(3):
        safe.capture()
        amp.step(X, Y)
    model = [*amp.model.parameters(), *amp.model.buffers()]
    moments = [t for entry in amp.optimizer.state.values() for t in entry.values()]
    assert safe.saved_bytes() == sum(t.numel() * t.element_size() for t in (*model, *moments))


def test_without_a_capture_nothing_is_restored():
    amp = make()
    amp.step(X, Y)
    before = copy.deepcopy(amp.model.state_dict())
    SafeState(amp).restore()
    assert all(torch.equal(before[key], value) for key, value in amp.model.state_dict().items())


def test_buffers_that_have_grown_or_were_made_since_are_those_of_the_captured_state_again():
    amp = make()
    amp.model[1].register_buffer("bank", torch.ones(2))
    amp.model[1].register_buffer("none", None)
    safe = SafeState(amp)
    safe.capture()
    amp.model[1].bank, amp.model[1].none = torch.zeros(5), torch.zeros(5)
    amp.model[1].register_buffer("made", torch.zeros(1))
    safe.restore()
    assert torch.equal(amp.model[1].bank, torch.ones(2))
    assert amp.model[1].none is None
    assert not hasattr(amp.model[1], "made")
    amp.model[1].bank = torch.full((5,), 3.0)
    safe.capture()
    amp.model[1].bank = torch.zeros(0)
    safe.restore()
    assert torch.equal(amp.model[1].bank, torch.full((5,), 3.0))

"""Verdicts read every n-th attempt: the same rows and weights as a look at every step, and no read in between."""

import copy
import math

import pytest
import torch
from measure import Watch
from torch import nn

from safetrain_core import AmpTrainState
from safetrain_core.step.deferred import DeferredSteps, can_defer

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.zeros(8, 2)

FUSED = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.05, fused=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.05, fused=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, fused=True),
}


def make(optimizer="adamw", amp_dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    return AmpTrainState(model, amp_dtype=amp_dtype, optimizer=FUSED[optimizer](model.parameters()), **options)


def window(fault):
    """Two micro-batches; ``fault`` spoils the second one's loss, or makes its gradient overflow in float16."""
    bad = {"nan": math.nan, "inf": math.inf}.get(fault, 0.0)
    return [(X, Y), (X, Y + bad)]


def spoil_gradient(model):
    handle = next(model.parameters()).register_hook(lambda grad: (handle.remove(), grad * math.inf)[1])


def equal_states(a, b):
    left, right = a.state_dict(), b.state_dict()
    for key in left:
        if isinstance(left[key], torch.Tensor):
            torch.testing.assert_close(left[key], right[key], rtol=1e-6, atol=1e-7, msg=key)
        else:
            assert left[key] == right[key], key


FAULTS = ["ok", "nan", "ok", "grad", "ok", "ok", "inf", "grad", "ok", "ok", "ok", "nan"]


@pytest.mark.parametrize("amp_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("optimizer", FUSED)
@pytest.mark.parametrize("n", [3, 4])
def test_rows_weights_moments_and_scale_are_those_of_a_look_at_every_step(amp_dtype, optimizer, n):
    options = {"init_scale": 512.0, "growth_interval": 2, "check_loss_before_backward": False}
    eager, late = make(optimizer, amp_dtype, **options), make(optimizer, amp_dtype, **options)
    steps = DeferredSteps(late)
    rows = []
    for i, fault in enumerate(FAULTS, start=1):
        for state in (eager, late):
            if fault == "grad":
                spoil_gradient(state.model)
        eager.step_window(window(fault))
        steps.attempt(window(fault))
        if i % n == 0:
            rows += steps.look()
    assert len(steps) == 0
    for ours, theirs in zip(rows, eager.log, strict=True):
        assert (ours.step, ours.skip_reason, ours.scale) == (theirs.step, theirs.skip_reason, theirs.scale)
        assert ours.lr == theirs.lr
        for name in ("loss", "pre_clip", "post_clip"):
            a, b = getattr(ours, name), getattr(theirs, name)
            assert a is b is None or a == pytest.approx(b, rel=1e-5, nan_ok=True)
    equal_states(late.model, eager.model)
    left, right = late.state_dict(), eager.state_dict()
    assert left["scaler"] == right["scaler"]
    assert left["counters"]["updates"] == right["counters"]["updates"]
    for key, entry in left["optimizer"]["state"].items():
        equal_states(_Dict(entry), _Dict(right["optimizer"]["state"][key]))


class _Dict(dict):
    def state_dict(self):
        return self


def test_between_looks_the_host_reads_nothing_and_at_a_look_once():
    state = make(amp_dtype=torch.float16, init_scale=64.0)
    steps = DeferredSteps(state)
    steps.attempt(window("ok"))
    steps.look()
    for _ in range(2):
        with Watch(state.optimizer) as watch:
            for _ in range(4):
                steps.attempt(window("ok"))
        assert sum(watch.reads.values()) == 0
    plain = DeferredSteps(make())
    with Watch(plain.amp.optimizer) as watch:
        for _ in range(4):
            plain.attempt(window("ok"))
    assert sum(watch.reads.values()) == 0
    with Watch() as watch:
        assert len(plain.look()) == 4
    assert watch.reads == {"tolist": 1}


def test_a_refused_first_step_leaves_no_optimizer_state():
    state = make()
    steps = DeferredSteps(state)
    steps.attempt(window("nan"))
    steps.attempt(window("nan"))
    assert [row.skipped for row in steps.look()] == [True, True]
    assert state.optimizer.state_dict()["state"] == {}
    steps.attempt(window("ok"))
    steps.look()
    fresh = make()
    fresh.step_window(window("ok"))
    equal_states(state.model, fresh.model)


def test_buffers_of_a_refused_step_are_put_back():
    state = make()
    before = copy.deepcopy(state.model[1].state_dict())
    steps = DeferredSteps(state)
    steps.attempt([(X * math.inf, Y)])
    assert steps.look()[0].skipped
    for key, value in state.model[1].state_dict().items():
        assert torch.equal(before[key], value)


def test_poisoned_weights_are_found_at_the_look():
    state = make()
    steps = DeferredSteps(state)
    steps.attempt(window("ok"))
    with torch.no_grad():
        state.model[0].weight[0, 0] = math.nan
    steps.attempt(window("ok"))
    steps.attempt(window("ok"))
    assert [row.skip_reason for row in steps.look()] == [None, "non_finite_loss", "non_finite_state"]


def test_a_poisoned_buffer_is_found_too():
    state = make()
    steps = DeferredSteps(state)
    state.model[1].running_var.fill_(math.inf)
    state.model.eval()
    steps.attempt([(X, Y)])
    assert steps.look()[0].skip_reason == "non_finite_state"


def test_a_mask_of_minus_infinity_is_no_poison():
    state = make()
    state.model[0].register_buffer("mask", torch.full((2, 2), -math.inf))
    looked = AmpTrainState(state.model, amp_dtype=torch.float32, optimizer=state.optimizer)
    steps = DeferredSteps(looked)
    steps.attempt(window("ok"))
    assert steps.look()[0].skip_reason is None
    assert looked.step_window(window("ok"), examine=True).skip_reason is None
    looked.model[1].running_mean.fill_(math.nan)
    looked.model.eval()
    assert looked.step_window([(X, Y)], examine=True).skip_reason == "non_finite_state"


def test_post_clip_guard_and_loss_jump_are_told_at_the_look():
    state = make(max_norm=0, inf_post_clip_threshold=10.0, loss_jump_factor=2.0, loss_jump_window=2)
    steps = DeferredSteps(state)
    for targets in (Y, Y, Y + 1e7, Y + 3.0):
        steps.attempt([(X, targets)])
    rows = steps.look()
    assert [row.skip_reason for row in rows] == [None, None, "post_clip_explosion", "loss_jump"]
    assert state.counters.updates == 2


def test_the_schedule_waits_for_the_verdict_and_moves_once_per_good_step():
    state = make()
    state.scheduler = torch.optim.lr_scheduler.ExponentialLR(state.optimizer, 0.5)
    steps = DeferredSteps(state)
    for fault in ("ok", "nan", "ok"):
        steps.attempt(window(fault))
    assert state.lr == 0.05
    assert [row.lr for row in steps.look()] == [0.05] * 3
    assert state.lr == 0.05 / 4


def test_an_exception_in_an_attempt_leaves_the_waiting_ones_and_the_next_attempt_works():
    state = make(amp_dtype=torch.float16, init_scale=64.0)
    steps = DeferredSteps(state)
    steps.attempt(window("ok"))
    with pytest.raises(ValueError, match="does not fit"):
        steps.attempt([(torch.zeros(3, 9), Y)])
    steps.attempt(window("ok"))
    assert [row.skipped for row in steps.look()] == [False, False]


def test_optimizers_that_would_keep_the_garbage_are_refused():
    weight = [nn.Parameter(torch.zeros(2))]
    for optimizer in (
        torch.optim.SGD(weight, lr=0.1, momentum=0.9, fused=True),
        torch.optim.AdamW(weight),
        torch.optim.Adafactor(weight),
    ):
        assert not can_defer(optimizer)
    model = nn.Linear(1, 1)
    state = AmpTrainState(model, optimizer=torch.optim.Adafactor(model.parameters()))
    with pytest.raises(ValueError, match="Adafactor cannot refuse an update on the device"):
        DeferredSteps(state)


class Banked(nn.Module):
    """Replaces its buffers by others: a bank that grows, a mean that begins as integers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 2)
        self.register_buffer("bank", torch.zeros(0, 4))
        self.register_buffer("mean", torch.zeros(4, dtype=torch.int64))

    def forward(self, x):
        self.bank = torch.cat([self.bank, x.detach()])
        self.mean = self.mean / 2 + x.detach().mean(0)
        return self.net(x)


def test_buffers_that_grow_or_change_their_dtype_are_kept_by_a_good_step_and_put_back_by_a_bad_one():
    eager, late = (AmpTrainState(Banked(), amp_dtype=torch.float32) for _ in range(2))
    steps = DeferredSteps(late)
    for bad in (0.0, math.nan, 0.0, 0.0, math.inf):
        eager.step(X, Y + bad)
        steps.attempt([(X, Y + bad)])
    steps.look()
    assert late.model.bank.shape == (24, 4)
    equal_states(eager.model, late.model)

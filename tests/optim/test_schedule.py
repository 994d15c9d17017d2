"""Schedules: closed forms, ends, and refusals."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from safetrain_core.optim.schedule import SCHEDULES, lr_factor, make_schedule


def test_cosine_without_warmup_is_torchs_annealing():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
    for u in range(51):
        assert lr_factor(u, "cosine", total_steps=50) == pytest.approx(theirs.get_last_lr()[0], abs=1e-9)
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("kind", ["cosine", "linear_warmup_then_constant"])
def test_warmup_rises_linearly_to_the_peak(kind):
    factors = [lr_factor(u, kind, total_steps=100, warmup_ratio=0.1) for u in range(11)]
    assert factors[:10] == pytest.approx([(u + 1) / 10 for u in range(10)])
    assert factors[10] == 1.0


def test_cosine_ends_at_zero_and_stays_and_the_others_stay_at_the_peak():
    assert lr_factor(100, "cosine", total_steps=100) == pytest.approx(0.0, abs=1e-12)
    assert lr_factor(10**9, "cosine", total_steps=100) == lr_factor(100, "cosine", total_steps=100)
    assert lr_factor(10**9, "linear_warmup_then_constant", total_steps=100, warmup_ratio=0.3) == 1.0
    assert lr_factor(10**9, "constant") == 1.0


@given(st.sampled_from(SCHEDULES), st.integers(1, 300), st.floats(0, 1), st.integers(0, 1000))
def test_factor_is_always_within_zero_and_one(kind, total, ratio, u):
    assert 0.0 <= lr_factor(u, kind, total_steps=total, warmup_ratio=ratio) <= 1.0


def test_it_drives_a_torch_optimizer_once_per_step():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.2)
    schedule = make_schedule(optimizer, "cosine", total_steps=4)
    seen = []
    for _ in range(6):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert seen == pytest.approx([0.2 * (1 + math.cos(math.pi * min(u, 4) / 4)) / 2 for u in range(6)])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"kind": "linear"}, "choose one of cosine, constant"),
        ({"kind": "cosine"}, "scheduler_total_steps=None"),
        ({"kind": "cosine", "total_steps": 0}, "scheduler_total_steps=0"),
        ({"kind": "cosine", "total_steps": 9, "warmup_ratio": 2}, "scheduler_warmup_ratio=2"),
    ],
)
def test_a_bad_schedule_is_refused(arguments, told):
    with pytest.raises(ValueError, match=told):
        lr_factor(0, **arguments)

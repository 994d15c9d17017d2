"""Which layers to recompute: against every subset there is."""

import itertools

import pytest
import torch
from recompute_cases import OddLoop, WithKwargs, dense, made, normed, plain_stack, vectors
from torch import nn

from safetrain_core import MiniGPT, MiniGPTConfig, apply_recompute, measure_recompute, plan_recompute_for


def unequal_gpt(widths=(2, 16, 4, 1, 8, 4)):
    """A MiniGPT whose MLPs differ, so that layers differ in bytes and FLOPs."""
    torch.manual_seed(0)
    model = MiniGPT(MiniGPTConfig(96, context=64, layers=len(widths), heads=4, width=32))
    for block, width in zip(model.blocks, widths, strict=True):
        block.mlp = nn.Sequential(nn.Linear(32, 32 * width), nn.GELU(), nn.Linear(32 * width, 32))
    tokens = torch.randint(0, 96, (4, 64), generator=torch.Generator().manual_seed(0))
    return model, (tokens, tokens)


def every_subset(model, batch):
    names = [name for name, _ in model.named_modules() if name.startswith("blocks.") and name.count(".") == 1]
    subsets = itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(len(names) + 1))
    return {names: measure_recompute(model, batch, names, timed_runs=0) for names in subsets}


def test_at_every_budget_it_is_the_cheapest_subset_of_all_and_fits_by_the_count():
    model, batch = unequal_gpt()
    counts = every_subset(model, batch)
    least = min(cost.activation_bytes for cost in counts.values())
    most = counts[()].activation_bytes
    for share in (0, 0.03, 0.1, 0.17, 0.25, 0.33, 0.5, 0.66, 0.8, 0.95, 1):
        budget = int(least + share * (most - least))
        plan = plan_recompute_for(model, batch, budget)
        assert plan.fits
        assert plan.activation_bytes == counts[plan.layers].activation_bytes <= budget
        assert plan.recompute_flops == min(
            cost.recompute_flops for cost in counts.values() if cost.activation_bytes <= budget
        )
        assert plan.plain_bytes == most
    nothing = plan_recompute_for(model, batch, least - 1)
    assert not nothing.fits
    assert "nothing fits: even with every layer recomputed" in nothing.report()


def test_a_plan_can_be_applied_and_counts_as_it_said():
    model, batch = unequal_gpt()
    plan = plan_recompute_for(model, batch, 2_700_000)
    assert plan.fits
    assert 0 < len(plan.layers) < 6
    apply_recompute(model, plan.layers)
    cost = measure_recompute(model, batch, timed_runs=0)
    assert (cost.activation_bytes, cost.overhead) == (plan.activation_bytes, plan.overhead)
    assert all(name in plan.report() for name in plan.layers)


def test_headroom_is_left_free():
    model, batch = unequal_gpt()
    assert plan_recompute_for(model, batch, 3_000_000, headroom=0.2).activation_bytes <= 2_400_000


def test_many_layers_take_no_time_of_their_own():
    model, batch = unequal_gpt([1 + i * 7 % 11 for i in range(40)])
    plain = measure_recompute(model, batch, "none", timed_runs=0).activation_bytes
    plan = plan_recompute_for(model, batch, plain // 2)
    assert plan.fits
    assert plan.activation_bytes > 0.4 * plain  # it does not recompute more than it must


def test_models_of_other_kinds_fit_by_the_count():
    batch = vectors(), vectors()
    for model in (plain_stack(dense), plain_stack(normed), made(WithKwargs), made(OddLoop)):
        plain, full = (measure_recompute(model, batch, p, timed_runs=0).activation_bytes for p in ("none", "full"))
        for share in (0.5, 1):
            budget = int(full + share * (plain - full))
            plan = plan_recompute_for(model, batch, max(budget, full))
            assert plan.fits or plain < full


def test_measuring_for_a_plan_leaves_no_trace():
    model, batch = unequal_gpt()
    apply_recompute(model, "full")
    wrappers = [vars(m).get("forward") for m in model.modules()]
    random = torch.get_rng_state()
    plan_recompute_for(model, batch, 2_500_000)
    assert [vars(m).get("forward") for m in model.modules()] == wrappers
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(
    ("change", "told"),
    [({"budget_bytes": 0}, "budget_bytes=0"), ({"headroom": 1.0}, "headroom=1.0"), ({"headroom": float("nan")}, "nan")],
)
def test_a_bad_argument_is_refused(change, told):
    model, batch = unequal_gpt()
    with pytest.raises(ValueError, match=told):
        plan_recompute_for(model, batch, **{"budget_bytes": 10**6, **change})

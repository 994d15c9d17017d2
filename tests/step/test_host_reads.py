"""What a step costs in reads of the device and passes over the gradients, counted."""

import pytest
import torch
from measure import Watch
from torch import nn

from safetrain_core import AmpTrainState, clip_global_l2_norm, has_non_finite_grad

X, Y = torch.randn(4, 8), torch.randn(4, 2)


def state(check, amp_dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    made = AmpTrainState(model, amp_dtype=amp_dtype, check_loss_before_backward=check, init_scale=64.0, **options)
    for _ in range(2):
        assert not made.step(X, Y).skipped
    return made


def reads(made, k):
    with Watch(made.optimizer) as watch:
        assert not made.step_window([(X, Y)] * k).skipped
    return sum(watch.reads.values())


@pytest.mark.parametrize("amp_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [1, 4])
def test_a_good_step_reads_the_host_once_and_k_times_more_with_the_early_look(amp_dtype, k):
    assert reads(state(False, amp_dtype), k) == 1
    assert reads(state(True, amp_dtype), k) == 1 + k


def test_the_watch_sees_the_reads_it_claims_to_see():
    x = torch.arange(3.0)
    with Watch() as watch:
        x.sum().item(), bool(x.sum() > 1), float(x[0]), x.tolist(), x.numpy(), x.nonzero(), torch.equal(x, x)
    assert watch.reads == {"_local_scalar_dense": 3, "tolist": 1, "numpy": 1, "nonzero": 1, "equal": 1}


def passes(watch, tensors):
    """Reading passes over all gradients: a fused norm each, or a span of each tensor."""
    return watch.ops["_foreach_norm"] + watch.ops["aminmax"] / tensors


def test_a_norm_below_the_threshold_is_one_pass_and_one_above_is_two():
    weights = [nn.Parameter(torch.zeros(5)) for _ in range(6)]
    for weight in weights:
        weight.grad = torch.full((5,), 0.01)
    with Watch() as watch:
        clip_global_l2_norm(weights, 1.0)
    assert (passes(watch, 6), watch.ops["_foreach_mul_"]) == (1, 0)
    with Watch() as watch:
        clip_global_l2_norm(weights, 0.01)
    assert (passes(watch, 6), watch.ops["_foreach_mul_"]) == (1, 1)
    with Watch() as watch:
        has_non_finite_grad(weights)
    assert passes(watch, len(weights)) == 1
    assert sum(watch.reads.values()) == 1


def test_the_post_clip_guard_costs_a_pass_only_where_it_could_fire():
    for max_norm, threshold, expected in ((1.0, 10.0, 1), (0.0, 1e9, 1), (0.0, 1e-3, 2)):
        made = state(False, max_norm=max_norm, inf_post_clip_threshold=0)
        made.limits = made.limits._replace(post_clip=threshold)
        with Watch(made.optimizer) as watch:
            made.step(X, Y)
        assert passes(watch, len(list(made.model.parameters()))) == expected

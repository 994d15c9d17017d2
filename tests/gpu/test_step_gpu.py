"""The safe step on a real GPU: one short script, skipped where there is none. `pytest tests/gpu -q`"""

import warnings

import pytest
import torch
from torch import nn

from safetrain_core import AmpTrainState, clip_global_l2_norm
from safetrain_core.step.deferred import DeferredSteps

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


def make(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2)).cuda()
    return AmpTrainState(model, device_type="cuda", **options)


def data(bad=0.0):
    return torch.ones(4, 8, device="cuda"), torch.full((4, 2), bad, device="cuda")


def test_defaults_are_float16_with_a_scaler_and_a_fused_optimizer():
    state = make()
    assert state.amp_dtype is torch.float16
    assert state.scaler.is_enabled()
    assert state.optimizer.param_groups[0]["fused"]
    assert not state.check_loss_before_backward


def test_an_overflow_halves_a_bad_loss_does_not_and_both_leave_no_trace():
    state = make(init_scale=2.0**24)
    while state.step(*data()).skipped:
        assert state.log[-1].skip_reason == "non_finite_grad"
    scale = state.scale
    before = {name: value.clone() for name, value in state.model.state_dict().items()}
    assert state.step(*data(float("inf"))).skip_reason == "non_finite_loss"
    assert state.scale == scale == state.scaler.get_scale()
    assert all(torch.equal(before[name], value) for name, value in state.model.state_dict().items())


def synchronizations(function):
    """How often the host waited for the device, by torch's own warning."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            function()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(w.message) for w in caught)


def test_the_count_of_synchronizations_sees_one():
    assert synchronizations(lambda: torch.ones(1, device="cuda").item()) == 1


@pytest.mark.parametrize("amp_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_good_step_waits_for_the_device_once(amp_dtype):
    state = make(amp_dtype=amp_dtype, init_scale=64.0)
    batch = data()
    for _ in range(3):
        state.step(*batch)
    assert synchronizations(lambda: state.step(*batch)) == 1


def test_between_looks_the_host_never_waits():
    steps = DeferredSteps(make(init_scale=64.0))
    batch, bad = data(), data(float("nan"))
    steps.attempt([batch])
    steps.look()
    steps.attempt([batch])
    assert synchronizations(lambda: (steps.attempt([batch]), steps.attempt([bad]), steps.attempt([batch]))) == 0
    assert [row.skipped for row in steps.look()] == [False, False, True, False]


def test_norm_and_clip_equal_torchs():
    weights = [nn.Parameter(torch.zeros(1000, device="cuda", dtype=d)) for d in (torch.float32, torch.float16)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    expected = torch.linalg.vector_norm(torch.cat([w.grad.float() for w in weights])).item()
    pre, post = clip_global_l2_norm(weights, 1.0)
    assert pre == pytest.approx(expected, rel=1e-4)
    assert post == 1.0


def test_a_model_on_the_gpu_with_device_type_cpu_is_refused_and_data_elsewhere_too():
    with pytest.raises(ValueError, match="on cuda:0 but device_type='cpu'"):
        AmpTrainState(nn.Linear(1, 1).cuda())
    with pytest.raises(ValueError, match="inputs are on cpu but the model is on cuda"):
        make().step(torch.ones(4, 8), torch.zeros(4, 2))

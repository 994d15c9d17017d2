"""GaLore on a real GPU: one short script, skipped where there is none. `pytest tests/gpu -q`"""

import copy

import pytest
import torch
from galore_cases import same
from torch import nn

from safetrain_core import AmpTrainState, GaLore, find_basis, optimizer_state_bytes, projection_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


def make(device, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64)).to(device)
    optimizer = GaLore(
        model.parameters(), lambda g: torch.optim.AdamW(g, lr=1e-3, fused=True), rank=8, update_interval=100, **options
    )
    return model, optimizer


def batches(device, count=20):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(32, 64, generator=generator).to(device) for _ in range(count)]


def test_twenty_updates_end_where_the_cpu_ends():
    ends = []
    for device in ("cpu", "cuda"):
        model, optimizer = make(device)
        amp = AmpTrainState(model, device_type=device, amp_dtype=torch.float32, optimizer=optimizer)
        for x in batches(device):
            amp.step(x, -x)
        ends.append([weight.detach().cpu() for weight in model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("shape", [(64, 96), (96, 64), (128, 512), (512, 128)], ids=str)
@pytest.mark.parametrize("method", ["svd", "randomized"])
def test_a_basis_is_orthonormal_and_nearly_the_best_and_leaves_the_random_states_alone(shape, method):
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(0)).cuda()
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    basis = find_basis(grad, 8, method=method, seed=5)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(torch.cuda.get_rng_state(), states[1])
    assert torch.equal(basis, find_basis(grad, 8, method=method, seed=5))
    assert torch.allclose(basis.T @ basis, torch.eye(8, device="cuda"), atol=1e-4)
    best = projection_error(grad.cpu(), find_basis(grad.cpu(), 8))
    assert projection_error(grad, basis) <= 1.05 * best


def test_a_float16_overflow_leaves_projector_and_moments_untouched_and_training_goes_on():
    model, optimizer = make("cuda")
    amp = AmpTrainState(model, device_type="cuda", optimizer=optimizer, init_scale=2.0**30)
    before = copy.deepcopy(optimizer.state_dict())
    x = batches("cuda", 1)[0]
    assert amp.step(x, -x).skip_reason == "non_finite_grad"
    assert same(optimizer.state_dict(), before)
    while amp.step(x, -x).skipped:
        pass
    first = amp.log[-1].loss
    for _ in range(30):
        last = amp.step(x, -x).loss
    assert last < first


def test_a_state_saved_between_bases_resumes_within_1e_4(tmp_path):
    model, optimizer = make("cuda")
    amp = AmpTrainState(model, device_type="cuda", amp_dtype=torch.float32, optimizer=optimizer)
    data = batches("cuda")
    for x in data[:5]:
        amp.step(x, -x)
    torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "a.pt")
    other, resumed = make("cuda")
    weights, state = torch.load(tmp_path / "a.pt", weights_only=True, map_location="cpu")
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    assert optimizer_state_bytes(resumed) == optimizer_state_bytes(optimizer)
    again = AmpTrainState(other, device_type="cuda", amp_dtype=torch.float32, optimizer=resumed)
    for x in data[5:]:
        assert again.step(x, -x).loss == pytest.approx(amp.step(x, -x).loss, abs=1e-4)


def test_between_bases_the_host_waits_for_nothing():
    _, optimizer = make("cuda")
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")

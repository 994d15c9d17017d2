"""How a basis is found: exactly, and by random numbers."""

import pytest
import torch

from safetrain_core import find_basis, projection_error


@pytest.mark.parametrize("shape", [(40, 60), (60, 40), (96, 200), (200, 96)], ids=str)
@pytest.mark.parametrize("method", ["svd", "randomized"])
def test_a_basis_spans_the_leading_singular_vectors(shape, method):
    generator = torch.Generator().manual_seed(0)
    values = torch.logspace(0, -6, min(shape))
    u = torch.linalg.qr(torch.randn(shape[0], min(shape), generator=generator)).Q
    v = torch.linalg.qr(torch.randn(shape[1], min(shape), generator=generator)).Q
    grad = u * values @ v.T
    basis = find_basis(grad, 5, method=method)
    truth = (u if shape[0] <= shape[1] else v)[:, :5]
    assert torch.allclose(basis.T @ basis, torch.eye(5), atol=1e-5)
    assert torch.linalg.matrix_norm(basis - truth @ (truth.T @ basis), 2) < 1e-3
    best = (values[5:].square().sum() / values.square().sum()).sqrt().item()
    assert projection_error(grad, basis) == pytest.approx(best, rel=1e-3)


def test_the_randomized_method_is_near_the_best_on_a_slow_spectrum_and_leaves_the_random_states_alone():
    grad = torch.randn(40, 60, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(7)
    state = torch.get_rng_state()
    basis = find_basis(grad, 5, method="randomized", seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(basis, find_basis(grad, 5, method="randomized", seed=3))
    assert not torch.equal(basis, find_basis(grad, 5, method="randomized", seed=4))
    best = projection_error(grad, find_basis(grad, 5))
    assert best <= projection_error(grad, basis) <= 1.05 * best

"""How a basis is found: exactly, and by random numbers."""

import pytest
import torch

from safetrain_core import find_basis, projection_error
from safetrain_core.optim.projection import turn_


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


def test_a_float64_gradient_gets_a_float64_basis():
    grad = torch.randn(96, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    basis = find_basis(grad, 5)
    assert torch.allclose(basis.T @ basis, torch.eye(5, dtype=torch.float64), atol=1e-13)
    assert basis.untyped_storage().nbytes() == 96 * 5 * 8


@pytest.mark.parametrize("shape", [(8, 12), (12, 8)], ids=str)
@pytest.mark.parametrize("rank", [1, 3])
def test_adafactors_factor_along_the_projected_side_turns_and_the_other_stays(shape, rank):
    generator = torch.Generator().manual_seed(0)
    old, new = (torch.linalg.qr(torch.randn(8, rank, generator=generator)).Q for _ in range(2))
    rows, columns = (rank, 12) if shape[0] < shape[1] else (12, rank)
    state = {
        "row_var": torch.rand(rows, 1, generator=generator),
        "col_var": torch.rand(1, columns, generator=generator),
    }
    before = {name: value.clone() for name, value in state.items()}
    turn_(state, old, new, torch.Size(shape))
    squares = (new.T @ old).square()
    if shape[0] < shape[1]:
        assert torch.allclose(state["row_var"], squares @ before["row_var"])
        assert torch.equal(state["col_var"], before["col_var"])
    else:
        assert torch.allclose(state["col_var"], before["col_var"] @ squares.T)
        assert torch.equal(state["row_var"], before["row_var"])

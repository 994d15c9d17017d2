"""The subspace that GaLore works in: how it is found, how a matrix goes there and back, how moments follow it.

For a gradient G of shape (m, n) the basis P has orthonormal columns on the smaller side: P^T G for m <= n, else G P.

Source: Zhao et al. 2024, "GaLore", arXiv:2403.03507, section 3; for the randomized method Halko, Martinsson and Tropp
2011, "Finding Structure with Randomness", arXiv:0909.4061, algorithm 4.4.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["METHODS", "MOMENTS", "add_back", "find_basis", "projected", "projected_shape", "projection_error", "turn_"]

#: How a basis is found.
METHODS = ("svd", "randomized")

#: What becomes of the moments where the basis changes.
MOMENTS = ("keep", "reset", "project")

#: Columns drawn beyond the rank, and passes over G and its transpose, of the randomized method.
OVERSAMPLING, POWER_ITERATIONS = 10, 2

#: Smaller side, and longer over smaller side, from which a QR factorization before the SVD saves time.
QR_FROM, QR_ASPECT = 64, 1.5

#: Entries of an optimizer's state that hold squares of gradients, and not gradients.
SQUARES = {"exp_avg_sq", "max_exp_avg_sq", "exp_avg_var", "square_avg", "sum", "row_var", "col_var"}

#: Adafactor's factors: each runs along one side only, and is a mean over the other.
FACTOR_SIDE = {"row_var": 0, "col_var": 1}


def is_left(shape: torch.Size | tuple[int, ...]) -> bool:
    """Whether the basis multiplies from the left: where the rows are the smaller side, or both are the same."""
    return shape[0] <= shape[1]


def projected_shape(shape: torch.Size | tuple[int, ...], rank: int) -> tuple[int, int]:
    """The shape of P^T G, or G P, for G of ``shape``.

    >>> projected_shape((512, 1024), 64), projected_shape((1024, 512), 64)
    ((64, 1024), (1024, 64))
    """
    return (rank, shape[1]) if is_left(shape) else (shape[0], rank)


@contextlib.contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Random numbers drawn inside depend on ``seed`` alone, and the generators outside do not move."""
    if device.type == "cpu":
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(seed)
            yield
        return
    module = torch.get_device_module(device)
    with torch.random.fork_rng([device], device_type=device.type), module.device(device):
        module.manual_seed(seed)
        yield


def _shortened(matrix: Tensor) -> Tensor:
    """A smaller matrix with the same singular vectors on the smaller side, where that saves time.

    With G^T = Q R, G and R^T have the same left singular vectors, and Q, much of the work, is not formed. The column of
    zeros changes none of them: it sends LAPACK the way it goes for a wide matrix, so that the signs are the same as
    without this (all were, in 11,868 vectors tried with MKL).
    """
    short, long = sorted(matrix.shape)
    if short < QR_FROM or long < QR_ASPECT * short:
        return matrix
    if not is_left(matrix.shape):
        return torch.linalg.qr(matrix, mode="r").R
    return torch.nn.functional.pad(torch.linalg.qr(matrix.mT, mode="r").R.mT, (0, 1))


def find_basis(grad: Tensor, rank: int, *, method: str = "svd", seed: int = 0) -> Tensor:
    """The leading ``rank`` singular vectors of ``grad`` on its smaller side, computed in float32 at least.

    Args:
        grad: (m, n), finite, any floating dtype. rank: 1..min(m, n).
        method: "svd", exact; "randomized", by ``torch.svd_lowrank``: much faster, and nearly as good where the
            singular values fall quickly; see ``projection_error``.
        seed: of the randomized method. The same seed gives the same basis, on every rank of a data-parallel run too,
            and the random states of the program stay as they are.

    Returns:
        (min(m, n), rank), contiguous, in the dtype of ``grad``. The sign of each column is LAPACK's choice.

    >>> find_basis(torch.diag(torch.tensor([1.0, 3.0, 2.0])), 2).abs()
    tensor([[0., 0.],
            [1., 0.],
            [0., 1.]])
    """
    matrix = grad.to(torch.promote_types(grad.dtype, torch.float32))
    if method == "svd":
        u, _, vh = torch.linalg.svd(_shortened(matrix), full_matrices=False)
        columns = u[:, :rank] if is_left(grad.shape) else vh[:rank].mT
    else:
        with _seeded(grad.device, seed):
            u, _, v = torch.svd_lowrank(matrix, q=min(rank + OVERSAMPLING, *grad.shape), niter=POWER_ITERATIONS)
        columns = (u if is_left(grad.shape) else v)[:, :rank]
    # A copy: a view would keep all the singular vectors in memory.
    return columns.to(grad.dtype).clone(memory_format=torch.contiguous_format)


def projected(matrix: Tensor, basis: Tensor) -> Tensor:
    """P^T M for a wide or square M of shape (m, n), M P for a tall one.

    >>> projected(torch.ones(2, 3), torch.eye(2, 1))
    tensor([[1., 1., 1.]])
    """
    return basis.mT @ matrix if is_left(matrix.shape) else matrix @ basis


def add_back(weight: Tensor, basis: Tensor, change: Tensor, *, scale: float, keep: float) -> None:
    """W <- keep W + scale P change (change P^T for a tall W), in place, in one pass over W.

    >>> weight = torch.ones(2, 3)
    >>> add_back(weight, torch.eye(2, 1), torch.ones(1, 3), scale=0.5, keep=1.0)
    >>> weight
    tensor([[1.5000, 1.5000, 1.5000],
            [1.0000, 1.0000, 1.0000]])
    """
    left, right = (basis, change) if is_left(weight.shape) else (change, basis.mT)
    weight.addmm_(left, right, beta=keep, alpha=scale)


def projection_error(grad: Tensor, basis: Tensor) -> float:
    """The share of ``grad`` that the projection loses: ||G - P P^T G|| / ||G||, Frobenius norms, 0..1.

    The exact singular vectors have the smallest that there is at their rank (Eckart and Young 1936).

    >>> grad = torch.diag(torch.tensor([4.0, 3.0]))
    >>> projection_error(grad, find_basis(grad, 1))
    0.6
    """
    whole, inside = grad.double(), projected(grad, basis).double()
    back = torch.zeros_like(whole)
    add_back(back, basis.double(), inside, scale=1.0, keep=0.0)
    norm = torch.linalg.vector_norm(whole).item()
    return round(torch.linalg.vector_norm(whole - back).item() / norm, 12) if norm > 0 else 0.0


def turn_(state: dict[str, Any], old: Tensor, new: Tensor, shape: torch.Size) -> None:
    """Express an optimizer's moments in a new basis, in place.

    With C = P_new^T P_old a gradient's mean turns as C M. Squares turn as (C * C) V: exact for directions that are
    independent of each other, and never negative.

    Args:
        state: of one projected weight. old, new: its bases, (min(m, n), rank). shape: (m, n) of the weight.

    >>> state = {"exp_avg": torch.tensor([[2.0, 3.0]]), "step": torch.tensor(7.0)}
    >>> turn_(state, torch.eye(2, 1), -torch.eye(2, 1), torch.Size((2, 2)))
    >>> state
    {'exp_avg': tensor([[-2., -3.]]), 'step': tensor(7.)}
    """
    turn = new.mT @ old
    axis = 0 if is_left(shape) else 1
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.dim() != 2 or value.shape[axis] != len(turn):
            continue
        if FACTOR_SIDE.get(name, axis) == axis:
            by = turn.square() if name in SQUARES else turn
            value.copy_(by @ value if axis == 0 else value @ by.mT)

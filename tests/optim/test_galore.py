"""GaLore by its definition: what is projected, what the inner optimizer sees, and what comes back."""

import pytest
import torch
from galore_cases import adamw, apart, sgd, train, weights
from measure import Watch

from safetrain_core import GaLore, find_basis

SHAPES = [(12, 8), (8, 12), (8, 8)]

ROTATION = {"rank": 8, "scale": 1.0, "force_full_rank": True}


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"maximize": True}], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sgd_under_a_rotation_is_plain_sgd(shape, options):
    ours, theirs = weights(shape), weights(shape)
    rotated = GaLore(ours, lambda groups: sgd(groups, **options), update_interval=3, **ROTATION)
    assert apart(train(ours, rotated, 20), train(theirs, sgd(theirs, **options), 20)) <= 1e-5
    assert rotated.state[ours[0]]["projector"].shape == (8, 8)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_momentum_survives_new_bases_where_it_is_projected_into_them_and_not_where_it_is_kept(shape):
    def distance(moments):
        ours, theirs = weights(shape), weights(shape)
        options = {"momentum": 0.9, "weight_decay": 0.1}
        rotated = GaLore(ours, lambda g: sgd(g, **options), update_interval=3, moments=moments, **ROTATION)
        return apart(train(ours, rotated, 20), train(theirs, sgd(theirs, **options), 20))

    assert distance("project") <= 1e-5
    assert distance("keep") > 0.1
    assert distance("reset") > 0.1


def test_adam_under_a_rotation_is_not_plain_adam():
    ours, theirs = weights((8, 12)), weights((8, 12))
    rotated = GaLore(ours, adamw, **ROTATION)
    assert apart(train(ours, rotated, 20), train(theirs, adamw(theirs), 20)) > 1e-2


@pytest.mark.parametrize(
    "make",
    [
        adamw,
        lambda groups: adamw(groups, fused=True, weight_decay=0.1),
        lambda groups: torch.optim.Adafactor(groups, lr=0.01),
        lambda groups: sgd(groups, momentum=0.9, weight_decay=0.1),
    ],
    ids=["adamw", "fused adamw", "adafactor", "sgd"],
)
def test_what_is_not_eligible_is_stepped_exactly_as_by_the_plain_optimizer(make):
    shapes = [(4, 30), (30, 4), (5,), (), (6, 6, 3, 3), (9, 70), (9, 9)]  # rank 4, larger than 64, excluded
    ours, theirs = weights(*shapes), weights(*shapes)
    optimizer = GaLore(ours, make, rank=4, max_dim=64, exclude=[ours[-1]], update_interval=2)
    for a, b in zip(train(ours, optimizer, 6), train(theirs, make(theirs), 6), strict=True):
        assert torch.equal(a, b)
    assert not any("projector" in state for state in optimizer.state.values())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_first_update_of_adamw_is_the_closed_form(shape):
    (weight,) = weights(shape)
    before, decay = weight.detach().clone(), 0.3
    optimizer = GaLore([weight], lambda g: adamw(g, weight_decay=decay), rank=3, scale=0.5)
    train([weight], optimizer, 1)
    basis = find_basis(weight.grad, 3)
    # Adam's first update is the sign of the gradient.
    wide = shape[0] <= shape[1]
    update = basis @ (basis.T @ weight.grad).sign() if wide else (weight.grad @ basis).sign() @ basis.T
    assert torch.allclose(weight.detach(), before * (1 - 0.01 * decay) - 0.5 * 0.01 * update, atol=1e-6)


class Halving(torch.optim.Optimizer):
    """Looks at the weights alone: halves them. Notes what it was shown."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": 0.1})
        self.seen = []

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.seen.append((p.detach().clone(), p.grad.clone()))
                p.data.mul_(0.5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_inner_optimizer_sees_the_projected_weight_and_gradient_and_its_change_comes_back(shape):
    (weight,) = weights(shape)
    before = weight.detach().clone()
    optimizer = GaLore([weight], Halving, rank=3, scale=0.8)
    train([weight], optimizer, 1)
    basis = optimizer.state[weight]["projector"]
    ((value, grad),) = optimizer.inner.seen
    wide = shape[0] <= shape[1]
    onto = basis @ basis.T
    assert torch.allclose(value, basis.T @ before if wide else before @ basis, atol=1e-6)
    assert torch.allclose(grad, basis.T @ weight.grad if wide else weight.grad @ basis, atol=1e-6)
    inside = onto @ before if wide else before @ onto
    assert torch.allclose(weight.detach(), before - 0.8 * 0.5 * inside, atol=1e-6)


@pytest.mark.parametrize("name", ["AdamW", "Adafactor", "Muon"])
def test_decoupled_weight_decay_acts_on_the_whole_weight(name):
    if not hasattr(torch.optim, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    (weight,) = weights((8, 12))
    optimizer = GaLore([weight], lambda g: getattr(torch.optim, name)(g, lr=0.1, weight_decay=0.5), rank=3)
    train([weight], optimizer, 1)  # a basis, so that there is an inside and an outside
    before = weight.detach().clone()
    optimizer.inner.state.clear()
    weight.grad = torch.zeros(8, 12)
    optimizer.step()
    assert torch.allclose(weight.detach(), before * (1 - 0.1 * 0.5), atol=1e-6)


def test_adafactors_steps_keep_the_size_that_they_have_relative_to_the_weight():
    def relative_step(wrap):
        (weight,) = weights((32, 48))
        before = weight.detach().clone()
        train([weight], wrap([weight]), 1)
        return ((weight.detach() - before).norm() / before.norm()).item()

    def make(groups):
        return torch.optim.Adafactor(groups, lr=0.05, weight_decay=0.0)

    plain = relative_step(make)
    ours = relative_step(lambda params: GaLore(params, make, rank=8, scale=1.0))
    # The update has the size of sqrt(r / m) of a full one; an empty proxy would make it a thousandth.
    assert ours == pytest.approx(plain * (8 / 32) ** 0.5, rel=0.3)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_stay_and_a_basis_is_found_once_per_interval(shape):
    params = weights(shape, shape)
    optimizer = GaLore(params, adamw, rank=3, update_interval=4)
    before, found = None, 0
    for update in range(10):
        for i, weight in enumerate(params):
            weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(10 * update + i))
        grads = [weight.grad.clone() for weight in params]
        with Watch() as watch:
            optimizer.step()
        assert all(torch.equal(weight.grad, grad) for weight, grad in zip(params, grads, strict=True))
        assert watch.ops["_linalg_svd"] == (2 if update % 4 == 0 else 0)
        basis = optimizer.state[params[0]]["projector"]
        found += before is None or not torch.equal(basis, before)
        before = basis.clone()
    assert found == 3


def test_between_steps_proxies_take_no_memory_and_have_their_shape():
    params = weights((8, 12), (12, 8))
    optimizer = GaLore(params, adamw, rank=3)
    for _ in range(2):
        proxies = [p for group in optimizer.inner.param_groups for p in group["params"]]
        assert [tuple(p.shape) for p in proxies] == [(3, 12), (12, 3)]
        assert [p.untyped_storage().nbytes() for p in proxies] == [4, 4]
        assert all(p.grad is None for p in proxies)
        train(params, optimizer, 1)

"""GaLore on gradients, dtypes, arguments and factories that are out of the ordinary."""

import copy
import math

import pytest
import torch
from galore_cases import adamw, same, train, weights
from torch import nn

from safetrain_core import GaLore, SafeTrainError, find_basis, projection_error


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_gradient_where_a_basis_is_due_stops_before_anything_is_changed(bad):
    params = weights((8, 12), (12, 8))
    optimizer = GaLore(params, adamw, rank=3, update_interval=2)
    train(params, optimizer, 2)
    before = copy.deepcopy([optimizer.state_dict(), params])
    params[1].grad[3, 3] = bad
    with pytest.raises(SafeTrainError, match=r"\(12, 8\) weight is not finite.*update 2 needs.*AmpTrainState"):
        optimizer.step()
    assert same([optimizer.state_dict(), params], before)


def test_a_sparse_gradient_is_refused_by_name_and_taken_where_the_weight_is_excluded():
    table = nn.Embedding(20, 8, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(SafeTrainError, match=r"\(20, 8\) weight is sparse; name the weight in GaLore's exclude"):
        GaLore([table.weight], lambda g: torch.optim.SGD(g, lr=0.1), rank=3).step()
    before = table.weight.detach().clone()
    GaLore([table.weight], lambda g: torch.optim.SGD(g, lr=0.1), rank=3, exclude=[table.weight]).step()
    assert not torch.equal(table.weight, before)


ONE_ENTRY = torch.zeros(8, 12)
ONE_ENTRY[2, 3] = 1.0

DEGENERATE = {
    "rank one": torch.outer(torch.arange(8.0), torch.ones(12)),
    "equal singular values": torch.eye(8, 12),
    "tiny": torch.full((8, 12), 1e-30),
    "huge": torch.full((8, 12), 1e30),
    "one entry": ONE_ENTRY,
}


@pytest.mark.parametrize("method", ["svd", "randomized"])
@pytest.mark.parametrize("kind", DEGENERATE)
def test_degenerate_gradients_give_an_orthonormal_basis_that_holds_them_and_a_finite_update(kind, method):
    (weight,) = weights((8, 12))
    optimizer = GaLore([weight], adamw, rank=3, update_interval=1, method=method, moments="project")
    for _ in range(3):
        weight.grad = DEGENERATE[kind].clone()
        optimizer.step()
    basis = optimizer.state[weight]["projector"]
    assert torch.allclose(basis.T @ basis, torch.eye(3), atol=1e-5)
    assert torch.isfinite(weight).all()
    # Of rank one, all of it is inside; of eight equal singular values, three are, whichever.
    lost = (5 / 8) ** 0.5 if kind == "equal singular values" else 0.0
    assert projection_error(weight.grad, basis) == pytest.approx(lost, abs=1e-6)


def test_a_weight_whose_gradient_is_zero_waits_for_its_basis_and_keeps_the_one_it_has():
    (weight,) = weights((8, 12))
    optimizer = GaLore([weight], adamw, rank=3, update_interval=2)
    before = weight.detach().clone()
    weight.grad = torch.zeros(8, 12)
    optimizer.step()
    assert "projector" not in optimizer.state[weight]
    assert torch.allclose(weight.detach(), before * (1 - 0.01 * 0.01))
    again = GaLore([weight], adamw, rank=3, update_interval=2)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train([weight], again, 1)  # update 1: none was due, but there was none
    basis = again.state[weight]["projector"].clone()
    assert again.state[weight]["inner"]["step"] == 2
    weight.grad = torch.zeros(8, 12)
    again.step()  # update 2: one is due, and zeros say nothing
    assert torch.equal(again.state[weight]["projector"], basis)


@pytest.mark.parametrize("moments", ["keep", "reset", "project"])
def test_bfloat16_weights_have_a_bfloat16_state_from_a_float32_svd_and_learn_as_float32_ones_do(moments):
    def distance(dtype):
        """Of a weight from zero, which its gradient points away from, over where it began."""
        (weight,) = weights((16, 24), dtype=dtype)
        start = weight.float().norm().item()
        options = {"rank": 4, "update_interval": 5, "scale": 1.0, "moments": moments}
        optimizer = GaLore([weight], lambda groups: torch.optim.AdamW(groups, lr=0.05), **options)
        for update in range(60):
            weight.grad = weight.detach().clone()
            if update % 5 == 0:
                expected = find_basis(weight.grad.float(), 4).to(dtype)
            optimizer.step()
        state = optimizer.state[weight]
        assert state["projector"].dtype == state["inner"]["exp_avg"].dtype == dtype
        assert torch.equal(state["projector"], expected)
        return weight.float().norm().item() / start

    assert distance(torch.bfloat16) == pytest.approx(distance(torch.float32), rel=0.1)
    assert distance(torch.float32) < 0.8


def test_reset_starts_the_moments_anew():
    (weight,) = weights((8, 12))
    optimizer = GaLore([weight], adamw, rank=3, update_interval=2, moments="reset")
    steps = []
    for update in range(5):
        train([weight], optimizer, 1, seed=update)
        steps.append(float(optimizer.state[weight]["inner"]["step"]))
    assert steps == [1, 2, 1, 2, 1]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"rank": 0}, "rank=0 must be a whole number of at least 1"),
        ({"rank": 2.5}, "rank=2.5 must be a whole number"),
        ({"rank": True}, "rank=True must be a whole number"),
        ({"update_interval": -1}, "update_interval=-1 must be a whole number of at least 1"),
        ({"update_interval": 0}, "update_interval=0"),
        ({"scale": 0.0}, "scale=0.0 must be a finite number above 0"),
        ({"scale": math.nan}, "scale=nan"),
        ({"scale": math.inf}, "scale=inf"),
        ({"max_dim": 0}, "max_dim=0"),
        ({"method": "qr"}, "method='qr' is unknown; choose one of svd, randomized"),
        ({"moments": "drop"}, "moments='drop' is unknown; choose one of keep, reset, project"),
    ],
)
def test_arguments_out_of_range_are_refused(options, told):
    with pytest.raises(ValueError, match=told):
        GaLore(weights((8, 12)), adamw, **{"rank": 3, **options})


def test_factories_that_do_not_fit_are_refused():
    params = weights((8, 12))
    for factory, told in [
        (None, "must be callable"),
        (lambda _: adamw(params), "over other weights"),
        (lambda _: "adamw", "returned a str"),
        (lambda g: torch.optim.LBFGS(g[0]["params"]), "LBFGS"),
    ]:
        with pytest.raises(ValueError, match=told):
            GaLore(params, factory, rank=3)


def test_a_sharded_weight_is_refused(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        weight = nn.Parameter(distribute_tensor(torch.zeros(8, 12), init_device_mesh("cpu", (1,)), [Shard(0)]))
        with pytest.raises(ValueError, match=r"\(8, 12\) is sharded \(DTensor\): GaLore needs whole gradients"):
            GaLore([weight], adamw, rank=3)
    finally:
        torch.distributed.destroy_process_group()


def test_no_weight_projected_is_told(caplog):
    GaLore(weights((8, 12)), adamw, rank=8)
    assert "projects none of the weights: rank=8" in caplog.text

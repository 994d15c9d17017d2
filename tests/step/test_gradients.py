"""The guard over gradients: norm, finiteness, clip."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from safetrain_core import DEFAULT_MAX_NORM, clip_global_l2_norm, has_non_finite_grad


def weights(*grads):
    made = []
    for grad in grads:
        weight = nn.Parameter(torch.zeros_like(grad))
        weight.grad = grad.clone()
        made.append(weight)
    return made


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=5), min_size=1, max_size=4),
    st.floats(0.01, 50),
)
def test_clip_equals_torchs_clip_grad_norm(rows, max_norm):
    ours, theirs = (weights(*(torch.tensor(r) for r in rows)) for _ in range(2))
    pre, post = clip_global_l2_norm(ours, max_norm)
    reference = nn.utils.clip_grad_norm_(theirs, max_norm)
    assert pre == pytest.approx(reference.item(), rel=1e-5, abs=1e-7)
    assert post == min(pre, max_norm)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)


def test_list_generator_tensor_and_module_are_all_accepted():
    model = nn.Linear(3, 2)
    for params in (list(model.parameters()), model.parameters(), model):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        assert clip_global_l2_norm(params, 1.0) == (pytest.approx(math.sqrt(8)), 1.0)
    model.weight.grad = torch.ones_like(model.weight)
    assert clip_global_l2_norm(model.weight, 10.0)[0] == pytest.approx(math.sqrt(6))


@pytest.mark.parametrize("bad", [0, 0.0, -1.0, float("nan")])
def test_max_norm_that_is_not_above_zero_is_refused(bad):
    (weight,) = weights(torch.tensor([3.0, 4.0]))
    with pytest.raises(ValueError, match="max_norm"):
        clip_global_l2_norm([weight], bad)
    assert weight.grad.tolist() == [3.0, 4.0]


def test_default_max_norm_is_one():
    assert DEFAULT_MAX_NORM == 1.0
    assert clip_global_l2_norm(weights(torch.tensor([3.0, 4.0]))) == (5.0, 1.0)


def test_gradients_below_the_threshold_are_not_written():
    (weight,) = weights(torch.tensor([0.3, 0.4]))
    version = weight.grad._version
    assert clip_global_l2_norm([weight], 1.0) == (pytest.approx(0.5), pytest.approx(0.5))
    assert weight.grad._version == version


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_bad_value_among_good_ones_leaves_gradients_as_they_were(bad):
    given_grads = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, bad, 5.0])]
    made = weights(*given_grads)
    pre, post = clip_global_l2_norm(made, 1.0)
    assert not math.isfinite(pre)
    assert not math.isfinite(post)
    assert has_non_finite_grad(made)
    for weight, grad in zip(made, given_grads, strict=True):
        assert torch.equal(weight.grad.nan_to_num(7.0), grad.nan_to_num(7.0))


@pytest.mark.parametrize(
    ("grad", "norm"),
    [
        (torch.full((100,), 1e20), 1e21),
        (torch.full((100,), 3e38), 3e39),
        (torch.full((4,), 60000.0, dtype=torch.float16), 120000.0),
        (torch.full((4,), 2e38, dtype=torch.bfloat16), 4e38),
        (torch.full((4,), 1e200, dtype=torch.float64), 2e200),
    ],
)
def test_finite_gradients_whose_squares_overflow_have_a_norm_and_are_really_clipped(grad, norm):
    made = weights(grad)
    assert not has_non_finite_grad(made)
    pre, post = clip_global_l2_norm(made, 1.0)
    assert pre == pytest.approx(norm, rel=1e-2)
    assert post == 1.0
    clipped = made[0].grad.double()
    assert torch.linalg.vector_norm(clipped).item() == pytest.approx(1.0, rel=1e-2)
    assert (clipped != 0).all()


def test_mixed_dtypes_share_one_norm():
    made = weights(
        torch.tensor([3.0]),
        torch.tensor([4.0], dtype=torch.float64),
        torch.tensor([12.0], dtype=torch.bfloat16),
    )
    assert clip_global_l2_norm(made, 1.0)[0] == pytest.approx(13.0)
    assert [w.grad.dtype for w in made] == [torch.float32, torch.float64, torch.bfloat16]


def test_no_gradients_is_a_norm_of_zero_and_empty_tensors_are_passed_over():
    assert clip_global_l2_norm([nn.Parameter(torch.zeros(2))], 1.0) == (0.0, 0.0)
    assert not has_non_finite_grad([nn.Parameter(torch.zeros(2))])
    assert clip_global_l2_norm(weights(torch.zeros(0), torch.tensor([3.0, 4.0])), 1.0) == (5.0, 1.0)
    assert not has_non_finite_grad(weights(torch.zeros(0)))


def test_a_parameter_given_twice_counts_once():
    (weight,) = weights(torch.tensor([3.0, 4.0]))
    assert clip_global_l2_norm([weight, weight], 1.0) == (5.0, 1.0)
    assert weight.grad.tolist() == pytest.approx([0.6, 0.8])


def test_sparse_gradients_are_refused_by_name():
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1, 1, 3])).sum().backward()
    with pytest.raises(ValueError, match="sparse=False"):
        clip_global_l2_norm(embedding, 1.0)

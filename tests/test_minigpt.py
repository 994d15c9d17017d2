"""MiniGPT: causal, tied or not, of the size that was asked for."""

import math

import pytest
import torch
from torch import nn

from safetrain_core import AmpTrainState, MiniGPT, MiniGPTConfig, next_token_loss

SMALL = {"vocab_size": 11, "context": 12, "layers": 2, "heads": 2, "width": 16}


def gpt(**changes):
    torch.manual_seed(0)
    return MiniGPT(MiniGPTConfig(**{**SMALL, **changes}))


def test_a_later_token_does_not_change_an_earlier_logit():
    model, ids = gpt(), torch.randint(0, 11, (1, 12), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 11
    a, b = model(ids), model(changed)
    assert torch.equal(a[0, :7], b[0, :7])
    assert not torch.allclose(a[0, 7:], b[0, 7:])


@pytest.mark.parametrize("tied", [True, False])
def test_parameter_count_is_the_closed_form(tied):
    v, t, n, d = 11, 12, 2, 16
    block = 4 * d * d + 8 * d * d + 5 * d + 4 * d  # attention, mlp weights, mlp biases, two norms
    expected = v * d + t * d + n * block + 2 * d + (0 if tied else v * d)
    assert sum(p.numel() for p in gpt(tied=tied).parameters()) == expected
    assert (gpt(tied=tied).head.weight is gpt(tied=tied).tokens.weight) is False
    model = gpt(tied=tied)
    assert (model.head.weight is model.tokens.weight) is tied


def test_first_loss_is_about_uniform_and_training_lowers_it():
    model = gpt()
    ids = torch.randint(0, 11, (4, 13), generator=torch.Generator().manual_seed(1))
    state = AmpTrainState(model, 1e-2, amp_dtype=torch.float32, loss_fn=next_token_loss)
    rows = [state.step(ids[:, :-1], ids[:, 1:]) for _ in range(40)]
    assert rows[0].loss == pytest.approx(math.log(11), abs=0.05)
    assert rows[-1].loss < 0.5 * rows[0].loss


def test_dropout_acts_in_training_only():
    model, ids = gpt(dropout=0.5), torch.zeros(1, 12, dtype=torch.int64)
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))


def test_targets_of_minus_100_are_left_out():
    logits = torch.randn(1, 4, 11, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[1, 2, -100, -100]])
    assert next_token_loss(logits, targets).item() == pytest.approx(
        nn.functional.cross_entropy(logits[0, :2], targets[0, :2]).item()
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"width": 15}, "not a multiple"),
        ({"layers": 0}, "layers=0"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"context": -1}, "context=-1"),
    ],
)
def test_a_size_that_cannot_be_is_refused(changes, told):
    with pytest.raises(ValueError, match=told):
        gpt(**changes)


def test_a_sequence_longer_than_the_context_is_refused():
    with pytest.raises(ValueError, match="sequence of 13 tokens, but the context is 12"):
        gpt()(torch.zeros(1, 13, dtype=torch.int64))

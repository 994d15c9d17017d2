"""Accumulation: K micro-batches are the one big batch, by equal weights or by tokens, and sync once."""

import contextlib
import copy

import pytest
import torch
from measure import CountsSync
from torch import nn

from safetrain_core import AmpTrainState, MiniGPT, MiniGPTConfig, next_token_loss
from safetrain_core.step.accumulate import (
    effective_batch_size,
    loss_scaled_for_accum,
    no_sync_context,
    scale_lr_with_batch,
    train_one_optimizer_step,
    windows,
    zero_grads,
)

BOTH_WAYS = pytest.mark.parametrize("check", [True, False])


def gpt():
    torch.manual_seed(0)
    return MiniGPT(MiniGPTConfig(vocab_size=13, context=8, layers=2, heads=2, width=16))


def tokens(rows, seed=0):
    ids = torch.randint(0, 13, (rows, 9), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:].clone()


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_k_micro_batches_have_the_gradient_of_the_one_batch(k):
    inputs, targets = tokens(8)
    whole, parts = gpt(), gpt()
    next_token_loss(whole(inputs), targets).backward()
    zero_grads(parts)
    step = train_one_optimizer_step(
        parts,
        torch.optim.SGD(parts.parameters(), lr=0.0),
        list(zip(inputs.chunk(k), targets.chunk(k), strict=True)),
        next_token_loss,
    )
    assert step.loss == pytest.approx(next_token_loss(whole(inputs), targets).item(), abs=1e-5)
    for name, grad in gradients(parts).items():
        torch.testing.assert_close(grad, whole.get_parameter(name).grad, atol=1e-6, rtol=1e-4)


def test_the_undivided_loss_steps_k_times_too_far():
    inputs, targets = tokens(8)
    right, wrong = gpt(), gpt()
    chunks = list(zip(inputs.chunk(4), targets.chunk(4), strict=True))
    for x, y in chunks:
        loss_scaled_for_accum(right(x), y, 4, next_token_loss).backward()
        next_token_loss(wrong(x), y).backward()
    ratio = nn.utils.get_total_norm(gradients(wrong).values()) / nn.utils.get_total_norm(gradients(right).values())
    assert ratio.item() == pytest.approx(4.0, rel=1e-4)


@pytest.mark.parametrize(("until_last", "syncs"), [(True, 1), (False, 5)])
def test_gradients_are_synced_on_the_last_micro_batch_only(until_last, syncs):
    model = CountsSync()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(torch.ones(2, 3), torch.zeros(2, 1))] * 5
    step = train_one_optimizer_step(model, sgd, batches, nn.functional.mse_loss, no_sync_until_last=until_last)
    assert step.syncs == model.synced == syncs


@pytest.mark.parametrize("weighting", ["equal", "tokens"])
def test_the_guarded_window_syncs_once_even_if_its_last_micro_batch_has_no_valid_token(weighting):
    model = CountsSync()
    state = AmpTrainState(model, amp_dtype=torch.float32, loss_weighting=weighting, loss_fn=lambda out, y: out.sum())
    last = torch.full((2,), -100) if weighting == "tokens" else torch.zeros(2, dtype=torch.int64)
    state.step_window([(torch.ones(2, 3), torch.zeros(2, dtype=torch.int64))] * 3 + [(torch.ones(2, 3), last)])
    assert model.synced == 1


def test_no_sync_context_knows_fsdp2s_switch_and_puts_it_back_after_an_error():
    class Sharded(nn.Linear):
        switched = ()

        def set_requires_gradient_sync(self, on):
            self.switched = (*self.switched, on)

    model = Sharded(1, 1)
    with contextlib.suppress(KeyError), no_sync_context(model):
        raise KeyError
    assert model.switched == (False, True)


# --- tokens --------------------------------------------------------------------------------------------------


def uneven():
    """Micro-batches with 2 and 8 valid tokens, and the one big batch of both."""
    inputs, targets = tokens(2)
    targets[0, 2:] = -100
    return [(inputs[:1], targets[:1]), (inputs[1:], targets[1:])], (inputs, targets)


@BOTH_WAYS
@pytest.mark.parametrize("amp_dtype", [torch.float32, torch.float16])
def test_token_weighted_micro_batches_have_gradient_and_loss_of_the_one_batch(check, amp_dtype):
    parts, whole = uneven()
    norms = []
    for window in (parts, [whole]):
        state = AmpTrainState(
            gpt(),
            amp_dtype=amp_dtype,
            max_norm=0,
            loss_fn=next_token_loss,
            loss_weighting="tokens",
            check_loss_before_backward=check,
            init_scale=256.0,
        )
        row = state.step_window(window)
        norms.append((row.loss, row.pre_clip, gradients(state.model)))
    tolerance = 1e-6 if amp_dtype is torch.float32 else 2e-3
    assert norms[0][0] == pytest.approx(norms[1][0], abs=tolerance)
    assert norms[0][1] == pytest.approx(norms[1][1], rel=1e-5 if amp_dtype is torch.float32 else 1e-2)
    for name, grad in norms[0][2].items():
        torch.testing.assert_close(grad, norms[1][2][name], atol=tolerance, rtol=1e-2)


def test_equal_weights_are_wrong_there_and_a_doubled_weight_is_caught():
    parts, whole = uneven()
    equal = AmpTrainState(gpt(), amp_dtype=torch.float32, max_norm=0, loss_fn=next_token_loss).step_window(parts)
    right = AmpTrainState(gpt(), amp_dtype=torch.float32, max_norm=0, loss_fn=next_token_loss).step(*whole)
    assert abs(equal.loss - right.loss) > 1e-3
    assert abs(equal.pre_clip / right.pre_clip - 1) > 0.05


@BOTH_WAYS
def test_a_micro_batch_without_a_valid_token_counts_nothing_and_a_window_of_them_is_refused(check):
    inputs, targets = tokens(2)
    empty = torch.full_like(targets[:1], -100)
    options = {
        "amp_dtype": torch.float32,
        "loss_fn": next_token_loss,
        "loss_weighting": "tokens",
        "check_loss_before_backward": check,
    }
    with_empty, without = AmpTrainState(gpt(), **options), AmpTrainState(gpt(), **options)
    row = with_empty.step_window([(inputs[:1], empty), (inputs[1:], targets[1:])])
    assert row == without.step(inputs[1:], targets[1:])
    before = copy.deepcopy(with_empty.model.state_dict())
    assert with_empty.step(inputs[:1], empty).skip_reason == "non_finite_loss"
    assert all(torch.equal(before[key], value) for key, value in with_empty.model.state_dict().items())


# --- windows -------------------------------------------------------------------------------------------------


@BOTH_WAYS
def test_a_nan_in_mid_window_drops_it_whole_and_the_next_starts_afresh(check):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    state = AmpTrainState(
        model,
        amp_dtype=torch.float32,
        check_loss_before_backward=check,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )
    good = (torch.ones(2, 3), torch.zeros(2, 1))
    bad = (torch.ones(2, 3), torch.full((2, 1), torch.nan))
    reference = copy.deepcopy(model)
    assert state.step_window([good, bad, good, good]).skipped
    row = state.step_window([good, good])
    loss = nn.functional.mse_loss(reference(good[0]), good[1])
    assert row.loss == loss.item()
    loss.backward()
    assert row.pre_clip == pytest.approx(nn.utils.get_total_norm([p.grad for p in reference.parameters()]).item())


@pytest.mark.parametrize(("count", "k", "sizes"), [(10, 4, [4, 4, 2]), (3, 4, [3]), (8, 4, [4, 4]), (0, 4, [])])
def test_windows_hold_k_batches_and_the_last_what_is_left(count, k, sizes):
    assert [len(w) for w in windows(iter(range(count)), k)] == sizes


@pytest.mark.parametrize(
    "call",
    [
        lambda: list(windows([1], 0)),
        lambda: loss_scaled_for_accum(torch.ones(1), torch.ones(1), 0, nn.functional.mse_loss),
        lambda: effective_batch_size(0, 1),
        lambda: effective_batch_size(1, 1, 0),
        lambda: scale_lr_with_batch(0.1, 0),
        lambda: train_one_optimizer_step(nn.Linear(1, 1), None, [], nn.functional.mse_loss),
        lambda: AmpTrainState(nn.Linear(1, 1), loss_weighting="words"),
    ],
)
def test_zero_micro_batches_or_an_unknown_rule_are_refused(call):
    with pytest.raises(ValueError, match=r"must be|at least 1"):
        call()

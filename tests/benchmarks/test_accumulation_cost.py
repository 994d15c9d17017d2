"""What a window of four micro-batches costs beside bare PyTorch and two peers, and what it sends and reads."""

import pytest
import torch
from measure import CountsSync, Watch, paired_ratio
from peer_loops import LOOPS, gpt, loss_of, tokens
from torch import nn

from safetrain_core import AmpTrainState, train_one_optimizer_step

AREA = "accumulation"
K = 4
WINDOW = [tokens(number) for number in range(K)]


def guarded(**options):
    state = AmpTrainState(
        gpt(), 1e-3, amp_dtype=torch.float32, loss_fn=loss_of, keep_rows=10,
        **{"check_loss_before_backward": False, **options},
    )  # fmt: skip
    return lambda: state.step_window(WINDOW), state


@pytest.mark.parametrize("name", LOOPS)
def test_a_window_of_four_beside(claim, name):
    theirs, (ours, _) = LOOPS[name](torch.float32, K), guarded()
    for _ in range(3):
        a, b = theirs(), ours().loss
    assert b == pytest.approx(a, rel=1e-3), "they train alike"
    ratio = paired_ratio(ours, theirs, rounds=41)
    name = name if name.endswith("loop") else f"{name} loop"
    claim(f"guarded window / {name}, {K} micro-batches", ratio, "<=", 1.03, "x")


def test_reads_and_passes_of_a_window(claim, compare):
    for options, name, most in (
        ({}, "losses looked at after the last backward", 1),
        ({"check_loss_before_backward": True}, "looked at before each backward", 1 + K),
    ):
        ours, state = guarded(**options)
        ours()
        with Watch(state.optimizer) as watch:
            ours()
        claim(f"host reads per window of {K}, {name}", sum(watch.reads.values()), "<=", most)
    theirs = LOOPS["bare loop"](torch.float32, K)
    theirs()
    with Watch(theirs.optimizer) as watch:
        theirs()
    compare(f"host reads per window of {K}, bare loop", sum(watch.reads.values()))


def test_syncs_of_a_window(claim, compare):
    batches = [(torch.ones(2, 3), torch.zeros(2, 1))] * K
    for last_only in (True, False):
        model = CountsSync()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        train_one_optimizer_step(model, sgd, batches, nn.functional.mse_loss, no_sync_until_last=last_only)
        if last_only:
            claim(f"gradient syncs per window of {K}", model.synced, "<=", 1)
        else:
            compare(f"gradient syncs per window of {K}, without no_sync", model.synced)


def test_how_far_a_window_is_from_the_one_batch(claim):
    whole = [(torch.cat([x for x, _ in WINDOW]), torch.cat([y for _, y in WINDOW]))]
    norms = []
    for window in (WINDOW, whole):
        state = AmpTrainState(gpt(), 1e-3, amp_dtype=torch.float32, loss_fn=loss_of)
        norms.append(state.step_window(window).pre_clip)
    claim("gradient norm of a window / of the one batch, off by", abs(norms[0] / norms[1] - 1), "<=", 1e-5)

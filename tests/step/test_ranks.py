"""The guarded step over real ranks, with FSDP2 and DDP: equal to one process on the same global batch, alike on all."""

import math

import needs
import pytest
import rank_steps
import torch
from rank_steps import batches

from safetrain_core import launch
from safetrain_core.distributed import INTERRUPT, PAUSE, SAVE, TERMINATE

KINDS = [pytest.param("fsdp2", marks=needs.fsdp2), "ddp"]
FSDP2_ON_2_AND_3 = [pytest.param("fsdp2", count, marks=needs.fsdp2) for count in (2, 3)]
# With 3 ranks, 7 outputs do not divide, and two ranks hold nothing of the layer of 1 output.


def on_ranks(count, worker, *args, **options):
    """What each rank returned."""
    return launch(rank_steps.call, count, worker, args, options, timeout_s=120)


def same_bits(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def assert_close(a, b, rtol=1e-5):
    assert a.keys() == b.keys()
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=rtol, atol=1e-7)


def assert_rows_close(rows, expected, rtol=1e-6):
    told = [[r.loss, r.pre_clip, r.post_clip] for r in rows]
    assert told == [pytest.approx([r.loss, r.pre_clip, r.post_clip], rel=rtol) for r in expected]
    assert [(r.step, r.lr, r.skip_reason) for r in rows] == [(r.step, r.lr, r.skip_reason) for r in expected]


def alike(ranks):
    """Rank 0's, after a look whether every rank has the same rows, weights and moments."""
    for other in ranks[1:]:
        assert repr(other["rows"]) == repr(ranks[0]["rows"])  # repr: NaN equals NaN there, and floats are exact
        assert same_bits(other["weights"], ranks[0]["weights"])
        assert same_bits(other["moments"], ranks[0]["moments"])
    return ranks[0]


def windows_of(windows, numbers):
    return [windows[i] for i in numbers]


# --- equal to one process ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "count"), [*FSDP2_ON_2_AND_3, ("ddp", 3)])
def test_rows_weights_and_moments_equal_those_of_one_process_on_the_same_global_batch(kind, count):
    windows = batches(4)
    one = rank_steps.trains(None, windows, max_norm=0.3)
    several = alike(on_ranks(count, "trains", kind, windows, max_norm=0.3))
    assert_rows_close(several["rows"], one["rows"])
    assert all(r.pre_clip > 0.3 and r.post_clip == 0.3 for r in one["rows"]), "a clip was due each time"
    assert_close(several["weights"], one["weights"])
    assert_close(several["moments"], one["moments"], rtol=1e-4)
    assert several["reduced"] == [1] * 4, "one all-reduce for a healthy step"


@pytest.mark.parametrize("kind", KINDS)
def test_details_equal_those_of_one_process_where_ranks_hold_nothing_of_a_weight(kind):
    windows = batches(2)
    one = rank_steps.trains(None, windows, detail=True)["details"]
    ranks = on_ranks(3, "trains", kind, windows, detail=True)
    assert all(repr(rank["details"]) == repr(ranks[0]["details"]) for rank in ranks)
    for (norms, *spans), (norms_of_one, *spans_of_one) in zip(ranks[0]["details"], one, strict=True):
        assert norms == pytest.approx(norms_of_one, rel=1e-6)
        assert spans == pytest.approx(spans_of_one, rel=1e-6)
    assert ranks[0]["reduced"] == [1, 1], "and no all-reduce more than without"


@pytest.mark.parametrize("kind", KINDS)
def test_the_guard_by_itself_clips_to_the_norm_of_one_process_and_finds_what_one_rank_has(kind):
    pre, post, finite, grads, _ = rank_steps.guards(None, 0.01)
    assert pre > 0.01
    ranks = on_ranks(3, "guards", kind, 0.01)
    assert all(rank[:3] == ranks[0][:3] and same_bits(rank[3], ranks[0][3]) for rank in ranks)
    assert ranks[0][0] == pytest.approx(pre, rel=1e-6)
    assert (ranks[0][1], ranks[0][2]) == (post, finite) == (0.01, False)
    assert_close(ranks[0][3], grads)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in ranks[0][3].values()))
    assert norm == pytest.approx(0.01, rel=1e-6)
    if kind == "fsdp2":  # DDP's gradients are copies: a NaN that is put into one is that rank's alone
        for found in (rank[4] for rank in ranks):
            assert repr(found) == "[(True, nan, nan), True, (True, inf, inf), True]"


@pytest.mark.parametrize("kind", KINDS)
def test_a_huge_but_finite_gradient_has_its_norm_and_does_not_vanish(kind):
    one = rank_steps.huge_gradients(None)
    assert one[0] == pytest.approx(1e21, rel=1e-6)
    for pre, post, reason, weight in on_ranks(3, "huge_gradients", kind):
        assert (pre, post, reason) == (pytest.approx(1e21, rel=1e-6), 1.0, None)
        torch.testing.assert_close(weight, one[3])


# --- one rank's fault is everybody's ------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "count"), [FSDP2_ON_2_AND_3[1], ("ddp", 2)])
def test_a_fault_on_the_last_rank_skips_the_step_on_all_and_leaves_no_trace(kind, count):
    windows, last = batches(5), count - 1
    without = alike(on_ranks(count, "trains", kind, windows_of(windows, (0, 2, 4)), norm=True))
    faults = [(1, last, "nan loss"), (3, last, "inf gradient")]
    faulty = alike(on_ranks(count, "trains", kind, windows, norm=True, faults=faults))
    reasons = [r.skip_reason for r in faulty["rows"]]
    assert reasons == [None, "non_finite_loss", None, "non_finite_grad", None]
    assert same_bits(faulty["weights"], without["weights"])
    assert same_bits(faulty["moments"], without["moments"])
    if kind == "fsdp2":  # DDP hands rank 0's buffers to all at each forward, and each has its own at the end
        assert same_bits(faulty["buffers"], without["buffers"])


@pytest.mark.parametrize("kind", KINDS)
def test_an_explosion_is_decided_alike_though_one_rank_alone_sees_it(kind):
    windows, limits = batches(5), {"max_norm": 0.0, "inf_post_clip_threshold": 5.0}
    faults = [(1, None, "large gradient"), (3, 1, "large gradient")]
    several = alike(on_ranks(2, "trains", kind, windows, faults=faults, **limits))
    reasons = [r.skip_reason for r in several["rows"]]
    assert reasons == [None, "post_clip_explosion", None, "post_clip_explosion", None]
    one = rank_steps.trains(None, windows[:3], faults=faults[:1], **limits)
    assert_rows_close(several["rows"][:3], one["rows"], rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_an_explosion_of_one_element_which_one_rank_alone_holds_is_one_for_all(kind):
    windows = batches(1)
    ((_, largest, _),) = rank_steps.trains(None, windows, detail=True, max_norm=0.0)["details"]
    for share, reason in ((0.99, "post_clip_explosion"), (1.01, None)):
        limits = {"max_norm": 0.0, "inf_post_clip_threshold": share * largest}
        several = alike(on_ranks(3, "trains", kind, windows, **limits))
        assert [r.skip_reason for r in several["rows"]] == [reason]


@needs.fsdp2
def test_what_ranks_ask_for_is_told_to_all_beside_a_healthy_step_and_beside_a_refused_one():
    asked = [(0, SAVE, INTERRUPT), (0, 0, 0), (PAUSE, TERMINATE, SAVE), (0, 0, 0)]
    ranks = on_ranks(3, "trains", "fsdp2", batches(4), requests=asked, faults=[(2, 0, "nan loss")])
    for rank in ranks:
        assert rank["requests"] == [SAVE + INTERRUPT, 0, PAUSE + TERMINATE + SAVE, 0]
        assert [r.skip_reason for r in rank["rows"]] == [None, None, "non_finite_loss", None]


# --- a window given up --------------------------------------------------------------------------------------------


@needs.fsdp2
def test_a_window_given_up_anywhere_leaves_nothing_for_the_next():
    windows = batches(9)
    places = ("raises in 1", "raises in 2", "raises in the model in 1", "raises in the model in 2")
    faults = [(2 * i + 1, None, what) for i, what in enumerate(places)]
    without = alike(on_ranks(3, "trains", "fsdp2", windows[::2], norm=True))
    given_up = alike(on_ranks(3, "trains", "fsdp2", windows, norm=True, faults=faults))
    assert [(r.loss, r.pre_clip) for r in given_up["rows"]] == [(r.loss, r.pre_clip) for r in without["rows"]]
    assert same_bits(given_up["weights"], without["weights"])
    assert same_bits(given_up["moments"], without["moments"])
    assert same_bits(given_up["buffers"], without["buffers"])


def test_a_window_given_up_under_ddp_leaves_nothing_for_the_next():
    """Not to the bit: DDP still waits for the backward of the last micro-batch, and syncs that of the next one, too."""
    windows = batches(3)
    without = alike(on_ranks(2, "trains", "ddp", windows[::2], norm=True))
    given_up = alike(on_ranks(2, "trains", "ddp", windows, norm=True, faults=[(1, None, "raises in 2")]))
    assert_rows_close(given_up["rows"], without["rows"])
    assert_close(given_up["weights"], without["weights"])
    assert_close(given_up["buffers"], without["buffers"])


# --- token weights ------------------------------------------------------------------------------------------------


def texts(*valid):
    """One window: micro-batches of as many rows as there are ranks, each with so many valid tokens of 4."""
    generator = torch.Generator().manual_seed(2)
    window = []
    for counts in valid:
        inputs, targets = (
            torch.randint(0, rank_steps.VOCABULARY, (len(counts), 4), generator=generator) for _ in range(2)
        )
        for row, count in enumerate(counts):
            targets[row, count:] = -100
        window.append((inputs, targets))
    return window


@pytest.mark.parametrize("kind", KINDS)
def test_each_valid_token_weighs_the_same_wherever_it_is_and_ranks_without_one_do_not_hang(kind):
    windows = [
        texts((4, 1), (2, 3)),  # different counts
        texts((4, 1), (2, 0)),  # one micro-batch of one rank has none
        texts((4, 0), (2, 0)),  # one rank has none
        texts((0, 0), (2, 1)),  # a micro-batch has none
        texts((3, 2), (0, 0)),  # the last micro-batch, which syncs, has none
        texts((0, 4), (3, 0)),  # each rank has one without
        texts((0, 0), (0, 0)),  # nobody has any: refused
        texts((4, 2), (1, 3)),
    ]
    one = rank_steps.reads_tokens(None, windows, "tokens")
    several = alike(on_ranks(2, "reads_tokens", kind, windows, "tokens"))
    assert [r.skip_reason for r in several["rows"]] == [None] * 6 + ["non_finite_loss", None]
    taken = [0, 1, 2, 3, 4, 5, 7]
    assert_rows_close(windows_of(several["rows"], taken), windows_of(one["rows"], taken))
    assert_close(several["weights"], one["weights"])
    assert several["reduced"] == [2] * 8, "one for the counts, one for the verdict"


# --- float16 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_of_one_rank_halves_the_scale_on_all_and_good_steps_double_it_on_all(kind):
    ranks = on_ranks(2, "scales", kind, False)
    assert repr(ranks[0][0]) == repr(ranks[1][0])
    assert same_bits(ranks[0][1], ranks[1][1])
    assert ranks[0][0] == [
        (None, 1024.0, 1024.0, 1),
        ("non_finite_grad", 1024.0, 512.0, 0),
        (None, 512.0, 512.0, 1),
        (None, 512.0, 1024.0, 0),
    ]


@needs.fsdp2
def test_a_factor_that_is_far_too_large_halves_on_all_until_it_fits():
    ranks = on_ranks(2, "scales", "fsdp2", True)
    assert repr(ranks[0][0]) == repr(ranks[1][0])
    told = [(reason, after / before) for reason, before, after, _ in ranks[0][0]]
    assert set(told) == {("non_finite_grad", 0.5), (None, 1.0)}
    assert told[0] == ("non_finite_grad", 0.5)

"""The experiments behind lesson 02's pictures and controls, and its two ranks."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

import pytest
import torch
from support import accumulation as lab
from support import ranks, toy

# --- the loss that is not divided ------------------------------------------------------------------------------


@pytest.mark.parametrize("accum", [2, 8])
@pytest.mark.parametrize(("optimizer", "factor"), [("sgd", 1.0), ("adamw", 0.0)])
def test_whole_losses_lengthen_the_step_by_k_for_sgd_and_not_for_adamw(
    accum: int, optimizer: str, factor: float
) -> None:
    batch = next(toy.text_batches(1, 0, accum * 2))
    wrong, right = (lab.step_length(divide, optimizer, accum, batch) for divide in (False, True))
    assert wrong / right == pytest.approx(accum**factor, rel=0.02)


def test_whole_losses_lose_sgd_and_leave_adamw_its_curve_with_a_norm_k_times_too_large() -> None:
    lost, _ = lab.divided_run(False)
    sound, _ = lab.divided_run(True)
    assert not lost[-1] < 10 * sound[-1]
    hidden, large = lab.divided_run(False, "adamw")
    right, norms = lab.divided_run(True, "adamw")
    assert hidden[-1] == pytest.approx(right[-1], rel=0.05)
    assert large[0] / norms[0] == pytest.approx(lab.ACCUM, rel=1e-3)


def test_one_micro_batch_needs_no_division() -> None:
    assert lab.divided_run(False, accum=1, steps=4) == lab.divided_run(True, accum=1, steps=4)


# --- tokens ----------------------------------------------------------------------------------------------------


def test_lines_differ_in_length_and_a_window_holds_the_same_tokens_as_its_big_batch() -> None:
    assert len({len(line) for line in lab.lines()}) > 20
    for micro, whole in lab.line_windows(3, accum=4, rows=8, seed=2):
        counts = lab.token_counts(micro)
        assert min(counts) > 0
        assert counts[-1] > 1.5 * counts[0]
        assert lab.token_counts([whole]) == [sum(counts)]
        assert {x.shape[1] for x, _ in micro} != {whole[0].shape[1]}, "each is padded to its own longest line"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_token_shares_give_the_big_batchs_gradient_and_equal_shares_do_not(seed: int) -> None:
    ((micro, whole),) = lab.line_windows(1, seed=seed)
    model, counts = toy.tiny_gpt(seed), lab.token_counts(micro)
    right = lab.gradient_of(model, [whole], [1.0]).clone()
    assert lab.apart(lab.gradient_of(model, micro, [n / sum(counts) for n in counts]), right) < 1e-5
    assert lab.apart(lab.gradient_of(model, micro, [0.25] * 4), right) > 0.05


# --- once per window -------------------------------------------------------------------------------------------


def test_clipping_each_time_leaves_less_of_the_earlier_micro_batches_and_says_how_much() -> None:
    model, batches = toy.tiny_gpt(), list(toy.text_batches(4, 0, 8))
    got, left = lab.clipped_each_time(model, batches, 0.25)
    assert left == sorted(left)
    assert left[-1] > 2 * left[0]
    assert lab.apart(got, lab.gradient_of(model, batches, [share / 4 for share in left])) < 1e-4
    loose, left = lab.clipped_each_time(model, batches, 1e9)
    assert left == [1.0] * 4
    assert lab.apart(loose, lab.gradient_of(model, batches, [0.25] * 4)) < 1e-5


@pytest.mark.parametrize("seed", [0, 3])
def test_batchnorm_breaks_the_equality(seed: int) -> None:
    assert lab.batchnorm_gap(seed) > 0.01


# --- two ranks -------------------------------------------------------------------------------------------------


def test_two_ranks_reduce_k_times_per_update_without_no_sync_and_once_with_it() -> None:
    sizes = {"updates": 2, "accum": 3, "rows": 2, "seed": 1}
    start = time.monotonic()
    found = ranks.two_ranks(**sizes)
    assert time.monotonic() - start < 60
    assert list(found) == list(ranks.WAYS)
    for way, one in found.items():
        assert one.per_update == ([3, 3] if way == ranks.EVERY else [1, 1])
    size = 4 * sum(p.numel() for p in toy.tiny_gpt().parameters())
    assert found[ranks.LAST].bytes_per_update == size
    assert found[ranks.EVERY].bytes_per_update == 3 * size
    for of_lines in (False, True):
        alone = ranks.one_process(**sizes, of_lines=of_lines)
        for way, one in found.items():
            if (way in ranks.OF_LINES) is of_lines:
                same = torch.allclose(one.weights, alone, atol=1e-5, rtol=1e-4)
                assert same is (way != ranks.BY_COUNT), way


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_rank_that_fails_ends_the_other_and_its_error_is_the_one_shown(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"^rank 1 ended with status 1: ran out of luck$"):
        ranks.run_together([python("import time; time.sleep(60)"), python("exit('ran out of luck')")], tmp_path, 60)
    assert time.monotonic() - start < 20


def test_ranks_that_take_too_long_are_ended(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"did not end within 0\.2 s"):
        ranks.run_together([python("import time; time.sleep(60)")] * 2, tmp_path, 0.2)
    assert time.monotonic() - start < 10


def test_an_error_inside_a_rank_reaches_the_caller() -> None:
    with pytest.raises(RuntimeError, match=r"rank \d ended with status 1: .*non-empty"):
        ranks.two_ranks(updates=1, rows=0)


# --- cost ------------------------------------------------------------------------------------------------------


def test_time_per_update_is_measured_for_each_k_and_grows() -> None:
    seconds = lab.update_seconds([1, 8], rows=4, steps=5)
    assert list(seconds) == [1, 8]
    assert seconds[8] > 2 * seconds[1]


def test_kept_bytes_are_in_proportion_to_the_rows() -> None:
    assert lab.kept_bytes(32) / lab.kept_bytes(4) == pytest.approx(8, rel=0.02)


# --- the linear rule and the pictures --------------------------------------------------------------------------


@pytest.mark.parametrize("rule", list(lab.RULES))
def test_every_rule_is_the_same_run_at_one_micro_batch_per_step(rule: str) -> None:
    assert lab.rule_run(1, rule, 10) == lab.rule_run(1, "as it was", 10)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_linear_rule_tracks_the_small_batch_at_4_and_not_at_32(seed: int) -> None:
    small = lab.rule_end(lab.rule_run(1, "as it was", seed=seed))
    lag, scaled = (lab.rule_end(lab.rule_run(4, rule, seed=seed)) for rule in ("as it was", "x K"))
    assert abs(scaled - small) < 0.5 * (lag - small)
    slow, wild = (lab.rule_end(lab.rule_run(32, rule, seed=seed)) for rule in ("as it was", "x K"))
    assert not wild < slow


def test_pictures_have_labelled_axes_and_say_what_they_show() -> None:
    figures = [
        lab.divided_figure({"a": [2.0, 1.0], "b": [2.0, 3.0, math.nan]}),
        lab.throughput_figure({1: 0.1, 4: 0.4}, 8),
        lab.rule_figure({"a": [3.0] * 40, "b": [4.0] * 40}, "title"),
    ]
    for picture in (lab.divided_picture, lab.rule_picture):
        knobs = {lab.divided_picture: (2, "sgd"), lab.rule_picture: (32, "x K")}[picture]
        figure, text = picture(*knobs)
        assert len(text.split()) > 8
        figures.append(figure)
    for figure in figures:
        axes = figure.axes[0]
        assert axes.get_xlabel()
        assert axes.get_ylabel()
        assert axes.get_title(loc="left")
    assert "then NaN" in [text.get_text() for text in figures[0].axes[0].texts]
    (rates,) = figures[1].axes[0].lines
    assert list(rates.get_ydata()) == pytest.approx([80, 80])
    assert "diverged" in figures[-1].axes[0].get_title(loc="left")

"""The experiments behind lesson 01's pictures and controls."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from support import clipping_amp as lab
from support import toy
from support.counting import activation_bytes, gradient_passes, host_reads


def test_one_bad_batch_ruins_the_unclipped_run_and_not_the_clipped_one() -> None:
    naive, norms = lab.spike_run(max_norm=0)
    clipped, _ = lab.spike_run(max_norm=1.0)
    bad = lab.BAD_STEP - 1
    assert norms[bad] > 50 * sorted(norms[:bad])[bad // 2]
    assert max(x for x in naive[bad + 1 :] if math.isfinite(x)) > 10 * naive[bad]
    assert max(clipped[bad + 1 :]) < 1.5 * clipped[bad]


def test_a_weight_of_one_makes_the_bad_batch_a_good_one() -> None:
    losses, norms = lab.spike_run(max_norm=1.0, weight=1)
    assert norms[lab.BAD_STEP - 1] < 5
    assert max(losses[lab.BAD_STEP :]) < losses[0]


@pytest.mark.parametrize("start", [10, 22])
@pytest.mark.parametrize("interval", [1, 4, 2000])
def test_the_factor_moves_by_the_rule_at_every_setting(start: int, interval: int) -> None:
    rows = lab.scaler_run(start, interval, steps=30)
    clean = 0
    for row, following in pairwise(rows):
        clean = clean + 1 if not row.skipped else (0 if row.skip_reason == "non_finite_grad" else clean)
        expected = row.scale / 2 if row.skip_reason == "non_finite_grad" else row.scale
        if clean == interval and not row.skipped:
            expected, clean = row.scale * 2, 0
        assert following.scale == expected


def test_a_growth_interval_of_one_skips_more_than_one_of_eight() -> None:
    skipped = {n: sum(row.skipped for row in lab.scaler_run(16, n, steps=60)) for n in (1, 8)}
    assert skipped[1] > 2 * skipped[8]


@pytest.mark.parametrize(
    ("max_norm", "threshold", "reason"),
    [(1.0, 10.0, None), (1.0, 1.0, None), (0.0, 10.0, "post_clip_explosion"), (0.0, 0.0, None)],
)
def test_guard_fires_only_where_an_element_can_exceed_it(max_norm: float, threshold: float, reason: str) -> None:
    judged = lab.guard_run(max_norm, threshold)
    assert judged.row.skip_reason == reason
    assert judged.largest <= (max_norm * 1.001 or math.inf)


def test_raw_counts_are_past_float16_and_not_past_bfloat16() -> None:
    raw, alerts = lab.visitor_run(torch.float16)
    assert len(alerts) == 1
    assert set(lab.reasons(raw)) == {"non_finite_grad", "non_finite_loss"}
    for dtype, unit in ((torch.bfloat16, "raw"), (torch.float16, "log")):
        rows, alerts = lab.visitor_run(dtype, unit)
        assert alerts == []
        assert not lab.reasons(rows)


def test_pictures_have_labelled_axes_a_legend_and_every_skip() -> None:
    rows = lab.scaler_run()
    rates = {"float16": [0.5, 0.5]}
    figures = [
        lab.scale_figure(rows),
        lab.spike_figure({"a": [1.0] * 60, "b": [2.0] * 60}),
        lab.skip_rate_figure(rates, [2], 0.05),
        lab.spike_picture(0, 8)[0],
        lab.scale_picture(10, 1)[0],
    ]
    for figure in figures:
        axes = figure.axes[0]
        assert axes.get_xlabel()
        assert axes.get_ylabel()
        assert axes.get_legend()
        assert axes.get_title(loc="left")
    marked = {x for line in figures[0].axes[0].lines[1:] for x in line.get_xdata()}
    assert marked == {row.step for row in rows if row.skipped}


def test_counts_of_known_programs() -> None:
    x = torch.ones(3)
    assert host_reads(lambda: x + 1) == 0
    assert host_reads(lambda: [float(v) for v in x]) == 3
    model = toy.tiny_mlp()
    model(torch.ones(1, 16)).sum().backward()
    assert gradient_passes(model, lambda: [p.grad.norm() for p in model.parameters()]) == 1
    assert gradient_passes(model, lambda: None) == 0
    kept = activation_bytes(model, lambda: model(torch.ones(2, 16)).sum())
    # The input (2 x 16), the hidden layer before and after GELU (2 x 32 each), four bytes each.
    assert kept == {torch.float32: 4 * 2 * (16 + 32 + 32)}


def test_a_sensor_that_fails_spoils_its_batch_alone() -> None:
    good, bad = list(toy.sensor_batches(5)), list(toy.sensor_batches(5, inf_at=3))
    same = [torch.equal(a, b) for (a, _), (b, _) in zip(good, bad, strict=True)]
    assert same == [True, True, False, True, True]

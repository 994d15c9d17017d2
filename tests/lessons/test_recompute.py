"""The experiments behind lesson 05's tables and pictures, and its limited process."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import recompute as lab
from torch.utils.checkpoint import checkpoint

from safetrain_core import measure_recompute, memory_after_checkpoint_bytes, plan_recompute

# --- counts ----------------------------------------------------------------------------------------------------


def test_a_layer_keeps_16_values_and_the_math_kernel_a_score_for_each_pair() -> None:
    for seq in (32, 128):
        flash, math_kernel = (lab.kept_by_part(seq, kind) for kind in ("flash", "math"))
        statistics = 2 * 2 / lab.WIDTH  # mean and deviation of two norms
        logsumexp = lab.HEADS / lab.WIDTH
        assert sum(flash.values()) == pytest.approx(16 + statistics + logsumexp)
        assert sum(math_kernel.values()) == pytest.approx(16 + statistics + lab.HEADS * seq / lab.WIDTH)


@pytest.mark.parametrize("kind", ["flash", "math"])
def test_what_the_hooks_see_is_what_the_counter_counts(kind: str) -> None:
    assert lab.values_per_layer(64, attention=kind) == pytest.approx(sum(lab.kept_by_part(64, kind).values()), rel=0.01)


def test_overhead_of_a_layer_is_that_of_the_closed_form() -> None:
    """Full leaves out the last product, 8 of 24 + 4 L / d; selective redoes the first of the core's two, half of it."""
    for seq in (32, 256):
        forward = 24 + 4 * seq / lab.WIDTH
        assert lab.layer_overhead(seq, "full") == pytest.approx((forward - 8) / forward / 3)
        assert lab.layer_overhead(seq, "selective") == pytest.approx(2 * seq / lab.WIDTH / forward / 3)


def test_a_layer_of_real_size_is_counted_in_proportion_to_its_sides() -> None:
    def layer(hidden: int, seq: int) -> int:
        more, less = (lab.real_size(n, hidden=hidden, seq=seq).kept_bytes for n in (2, 1))
        return more - less

    assert layer(1024, 512) == pytest.approx(2 * layer(512, 512), rel=0.01)
    assert layer(512, 1024) == pytest.approx(2 * layer(512, 512), rel=0.01)
    assert lab.real_layer_gb() == pytest.approx(16 * 8192**2 * 2 / 1e9, rel=0.01)
    assert torch.get_default_dtype() == torch.float32


def test_the_knee_is_at_sqrt_64_for_plain_layers_and_at_2_for_a_transformer() -> None:
    plain, transformer = lab.two_stacks().values()
    assert min(plain, key=plain.__getitem__) == 8
    assert min(transformer, key=transformer.__getitem__) == 2
    rule = [memory_after_checkpoint_bytes(64, k) for k in plain]
    for counted, (one, all_of_them) in zip(plain.values(), [(r, rule[-1]) for r in rule], strict=True):
        assert counted == pytest.approx(one / all_of_them, abs=0.05), "where its assumption holds, the rule holds"


def test_equal_and_apart_tell_a_missing_gradient_and_a_distance() -> None:
    one, two = [torch.tensor([3.0, 4.0])], [torch.tensor([3.0, 4.5])]
    assert lab.equal(one, one)
    assert not lab.equal(one, two)
    assert not lab.equal([None], one)
    assert not lab.equal(one, [None])
    assert lab.apart(two, one) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="zip"):
        lab.equal(one, [*one, None])


# --- done wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 5])
def test_reentrant_checkpoints_behind_frozen_embeddings_lose_every_layers_gradient(seed: int) -> None:
    model = lab.with_layers_run_by(lab.frozen_gpt(seed), lambda layer, x: checkpoint(layer, x, use_reentrant=True))
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        _, gradients = lab.loss_and_gradients(model, next(lab.toy.text_batches(1, seed, 4)))
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    missing = [name for name, gradient in zip(names, gradients, strict=True) if gradient is None]
    assert missing == [name for name in names if name.startswith("blocks.")]


def test_with_layers_run_by_the_plain_call_nothing_changes() -> None:
    batch = lab.tokens(2, 32, 1)
    plain = lab.loss_and_gradients(lab.gpt(2, 32, dropout=0.1), batch)
    called = lab.loss_and_gradients(
        lab.with_layers_run_by(lab.gpt(2, 32, dropout=0.1), lambda layer, x: layer(x)), batch
    )
    assert plain[0] == called[0]
    assert lab.equal(plain[1], called[1])


# --- out of memory ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a limit on a process's memory")
def test_a_limited_process_fails_where_the_count_says_and_gets_through_with_recomputation() -> None:
    tried = lab.out_of_memory(8, seed=1)
    assert tried is not None
    assert tried["needs"]["full"] < tried["limit_bytes"] < tried["needs"]["none"]
    assert "can't allocate memory" in tried["none"]["error"]
    # What a layer keeps is the same for each, so it gets as far as the share of the limit.
    assert tried["none"]["reached"] == pytest.approx(8 * tried["limit_bytes"] / tried["needs"]["none"], abs=1.5)
    assert "in forward" in tried["none"]["trace"]
    assert tried["full"] == {"reached": 8, "error": None, "trace": None}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a limit on a process's memory")
@pytest.mark.parametrize(("share", "ends"), [(0.8, True), (1.25, False)])
def test_the_count_is_what_the_process_needs(share: float, ends: bool) -> None:
    need = measure_recompute(lab.gpt(4), lab.tokens(32, 128), "none", timed_runs=0).activation_bytes
    spec = {"layers": 4, "seq": 128, "batch": 32, "seed": 0, "limit_bytes": int(share * need)}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(lab.__file__).parents[1]), *sys.path])}
    environment |= lab.ONE_HEAP
    done = subprocess.run(
        [sys.executable, "-m", "support.memory_worker", json.dumps(spec)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert (json.loads(done.stdout)[0]["error"] is not None) is ends


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a limit on a process's memory")
def test_a_process_that_takes_too_long_is_ended_and_named() -> None:
    with pytest.raises(RuntimeError, match=r"did not end within 0\.1 s"):
        lab.out_of_memory(4, timeout_s=0.1)


# --- pictures --------------------------------------------------------------------------------------------------


def test_pictures_have_labelled_axes_and_plot_what_was_counted() -> None:
    curves = {"a": [3.0] * 20, "b": [2.0] * 20}
    figures = {
        "depth": lab.depth_figure([1, 2]),
        "frozen": lab.frozen_figure(curves),
        "segments": lab.segments_figure(4),
        "flops": lab.flops_figure(4),
        "stacks": lab.stacks_figure({"x": {1: 1.0, 2: 0.5, 4: 0.8}}),
        "lengths": lab.lengths_figure([32, 64]),
        "segment": lab.segment_picture(64, 12)[0],
    }
    for figure in figures.values():
        axes = figure.axes[0]
        assert axes.get_xlabel()
        assert axes.get_ylabel()
        assert axes.get_title(loc="left")
    counted, _ = figures["segments"].axes[0].lines
    none = lab.peak(4)
    assert list(counted.get_ydata()) == [lab.peak(4, policy="every_k", k=k) / none for k in lab.ks(4)]
    assert [t.get_text() for t in figures["stacks"].axes[0].texts] == ["least at k = 2"]
    kept, selective, flash, full = figures["lengths"].axes[0].lines
    assert kept.get_ydata()[1] > selective.get_ydata()[1] > full.get_ydata()[1]
    assert list(flash.get_ydata()) == pytest.approx(list(selective.get_ydata()), rel=0.02)


@pytest.mark.parametrize(("boundary", "best"), [(12, 8), (3, 4), (1, 2)])
def test_the_segment_knob_moves_the_knee_with_the_boundary(boundary: int, best: int) -> None:
    figure, text = lab.segment_picture(64, boundary)
    in_all, boundaries, inside, star = figure.axes[0].lines
    assert list(in_all.get_ydata()) == pytest.approx(
        [a + b for a, b in zip(boundaries.get_ydata(), inside.get_ydata(), strict=True)], rel=1e-3
    )
    assert star.get_ydata()[0] == min(in_all.get_ydata())
    assert star.get_xdata()[0] == pytest.approx(best, abs=1)
    assert len(text.split()) > 8


@pytest.mark.parametrize("budget_gb", [8, 12, 80, 160])
@pytest.mark.parametrize("attention", ["flash", "math"])
def test_the_planner_knob_draws_the_plan(budget_gb: float, attention: str) -> None:
    figure, text = lab.plan_picture(64, 8192, 8192, budget_gb, attention)
    plan = plan_recompute(64, 8192, 8192, 1, 64, "bfloat16", int(budget_gb * 1e9), attention)
    axes = figure.axes[0]
    *points, budget = axes.lines
    assert [p.get_xdata()[0] for p in points] == [o.activation_bytes / 1e9 for o in plan.options]
    assert budget.get_xdata()[0] == pytest.approx(0.9 * budget_gb)
    filled = [p.get_fillstyle() == "full" for p in points]
    assert filled == [o.activation_bytes <= plan.usable_bytes for o in plan.options]
    title = axes.get_title(loc="left")
    assert title.startswith("Plan: " + plan.choice.name if plan.choice else "Nothing fits")
    marked = [t.get_text().endswith("<- the plan") for t in axes.texts]
    assert marked == [o == plan.choice for o in plan.options]
    assert plan.advice.splitlines()[0] in text


def test_every_setting_of_the_planner_knob_draws() -> None:
    for layers in (8, 96):
        for hidden in (1024, 8192):
            for seq in (1024, 32768):
                for budget in (4, 160):
                    figure, _ = lab.plan_picture(layers, hidden, seq, budget, "math")
                    assert all(math.isfinite(edge) for edge in figure.axes[0].get_xlim())

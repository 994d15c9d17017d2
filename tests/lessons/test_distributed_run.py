"""The experiments behind lesson 08: its ranks, its arithmetic, its pictures, and how often it starts its ranks."""

from __future__ import annotations

import inspect
import math
import os
from pathlib import Path

import pytest
import torch
from support import distributed_run as lab
from support import distributed_worker as worker

from safetrain_core import MiniGPT, launch
from safetrain_core.checkpoint.dcp_files import verify_dcp
from safetrain_core.errors import CheckpointError
from safetrain_core.train.resume_check import resumed, verdict

HAND = """
def agree_by_hand(code):
    worst = torch.tensor(code)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return int(worst)


def step_by_hand(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = next_token_loss(model(x), y)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    code = 0 if torch.isfinite(norm.full_tensor()) else 1
    code = agree_by_hand(code if torch.isfinite(loss) else 2)
    if code == 0:
        optimizer.step()
    return code
"""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> lab.Plan:
    out = tmp_path_factory.mktemp("lesson08")
    return lab.Plan(2, 5, 3, out, lab.write_text(out / "text.txt"), bound_s=5.0)


@pytest.fixture(scope="module")
def broken(plan: lab.Plan) -> list[lab.Broken]:
    return launch(worker.broken, plan.ranks, plan, timeout_s=120)


@pytest.fixture(scope="module")
def first(plan: lab.Plan) -> list[lab.Whole]:
    return launch(worker.whole_run, plan.ranks, plan, HAND, timeout_s=120)


# --- what goes wrong, for real -----------------------------------------------------------------------------------


def test_a_rank_that_leaves_out_its_backward_is_a_step_ahead_and_the_other_hangs_at_the_end(
    broken: list[lab.Broken],
) -> None:
    sound, faulty = broken[0].left, broken[lab.FAULTY].left
    assert (sound.shared, sound.stuck_in) == ([1, 2, 3, 4, 5], 6)
    assert (faulty.shared, faulty.stuck_in) == ([1, 2, 4, 5, 6], None)


def test_a_rank_that_skips_alone_trains_another_model_and_no_later_loss_tells(broken: list[lab.Broken]) -> None:
    sound, faulty = broken[0].alone, broken[lab.FAULTY].alone
    assert (sound.updates, faulty.updates) == (lab.LONG, lab.LONG - 1)
    assert (sound.updates_sharded, faulty.updates_sharded) == (lab.LONG, lab.LONG - 1)
    assert faulty.away[: lab.BAD - 1] == [0.0] * (lab.BAD - 1)
    assert min(faulty.away[lab.BAD - 1 :]) > 1e-3
    assert sound.norm != faulty.norm
    assert [math.isfinite(loss) for loss in faulty.losses] == [step != lab.BAD for step in range(1, lab.LONG + 1)]
    assert all(math.isfinite(loss) for loss in sound.losses)


def test_the_maximum_of_floats_loses_a_nan_somewhere(broken: list[lab.Broken]) -> None:
    assert any(math.isfinite(largest) for largest in broken[0].maxima)


def test_one_random_state_for_all_is_another_run_and_one_for_each_is_the_same(broken: list[lab.Broken]) -> None:
    one = [found.resumed[lab.ONE_STATE] for found in broken]
    own = [found.resumed[lab.OWN_STATES] for found in broken]
    assert sum(found.own_state for found in one) == 1
    assert one[0].again != one[0].whole[2:]
    assert all(found.own_state and found.again == found.whole[2:] for found in own)


# --- what holds --------------------------------------------------------------------------------------------------


def test_by_hand_and_package_agree_on_every_combination_and_skip_the_same_step(first: list[lab.Whole]) -> None:
    for found in first:
        assert len(found.agreements) > 30
        assert all(max(codes) == by_hand == package for codes, by_hand, package in found.agreements)
        assert found.codes == [0, 0, 2, 0, 0, 0]
        assert [row.skip_reason for row in found.rows] == [None, None, "non_finite_loss", None, None, None]
        assert found.untouched
        assert found.gap < 1e-5


def test_the_hand_version_tested_here_is_that_of_the_lesson() -> None:
    lesson = (Path(lab.__file__).parents[1] / "08_distributed_run.py").read_text(encoding="utf-8")
    for line in HAND.split("def step_by_hand")[0].strip().splitlines():
        assert line in lesson


def test_sync_on_the_last_halves_the_reduce_scatters_and_the_guard_adds_no_message(first: list[lab.Whole]) -> None:
    for found in first:
        every, last, guarded = (found.messages[way] for way in lab.WAYS)
        modules = lab.SIZE.layers + 1  # each block, and the rest
        assert every["reduce-scatter"] == lab.ACCUM * modules
        assert last["reduce-scatter"] == modules
        assert guarded == last


def test_each_rank_holds_its_rows_to_the_byte(first: list[lab.Whole]) -> None:
    parameters = sum(weight.numel() for weight in MiniGPT(lab.SIZE).parameters())
    for ranks in (1, 2):
        held = [found.shares[ranks].weight_bytes + found.shares[ranks].optimizer_bytes for found in first][:ranks]
        assert held == lab.shares_by_rule(ranks) == [12 * parameters / ranks] * ranks


def test_the_second_launch_is_the_same_run(plan: lab.Plan, first: list[lab.Whole]) -> None:
    second = launch(resumed, plan.ranks, plan.job, plan.at, timeout_s=120)
    holds, words = verdict([found.report for found in first], second, plan.at)
    assert holds
    assert words.startswith("RESUME VERIFIED")
    assert list(lab.losses_of(second[0])) == [3, 4, 5]
    assert set(lab.logged_column(plan.out / "run" / "metrics.csv", "effective_batch_size")) == {"32"}


def test_a_flipped_bit_is_refused_and_what_is_told_of_it_names_no_folder(
    plan: lab.Plan, first: list[lab.Whole]
) -> None:
    manifest = verify_dcp(plan.checkpoint)
    path = plan.checkpoint / manifest.part / "__1_0.distcp"
    lab.flip_one_bit(path)
    with pytest.raises(CheckpointError, match="sha256 mismatch") as error:
        verify_dcp(plan.checkpoint)
    lab.flip_one_bit(path)
    assert verify_dcp(plan.checkpoint) == manifest
    told = lab.without_names(str(error.value), plan.out, manifest)
    assert "run/step_00000002/dcp.<nonce>/__1_0.distcp has <digits>" in told.replace(os.sep, "/")
    assert str(plan.out) not in told
    names = [row[0] for row in lab.manifest_rows(manifest)]
    assert names == [
        "dcp.<nonce>/.metadata", "dcp.<nonce>/__0_0.distcp", "dcp.<nonce>/__1_0.distcp",
        "rank0.<nonce>.bin", "rank1.<nonce>.bin",
    ]  # fmt: skip


# --- arithmetic --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("rows", [1, 3, 10, 96, 97])
def test_rows_are_held_as_torch_chunks_them(rows: int, ranks: int) -> None:
    pieces = [len(piece) for piece in torch.empty(rows).chunk(ranks)]
    assert lab.rows_held(rows, ranks) == pieces + [0] * (ranks - len(pieces))


@pytest.mark.parametrize("ranks", range(1, 9))
def test_shares_add_up_to_twelve_bytes_for_each_weight(ranks: int) -> None:
    parameters = sum(weight.numel() for weight in MiniGPT(lab.SIZE).parameters())
    assert sum(lab.shares_by_rule(ranks)) == 12 * parameters
    assert (len(set(lab.shares_by_rule(ranks))) == 1) is (ranks in (1, 2, 4, 8))


def test_the_run_is_saved_at_checkpoint_step_or_half_way_through_a_short_one(tmp_path: Path) -> None:
    saved_at = {steps: lab.Plan(2, steps, 0, tmp_path, tmp_path).at for steps in (2, 7, 10, 11, 20, 100)}
    assert saved_at == {2: 1, 7: 3, 10: 5, 11: 10, 20: 10, 100: 10}
    assert lab.CHECKPOINT_STEP == 10


def test_the_text_has_each_of_its_characters_and_no_other(tmp_path: Path) -> None:
    text = lab.write_text(tmp_path / "text.txt").read_text(encoding="utf-8")
    assert set(text) == set(lab.CHARACTERS)
    assert len(set(lab.CHARACTERS)) == lab.SIZE.vocab_size == 96
    assert len(text) > 100_000


# --- pictures ----------------------------------------------------------------------------------------------------


def test_pictures_have_labelled_axes_and_plot_what_they_say(
    broken: list[lab.Broken], first: list[lab.Whole], plan: lab.Plan
) -> None:
    away = [found.alone.away for found in broken]
    shares = {n: [found.shares[n] for found in first] for n in (1, 2)}
    report = first[0].report
    plan_figure, text = lab.plan_picture(7e9, 8, 4, 4)
    figures = [
        lab.drift_figure(away), lab.random_figure(broken[0].resumed, plan.at),
        lab.loss_figure(report, report, plan.at), lab.memory_figure(shares), plan_figure,
    ]  # fmt: skip
    for figure in figures:
        (axes,) = figure.axes
        assert axes.get_xlabel()
        assert axes.get_ylabel()
        assert axes.get_legend() is not None
    drift, random, loss, memory, _ = (figure.axes[0] for figure in figures)
    assert list(drift.lines[0].get_ydata()) == [100 * d for d in away[lab.FAULTY]]
    assert list(random.lines[1].get_ydata()) == [0.0] * 3
    assert list(loss.lines[0].get_ydata()) == list(loss.lines[1].get_ydata()) == list(lab.losses_of(report).values())
    tops = sorted({round(bar.get_y() + bar.get_height(), 6) for bar in memory.patches if bar.get_y() > 0})
    assert tops == pytest.approx([lab.bytes_per_rank(29312, n) / 1e3 for n in (2, 1)])
    assert list(plan_figure.axes[0].lines[0].get_ydata()) == [84 / 2**i for i in range(11)]
    assert "10.5 GB on each, which fits" in text
    assert "128 rows" in text
    assert "does not fit" in lab.plan_picture(7e9, 1, 4, 4)[1]


# --- the lesson --------------------------------------------------------------------------------------------------


def test_the_lesson_starts_its_ranks_three_times_and_no_more() -> None:
    lesson = (Path(lab.__file__).parents[1] / "08_distributed_run.py").read_text(encoding="utf-8")
    assert lesson.count("= launch(") == 3
    assert "launch(" not in inspect.getsource(lab)

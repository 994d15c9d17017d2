"""The experiments behind lesson 03's tables, pictures and controls, and its processes that are killed."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from support import checkpoint_resume as lab

from safetrain_core import CheckpointError, atomic_save
from safetrain_core.checkpoint.atomic import verify

sys.path.append(str(Path(__file__).resolve().parents[1] / "checkpoint"))
import crash

# --- the five buckets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("at", [1, 7, 8, 10, 16, 23])
def test_with_all_five_buckets_the_resumed_run_is_the_same_run(seed: int, at: int) -> None:
    whole, resumed = lab.uninterrupted(seed), lab.resumed(seed, interrupt_at=at)
    assert resumed.losses == whole.losses
    assert resumed.seen == whole.seen
    assert resumed.curve == whole.curve
    assert resumed.counters == whole.counters


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("bucket", "late"), [("model", 1), ("optimizer", 2), ("scheduler", 3), ("counters", 1), ("rng", 1)]
)
def test_a_missing_bucket_bends_the_curve_and_each_at_its_own_step(seed: int, bucket: str, late: int) -> None:
    whole, resumed = lab.uninterrupted(seed), lab.resumed(seed, without=bucket)
    assert lab.first_difference(whole.losses, resumed.losses) == 10 + late
    assert lab.largest_difference(whole.losses, resumed.losses) > 0.05
    counts = lab.sample_counts(resumed.seen[lab.epoch_around(10)])
    assert (set(counts) == {1}) is (bucket not in ("counters", "rng"))


def test_steps_one_by_one_are_the_steps_of_one_go() -> None:
    run = lab.Run(3)
    for _ in range(24):
        run.train(1)
    assert run.losses == lab.uninterrupted(3).losses


def test_each_epoch_of_a_run_holds_each_sample_once() -> None:
    seen = lab.uninterrupted(0).seen
    for start in (0, 8, 16):
        assert set(lab.sample_counts(seen[start : start + lab.PER_EPOCH])) == {1}
    assert seen[:8] != seen[8:16], "it is shuffled anew each time"


# --- processes -------------------------------------------------------------------------------------------------


def test_a_kill_in_mid_save_tears_the_naive_file_and_not_the_atomic_one(tmp_path: Path) -> None:
    found = lab.killed_in_mid_save(["naive", "atomic"], tmp_path)
    (torn, killed), (kept, killed_too) = found["naive"], found["atomic"]
    assert killed == killed_too == -9
    with pytest.raises(RuntimeError, match="central directory"):
        torch.load(torn, weights_only=True)
    verify(kept)
    assert torch.load(kept, weights_only=True)["weight"].unique().tolist() == [1.0]
    assert [path.name for path in torn.parent.iterdir()] == ["last.pt"]
    assert len(list(kept.parent.glob(".last.pt.*.tmp"))) == 1


def test_a_way_of_saving_that_fails_is_told_and_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"hopeful ended by itself: .*no way to save is called hopeful"):
        lab.killed_in_mid_save(["hopeful"], tmp_path)


def test_a_run_killed_between_two_checkpoints_redoes_what_was_lost_to_the_same_losses(tmp_path: Path) -> None:
    first = lab.in_a_process(2, 16, tmp_path / "run", kill_after=12)
    second = lab.in_a_process(2, 16, tmp_path / "run")
    alone: list[dict] = []
    lab.trainer(2, 16, None, note=alone.append).fit()
    assert (first.status, second.status) == (-9, 0)
    assert [row["step"] for row in first.rows + second.rows] == [*range(1, 13), *range(11, 17)]
    assert first.rows == alone[:12]
    assert second.rows == alone[10:]


def test_an_error_in_the_process_is_told(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"status 1: .*max_steps"):
        lab.in_a_process(0, 0, tmp_path / "run")


# --- crash states ----------------------------------------------------------------------------------------------


def test_the_calls_in_the_picture_are_those_of_the_real_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        recorder = crash.Recorder(tmp_path, patch)
        atomic_save({"weight": torch.ones(2)}, tmp_path / "a.pt")
    names = {"create": "open .tmp", "fsync": "fsync file"}
    real = [names.get(kind, kind) for kind, *_ in recorder.ops]
    # A real save fsyncs its data while the sum is made, then adds the sum and fsyncs again: what counts is the order of
    # the last of each call, the last write before the last fsync, and that before the rename.
    once = list(dict.fromkeys(reversed(real)))[::-1]
    drawn = [call for call, _ in lab.SAVERS["atomic_save"]]
    assert once == list(dict.fromkeys(drawn))


def as_recorded(calls: list[tuple[str, bytes]]) -> list[tuple]:
    target = "t" if calls[0][0] == "open target" else "tmp"
    made = {
        "open target": ("create", "t"),
        "open .tmp": ("create", "tmp"),
        "rename": ("rename", "tmp", "t"),
        "fsync folder": ("fsync folder", ""),
    }
    ops, written = [], 0
    for call, data in calls:
        written += len(data)
        ops.append(("fsync", target, written) if call == "fsync file" else made.get(call) or ("write", target, data))
    return ops


def after(ops: list[tuple]) -> list[dict]:
    """The states that the large model allows after these calls."""
    tree = crash.Tree({"t": lab.OLD})
    for op in ops:
        tree.replay(op)
    return list(tree.crashed(lambda path: False))


@pytest.mark.parametrize("name", list(lab.SAVERS))
def test_the_small_model_allows_at_the_target_what_the_large_one_does(name: str) -> None:
    calls = lab.SAVERS[name]
    for end in range(1, len(calls) + 1):
        large = {state["t"] for state in after(as_recorded(calls)[:end])}
        assert lab.states_after(calls[:end]) == large


def test_only_the_save_with_both_fsyncs_loads_in_every_state() -> None:
    lost = {name: sum(states - loads for _, states, loads in lab.survival(name)) for name in lab.SAVERS}
    assert lost["atomic_save"] == 0
    assert lost["naive"] > lost["rename, no fsync"] > 0


# --- altered files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_one_bit_in_the_moments_changes_no_weight_and_is_found_by_its_sum(seed: int, tmp_path: Path) -> None:
    run, path = lab.Run(seed), tmp_path / "a.pt"
    run.train(10)
    atomic_save({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}, path)
    lab.spoil_momentum(path, run)
    loaded = torch.load(path, weights_only=True)
    assert all(
        torch.equal(a, b) for a, b in zip(loaded["model"].values(), run.model.state_dict().values(), strict=True)
    )
    assert loaded["optimizer"]["state"][0]["exp_avg"].abs().max() > 1e30
    with pytest.raises(CheckpointError, match="altered"):
        verify(path)


def test_refused_says_whether_the_look_raised(tmp_path: Path) -> None:
    assert lab.refused(tmp_path / "a", b"x", verify)
    assert not lab.refused(tmp_path / "a", b"x", Path.read_bytes)


def test_rotation_bounds_the_bytes_and_none_grows_with_each_save(tmp_path: Path) -> None:
    payload = {"weight": torch.ones(1000)}
    grown = lab.bytes_while_saving(tmp_path / "all", payload, 8, keep_last=100)
    bound = lab.bytes_while_saving(tmp_path / "few", payload, 8, keep_last=3)
    assert [n // grown[0] for n in grown] == list(range(1, 9))
    assert bound[2:] == [bound[2]] * 6


# --- how often -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("save_s", "mtbf_s"), [(1, 3600), (30, 21600), (120, 604800)])
def test_youngs_interval_is_the_minimum_of_his_estimate_and_near_that_of_the_dice(save_s: float, mtbf_s: float) -> None:
    best = lab.youngs_interval(save_s, mtbf_s)
    least = lab.share_lost(best, save_s, mtbf_s)
    assert least == pytest.approx(math.sqrt(2 * save_s / mtbf_s))
    for factor in (0.5, 0.9, 1.1, 2):
        assert lab.share_lost(factor * best, save_s, mtbf_s) > least
    assert lab.share_lost(2 * best, save_s, mtbf_s) == pytest.approx(1.25 * least)
    assert lab.share_lost_simulated(best, save_s, mtbf_s) == pytest.approx(least, rel=0.1)


def test_the_simulation_agrees_with_the_closed_form_for_random_failures() -> None:
    interval, save_s, mtbf_s = 600, 30, 3600
    exact = 1 - interval / mtbf_s / math.expm1((interval + save_s) / mtbf_s)
    assert lab.share_lost_simulated(interval, save_s, mtbf_s, failures=200_000) == pytest.approx(exact, rel=0.02)


def test_pictures_have_labelled_axes_and_plot_what_they_say() -> None:
    whole = lab.uninterrupted(0)
    panels = lab.buckets_figure(whole, {str(i): lab.resumed(0, without=None) for i in range(6)}, 10).axes
    assert len(panels) == 6
    grey, top = panels[0].lines[:2]
    assert list(grey.get_ydata()) == list(top.get_ydata()) == whole.curve

    boxes = [text.get_text() for text in lab.crash_figure().axes[0].texts]
    assert boxes == [f"{call}\n{k} of {n}" for name in lab.SAVERS for call, n, k in lab.survival(name)]

    figure, text = lab.interval_picture(30, 21600, 84)
    axes = figure.axes[0]
    assert axes.get_xlabel()
    assert axes.get_ylabel()
    assert "GB written a day" in axes.get_title(loc="left")
    assert len(text.split()) > 8
    in_all, saves, work, dot = axes.lines
    assert list(in_all.get_ydata()) == pytest.approx(
        [a + b for a, b in zip(saves.get_ydata(), work.get_ydata(), strict=True)]
    )
    assert dot.get_xdata()[0] == pytest.approx(lab.youngs_interval(30, 21600) / 60)
    assert dot.get_ydata()[0] == pytest.approx(min(in_all.get_ydata()))

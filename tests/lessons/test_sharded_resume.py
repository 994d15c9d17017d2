"""The experiments behind lesson 04's tables, pictures and controls, and its processes that are killed."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import sharded_resume as lab
from support import sharded_worker as worker
from support import toy

from safetrain_core import CheckpointError, launch, load_shard, load_sharded, reshard, save_sharded

sys.path.append(str(Path(__file__).resolve().parents[1] / "checkpoint"))
import crash


def trained(steps: int, ranks: int = 4, seed: int = 0) -> lab.ShardedRun:
    made = lab.ShardedRun(seed, ranks)
    made.train(steps)
    return made


# --- the run ---------------------------------------------------------------------------------------------------


def test_the_run_in_shards_is_adamw_on_the_whole_model() -> None:
    sharded, whole = trained(5), lab.ShardedRun(0, 1)
    optimizer = torch.optim.AdamW(whole.model.parameters(), lr=lab.LR)
    losses = []
    for step in range(1, 6):
        x, y = lab.batch_of(step)
        loss = lab.next_token_loss(whole.model(x), y)
        optimizer.zero_grad()
        loss.backward()
        lab.clip_global_l2_norm(whole.model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert sharded.losses == losses
    assert all(torch.equal(a, b) for a, b in zip(sharded.model.parameters(), whole.model.parameters(), strict=True))


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("new_ranks", [1, 2, 3, 4, 7])
def test_resumed_on_any_number_of_ranks_it_is_the_same_run(seed: int, new_ranks: int, tmp_path: Path) -> None:
    whole = lab.uninterrupted(seed, 4, 15)
    save_sharded(trained(10, seed=seed).states(), tmp_path / "four", 10)
    reshard(tmp_path / "four", tmp_path / "other", new_ranks)
    again = lab.resumed(load_sharded(tmp_path / "other", new_ranks)[1], seed, 15)
    assert again.losses == whole.losses[10:]
    assert lab.same_bytes(
        torch.cat([s["param_shard"] for s in again.states()]), torch.cat([s["param_shard"] for s in whole.states()])
    )


def test_without_the_moments_it_is_another_run() -> None:
    run_, whole = trained(10), lab.uninterrupted(0, 4, 15)
    fresh = [optimizer.state_dict() for optimizer in lab.ShardedRun(0, 4).optimizers]
    states = [{**state, "optimizer": new} for state, new in zip(run_.states(), fresh, strict=True)]
    late = lab.resumed(states, 0, 15)
    assert lab.same_for(late.losses, whole.losses[10:]) == 1


def test_same_bytes_sees_a_sign_of_zero_and_a_nan() -> None:
    nan = {"a": [torch.tensor([math.nan, 0.0])]}
    assert lab.same_bytes(nan, {"a": [torch.tensor([math.nan, 0.0])]})
    assert not lab.same_bytes(nan, {"a": [torch.tensor([math.nan, -0.0])]})
    assert not lab.same_bytes(nan, {"b": [torch.tensor([math.nan, 0.0])]})


# --- a partial shard -------------------------------------------------------------------------------------------


@pytest.fixture
def good(tmp_path: Path) -> Path:
    save_sharded(trained(10).states(), tmp_path / "step_10", 10)
    return tmp_path / "step_10"


def test_the_raw_save_is_killed_behind_its_manifest_a_kilobyte_before_its_end(good: Path, tmp_path: Path) -> None:
    assert lab.killed(worker.save_raw_and_die, str(good), str(tmp_path / "raw")) == "rank 0 was killed by SIGKILL"
    told = json.loads((tmp_path / "raw" / "manifest.json").read_text())
    assert told == {"step": 10, "world_size": 4, "numel": [8608] * 4}
    states = load_sharded(good, 4)[1]
    for rank, state in enumerate(states):
        right = lab.raw_bytes(state)
        assert (tmp_path / "raw" / f"rank{rank}.raw").read_bytes() == (right if rank < 3 else right[: -lab.CUT])


def test_the_missing_kilobyte_holds_moments_of_the_rarest_tokens() -> None:
    run_ = trained(3)
    embedding = run_.weights[-1]
    assert embedding is run_.model.tokens.weight
    tail = torch.arange(lab.CUT // 4)
    shard = run_.optimizers[-1].state[run_.shards[-1]]["exp_avg_sq"]
    raw = lab.raw_bytes(run_.states()[-1])
    assert raw[-lab.CUT :] == shard[-len(tail) :].numpy().tobytes()
    rows = lab.rare_rows()
    assert torch.equal(run_.shards[-1].detach()[-rows * lab.WIDTH :].view(rows, -1), embedding.detach()[-rows:])
    counts = torch.bincount(lab.by_frequency()[toy.text().train.ids], minlength=lab.vocabulary()).tolist()
    reserved = lab.vocabulary() - len(toy.text().vocab)
    assert counts[:reserved] == [0] * reserved
    assert counts[reserved:] == sorted(counts[reserved:], reverse=True)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_lost_tail_shows_no_sooner_than_a_rare_token_comes(seed: int) -> None:
    numbers = []
    for state in trained(10, seed=seed).states():
        memory = torch.frombuffer(bytearray(lab.raw_bytes(state)), dtype=torch.float32)
        numbers.append(memory)
    numbers[-1][-lab.CUT // 4 :] = math.nan
    late = lab.ShardedRun(seed, 4)
    late.load(lab.from_numbers(numbers, 10))
    step = lab.first_rare_step(seed, 10, 400)
    assert step is not None
    late.train(step - 10)
    right = lab.uninterrupted(seed, 4, step).losses
    assert late.losses[:-1] == right[10:-1]
    assert math.isnan(late.losses[-1])
    assert all(map(math.isfinite, right))


def test_states_come_back_from_raw_bytes() -> None:
    states = trained(4, ranks=2).states()
    numbers = [torch.frombuffer(bytearray(lab.raw_bytes(state)), dtype=torch.float32) for state in states]
    assert lab.same_bytes(lab.from_numbers(numbers, 4), states)


def test_fresh_memory_holds_nan_only_where_that_was_asked_for() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    with lab.visible_memory():
        assert torch.empty(100).isnan().all()
    assert torch.are_deterministic_algorithms_enabled() is before


# --- killed between renames ------------------------------------------------------------------------------------


def test_in_place_loses_both_between_the_renames_and_save_sharded_loses_none(good: Path, tmp_path: Path) -> None:
    new, in_place = tmp_path / "step_12", tmp_path / "old"
    save_sharded(trained(12).states(), new, 12)
    lab.publish_in_place(load_sharded(good, 4)[1], in_place, 10)
    naive = lab.after_each_rename("in place", in_place, new, tmp_path, 4)
    ours = lab.after_each_rename("save_sharded", good, new, tmp_path, 4)
    assert [left.step for left in naive] == [10, None, None, None, None, 12]
    assert [left.step for left in ours] == [10, 10, 10, 10, 10, 12]
    assert [left.steps.count(12) for left in naive] == [0, 1, 2, 3, 4, 4]
    assert [left.mixed for left in naive] == [False, True, True, True, True, False]
    assert all("sha256 mismatch on rank 0" in left.reason for left in naive[1:5])

    boxes = [
        text.get_text() for text in lab.rename_figure({"in place": naive, "save_sharded": ours}, 10, 12).axes[0].texts
    ]
    assert boxes[:6] == [
        "step 10", "3 of step 10\n1 of step 12", "2 of step 10\n2 of step 12", "1 of step 10\n3 of step 12",
        "all of step 12,\nmanifest: 10", "step 12",
    ]  # fmt: skip
    assert boxes[6:12] == ["step 10", *["nothing"] * 4, "step 12"]
    assert boxes[12:] == [*["step 10"] * 5, "step 12"]


def test_what_a_killed_save_left_is_swept_by_the_next_one(good: Path, tmp_path: Path) -> None:
    lab.killed(worker.save_and_die, "save_sharded", str(good), str(good), 3)
    assert len(list(good.iterdir())) > 5
    save_sharded(load_sharded(good, 4)[1], good, 11)
    assert len(list(good.iterdir())) == 5
    assert load_sharded(good, 4)[0].step == 11


def test_a_power_failure_may_lose_both_in_place_and_never_with_save_sharded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the lesson leaves to lesson 03: every state that the recorded calls of both saves may leave."""
    states = [{"param_shard": torch.ones(2) * rank} for rank in range(2)]

    def loads(folder: Path) -> bool:
        try:
            return load_sharded(folder, 2)[0].step in (10, 20)
        except CheckpointError:
            return False

    def lost(name: str, save: Callable[[Path], Any]) -> tuple[int, int]:
        folder = tmp_path / name
        save_sharded(states, folder, 10)

        def traced(recorder: crash.Recorder) -> None:
            monkeypatch.setattr(lab, "open", recorder.open, raising=False)
            save(folder)

        return crash.survives(folder, monkeypatch, traced, loads, tmp_path / f"{name} rebuilt")

    tried, failed = lost("in place", lambda folder: lab.publish_in_place(states, folder, 20))
    assert failed > 5
    tried, failed = lost("ours", lambda folder: save_sharded(states, folder, 20))
    assert tried > 20
    assert failed == 0


def test_a_kill_that_does_not_come_is_told(good: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended by itself"):
        lab.killed(worker.save_and_die, "save_sharded", str(good), str(tmp_path / "new"), 99)
    with pytest.raises(RuntimeError, match=r"was to be killed, but: rank 0 raised KeyError"):
        lab.killed(worker.save_and_die, "hopeful", str(good), str(tmp_path / "other"), 1)


# --- ranks -----------------------------------------------------------------------------------------------------


def test_ranks_that_save_their_own_make_the_files_of_one_process(good: Path, tmp_path: Path) -> None:
    told = launch(worker.save_own, 4, str(good), str(tmp_path / "own"), timeout_s=60)
    assert told == [(8608, "")] * 4
    for rank in range(4):
        assert (tmp_path / "own" / f"rank{rank}.bin").read_bytes() == (good / f"rank{rank}.bin").read_bytes()


@pytest.mark.skipif(os.name != "posix", reason="limits on the size of a file")
def test_one_full_disk_is_told_on_every_rank_and_the_older_checkpoint_loads(good: Path, tmp_path: Path) -> None:
    launch(worker.save_own, 4, str(good), str(tmp_path / "own"), timeout_s=60)
    told = launch(worker.save_own, 4, str(good), str(tmp_path / "own"), 2, timeout_s=60)
    assert len({text for _, text in told}) == 1
    assert "rank 2 could not write its shard" in told[0][1]
    assert "File too large" in told[0][1]
    assert lab.same_bytes(load_shard(tmp_path / "own", 2, 4)[1], load_shard(good, 2, 4)[1])


def test_write_times_are_measured_for_one_and_for_all_ranks(tmp_path: Path) -> None:
    found = launch(worker.write_times, 2, str(tmp_path), 4, 2, timeout_s=100)[0]
    assert list(found) == list(worker.WAYS)
    assert all(one > 0 and every > 0 for one, every in found.values())
    alone, both = found["a link each"]
    assert alone >= 1e6 / (worker.LINK_MB_S * 1e6), "a megabyte through the link takes its time"
    assert both >= 0.5e6 / (worker.LINK_MB_S * 1e6)
    assert list(tmp_path.iterdir()) == []


# --- how long --------------------------------------------------------------------------------------------------


def test_links_add_up_until_the_storage_is_full() -> None:
    times = [lab.write_seconds(1e10, n, 1, 8) for n in (1, 2, 4, 8, 16, 1000)]
    assert times == [120, 60, 30, 15, 15, 15]
    assert lab.write_seconds(1e10, 4, 5, 8) == 15
    assert sum(lab.bytes_per_rank(1e10, 8) for _ in range(8)) == 12e10


@pytest.mark.parametrize(("ranks", "limits"), [(1, False), (64, False), (256, True)])
def test_the_control_plots_what_it_says(ranks: int, limits: bool) -> None:
    figure, text = lab.write_picture(1.2e12, ranks, 1, 100)
    axes = figure.axes[0]
    assert axes.get_xlabel()
    assert axes.get_ylabel()
    assert ("the storage is what limits" in axes.get_title(loc="left")) is limits
    seconds = lab.write_seconds(1.2e12, ranks, 1, 100)
    assert f"{ranks} files of" in text
    assert lab.span(seconds) in text
    every, alone, dot = axes.lines
    assert list(every.get_ydata()) == [lab.write_seconds(1.2e12, n, 1, 100) / 60 for n in every.get_xdata()]
    assert set(alone.get_ydata()) == {240}
    assert (dot.get_xdata()[0], dot.get_ydata()[0]) == (ranks, seconds / 60)


def test_the_picture_of_the_partial_shard_plots_both_runs() -> None:
    whole, late = [3.0, 2.0, 1.5, 1.2, 1.1], [1.5, 1.2, math.nan]
    axes = lab.nan_figure(whole, late, 2).axes[0]
    assert list(axes.lines[0].get_ydata()) == whole
    assert (list(axes.lines[1].get_xdata()), list(axes.lines[1].get_ydata())) == ([3, 4], [1.5, 1.2])
    assert any("NaN, 3 steps" in text.get_text() for text in axes.texts)

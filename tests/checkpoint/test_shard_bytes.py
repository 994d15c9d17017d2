"""Each rank's file holds its own piece, also where that is a view of a larger tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from safetrain_core import CHECKPOINT_STEP, load_sharded, reshard, rotate_checkpoints, save_shard, save_sharded

NUM = 100_000


def bytes_of_files(folder: Path) -> list[int]:
    return [path.stat().st_size for path in sorted(folder.glob("rank*.bin"))]


def saved(states: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    save_sharded(states, folder, CHECKPOINT_STEP)
    return load_sharded(folder, len(states))[1]


def test_views_of_one_flat_parameter_are_written_as_their_own_bytes(tmp_path: Path) -> None:
    flat = torch.arange(float(NUM))
    views = torch.tensor_split(flat, 4)
    states = saved([{"param_shard": view} for view in views], tmp_path / "views")
    saved([{"param_shard": view.clone()} for view in views], tmp_path / "clones")
    assert all(torch.equal(state["param_shard"], view) for state, view in zip(states, views, strict=True))
    for name in ("rank0.bin", "rank3.bin"):
        assert (tmp_path / "views" / name).read_bytes() == (tmp_path / "clones" / name).read_bytes()
    assert sum(bytes_of_files(tmp_path / "views")) < 1.05 * 4 * NUM


def test_a_rank_that_saves_a_view_itself_writes_no_more_than_that(tmp_path: Path) -> None:
    save_shard({"param_shard": torch.arange(float(NUM))[:1000]}, tmp_path, rank=0, world_size=1, step=1)
    assert bytes_of_files(tmp_path)[0] < 4 * 1000 + 4000


def test_a_contiguous_view_is_not_copied_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flat, seen = torch.arange(8.0), []
    real = torch.save
    monkeypatch.setattr(torch, "save", lambda value, *rest: (seen.append(value), real(value, *rest)))
    save_sharded([{"param_shard": flat[4:]}], tmp_path, 1)
    assert seen[0]["state"]["param_shard"].data_ptr() == flat[4:].data_ptr()
    assert flat[4:].untyped_storage().nbytes() == 32, "the caller's tensor is as it was"


@pytest.mark.parametrize(
    "view",
    [
        torch.arange(12.0)[3:3],
        torch.arange(12.0).reshape(3, 4)[:, 1],
        torch.arange(12.0)[::2],
        torch.arange(12, dtype=torch.int64)[5:],
        torch.arange(12).to(torch.bfloat16)[1:4],
        torch.arange(24.0).reshape(2, 3, 4)[1].t(),
        torch.tensor([1 + 2j, 3 - 1j, 5j])[1:].conj(),
        torch.ones(1).expand(50),
        nn.Parameter(torch.arange(12.0))[2:5],
        torch.tensor(7.0),
    ],
    ids=["empty", "column", "every second", "int64", "bfloat16", "transposed", "conj", "expanded", "grad", "0-dim"],
)
def test_any_view_comes_back_as_it_was(view: torch.Tensor, tmp_path: Path) -> None:
    (state,) = saved([{"at": {"depth": [view, (1, view)]}}], tmp_path)
    for back in (state["at"]["depth"][0], state["at"]["depth"][1][1]):
        assert (back.dtype, back.shape) == (view.dtype, view.shape)
        assert torch.equal(back, view)


def test_tied_weights_and_the_versions_of_a_state_dict_stay(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(50, 50, bias=False), nn.BatchNorm1d(50), nn.Linear(50, 50, bias=False))
    model[2].weight = model[0].weight
    (state,) = saved([{"model": model.state_dict()}], tmp_path)
    assert state["model"]["0.weight"].data_ptr() == state["model"]["2.weight"].data_ptr()
    assert state["model"]._metadata == model.state_dict()._metadata
    assert bytes_of_files(tmp_path)[0] < 1.5 * 4 * 2500


def adam_states() -> list[dict[str, Any]]:
    states = []
    for rank in range(4):
        shard = nn.Parameter(torch.arange(100.0) + rank)
        adam = torch.optim.AdamW([shard])
        shard.grad = torch.ones(100)
        adam.step()
        states.append({"param_shard": shard.detach(), "optimizer": adam.state_dict(), "step": 3})
    return states


def sums(folder: Path) -> list[str]:
    return [shard.sha256 for shard in load_sharded(folder, 4)[0].shards]


def test_what_was_loaded_and_saved_again_is_the_same_file(tmp_path: Path) -> None:
    again = saved(adam_states(), tmp_path / "first")
    saved(again, tmp_path / "second")
    assert sums(tmp_path / "first") == sums(tmp_path / "second")


def test_resharded_there_and_back_every_file_is_the_same(tmp_path: Path) -> None:
    saved(adam_states(), tmp_path / "four")
    for ranks in (2, 3, 8):
        reshard(tmp_path / "four", tmp_path / f"to {ranks}", ranks)
        reshard(tmp_path / f"to {ranks}", tmp_path / f"from {ranks}", 4)
        assert sums(tmp_path / f"from {ranks}") == sums(tmp_path / "four")


@pytest.mark.parametrize("keep_last", [0, 1, 2, 3, 5, 7])
def test_rotation_after_each_of_eight_saves_keeps_as_many_as_it_may(keep_last: int, tmp_path: Path) -> None:
    for step in range(1, 9):
        save_sharded([{"param_shard": torch.ones(1)}], tmp_path / f"step_{step}", step)
        gone = rotate_checkpoints(tmp_path, keep_last)
        assert gone == ([f"step_{step - keep_last}"] if step > keep_last else [])
        left = [f"step_{n}" for n in range(max(1, step - keep_last + 1), step + 1)]
        assert sorted(path.name for path in tmp_path.iterdir()) == left

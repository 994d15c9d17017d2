"""Rolling and best checkpoints: which stay, which are found, and saving beside training."""

import collections
import math
import time

import pytest
import torch
from torch import nn

from safetrain_core import CheckpointError, Checkpoints, TrainState, load_checkpoint
from safetrain_core.checkpoint import inspection, rolling
from safetrain_core.checkpoint.single import read_checkpoint, run_payload


def payload(step):
    return {"schema": "ckpt.v1", "step": step, "weight": torch.full((10,), float(step))}


def names(kept):
    return [int(path.stem.split("_")[1]) for path in kept.all()]


def test_the_last_ones_and_the_best_stay_and_order_is_by_number(tmp_path):
    kept = Checkpoints(tmp_path, keep_last=2, keep_best=2)
    for step, loss in (
        (7, 0.9),
        (8, 0.1),
        (9, 0.5),
        (10, 0.2),
        (99_999_999, 0.3),
        (100_000_000, None),
        (100_000_001, 2.0),
    ):
        kept.save(payload(step), step, val_loss=loss)
    assert names(kept) == [8, 10, 100_000_000, 100_000_001]
    assert read_checkpoint(kept.best())["step"] == 8
    assert read_checkpoint(kept.latest())["step"] == 100_000_001


def test_nan_is_never_best_and_the_first_number_is(tmp_path):
    kept = Checkpoints(tmp_path, keep_last=9)
    for step, loss in enumerate((math.nan, 0.5, 0.4, math.inf), start=1):
        assert kept.would_be_best(loss) is math.isfinite(loss)
        kept.save(payload(step), step, val_loss=loss)
    assert read_checkpoint(kept.best())["step"] == 3
    assert Checkpoints(tmp_path, keep_best=0).would_be_best(0.1) is False


def test_a_torn_newest_file_is_passed_over_and_named(tmp_path, caplog):
    kept = Checkpoints(tmp_path)
    for step in (1, 2, 3):
        kept.save(payload(step), step, val_loss=1 / step)
    kept.all()[-1].write_bytes(kept.all()[-1].read_bytes()[:-30])
    assert kept.latest().name == "step_00000002.pt"
    assert "step_00000003.pt" in caplog.text
    assert kept.best() is None
    kept.all()[0].unlink()
    kept.all()[0].write_bytes(b"")
    assert kept.latest() is None


def test_an_empty_or_missing_folder_has_none(tmp_path):
    assert Checkpoints(tmp_path / "none").latest() is None
    assert Checkpoints(tmp_path).best() is None
    for damaged in ("{broken", "[]", "null", '{"step_00000001.pt": "x"}', '{"step_00000001.pt": null}', '{"../x": 1}'):
        (tmp_path / "best.json").write_text(damaged)
        assert Checkpoints(tmp_path).best() is None
        assert Checkpoints(tmp_path).would_be_best(0.5)


def test_temporaries_of_killed_runs_are_swept_and_other_files_stay(tmp_path):
    (tmp_path / ".step_00000001.pt.abc.tmp").write_text("half")
    (tmp_path / ".mine.tmp").write_text("mine")
    Checkpoints(tmp_path).save(payload(2), 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".mine.tmp", "step_00000002.pt"]


def test_due_counts_updates_and_seconds(monkeypatch, tmp_path):
    kept = Checkpoints(tmp_path, every_updates=10)
    assert [kept.due(u) for u in (0, 9, 10, 11)] == [False, False, True, True]
    kept.save(payload(1), 1, updates=11)
    assert [kept.due(u) for u in (11, 19, 20)] == [False, False, True]
    now = time.monotonic()
    by_time = Checkpoints(tmp_path, every_seconds=60.0)
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    assert by_time.due(1)
    assert not by_time.due(0)
    assert not Checkpoints(tmp_path).due(10**9)


def test_an_asynchronous_save_writes_what_was_there_when_it_was_asked(tmp_path):
    kept = Checkpoints(tmp_path, async_save=True)
    live = payload(1)
    kept.save(live, 1)
    live["weight"] += 100
    kept.wait()
    assert read_checkpoint(kept.latest())["weight"].tolist() == [1.0] * 10


def test_an_error_of_an_asynchronous_save_is_raised_at_the_next_check(tmp_path, monkeypatch):
    kept = Checkpoints(tmp_path, async_save=True)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(rolling, "atomic_save", full)
        kept.save(payload(1), 1)
        for _ in range(200):
            if kept._writing.done():
                break
            time.sleep(0.01)
        with pytest.raises(OSError, match="No space left"):
            kept.check()
    kept.save(payload(2), 2)
    kept.wait()
    assert names(kept) == [2]


def test_numbers_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(ValueError, match="keep_last=0"):
        Checkpoints(tmp_path, keep_last=0)


def test_inspect_tells_files_apart(tmp_path):
    from safetrain_core import atomic_save

    Checkpoints(tmp_path).save({**payload(1), "state": {"step": 1, "updates": 1}}, 1)
    assert inspection.inspect(tmp_path / "step_00000001.pt")[0].startswith("checkpoint ckpt.v1, step 1, 1 updates")
    atomic_save({"w": torch.ones(2)}, tmp_path / "final.pt")
    assert inspection.inspect(tmp_path / "final.pt")[0].startswith("weights alone, 1 tensors")
    assert inspection.inspect(tmp_path / "none.pt")[1] is False
    assert issubclass(CheckpointError, RuntimeError)


class Versioned(nn.Module):
    """Saves a width; until version 1 it was half of that, which a load mends."""

    _version = 2

    def __init__(self):
        super().__init__()
        self.register_buffer("width", torch.tensor(8.0))

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        if local_metadata.get("version", 1) < 2:
            state_dict[f"{prefix}width"] = state_dict[f"{prefix}width"] * 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


@pytest.mark.parametrize("async_save", [False, True])
def test_the_versions_of_a_models_modules_are_saved_with_it(tmp_path, async_save):
    model = Versioned()
    kept = Checkpoints(tmp_path, async_save=async_save)
    path = kept.save(run_payload(model, None, None, TrainState()), 1)
    kept.wait()
    load_checkpoint(path, model, None, None)
    assert model.width == 8


@pytest.mark.parametrize("async_save", [False, True])
def test_saved_beside_training_or_not_the_same_is_refused_and_the_same_comes_back(tmp_path, async_save):
    kept = Checkpoints(tmp_path, async_save=async_save)
    with pytest.raises(ValueError, match=r"payload\['v'\] is a Pair"):
        kept.save({"v": collections.namedtuple("Pair", "a b")(1, 2)}, 1)
    number = torch.tensor([1 + 2j])
    path = kept.save({"both": [number, number.conj()], "sparse": torch.eye(2).to_sparse()}, 2)
    kept.wait()
    loaded = torch.load(path, weights_only=True)
    assert [value.item() for value in loaded["both"]] == [1 + 2j, 1 - 2j]
    assert torch.equal(loaded["sparse"].to_dense(), torch.eye(2))

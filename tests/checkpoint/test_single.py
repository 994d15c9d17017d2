"""One-file checkpoints: what comes back, what is refused by name, and that a refusal changes nothing."""

import io
import os
import random
import zipfile

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from safetrain_core import (
    CHECKPOINT_SCHEMA,
    CheckpointError,
    MiniGPT,
    MiniGPTConfig,
    TrainState,
    atomic_save,
    build_optimizer,
    capture_rng_state,
    load_checkpoint,
    make_schedule,
    save_checkpoint,
)
from safetrain_core.checkpoint.atomic import TRAILER, atomic_open
from safetrain_core.checkpoint.model_state import model_state
from safetrain_core.checkpoint.single import read_checkpoint, run_payload


def parts(width=4, name="adamw", total=10):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
    optimizer = build_optimizer(model, name, lr=0.1, weight_decay=0.01)
    return model, optimizer, make_schedule(optimizer, "cosine", total_steps=total)


def train(model, optimizer, scheduler, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).pow(2).mean().backward()
        optimizer.step()
        scheduler.step()


def snapshot(model, optimizer, scheduler):
    buffer = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), scheduler.state_dict(), torch.get_rng_state()], buffer)
    return buffer.getvalue(), random.getstate()


def saved(path, *made, **options):
    train(*made)
    save_checkpoint(
        *made, TrainState(step=3, updates=3, epoch=1, batch_in_epoch=2, retries=1, losses=[0.5]), path, **options
    )


def test_everything_comes_back_and_training_goes_on_bit_for_bit(tmp_path):
    path = tmp_path / "a.pt"
    made = parts()
    saved(path, *made)
    train(*made)
    fresh = parts()
    torch.manual_seed(99)
    state = load_checkpoint(path, *fresh)
    assert state == TrainState(3, 3, 1, 2, 1, [0.5])
    train(*fresh)
    for key, value in made[0].state_dict().items():
        assert torch.equal(value, fresh[0].state_dict()[key])
    assert made[2].get_last_lr() == fresh[2].get_last_lr()


def test_the_file_is_plain_and_names_its_schema(tmp_path):
    path = tmp_path / "a.pt"
    saved(path, *parts(), config={"lr": 0.1})
    payload = torch.load(path, weights_only=True)
    assert payload["schema"] == CHECKPOINT_SCHEMA == "ckpt.v1"
    assert payload["config"] == {"lr": 0.1}
    assert {"model", "optimizer", "scheduler", "scaler", "state", "rng", "loader"} <= payload.keys()


def test_what_was_captured_does_not_move_with_training(tmp_path):
    from safetrain_core.checkpoint.rolling import detached_copy

    made = parts()
    train(*made)
    kept = detached_copy(run_payload(*made, TrainState()))
    before = kept["model"]["0.weight"].clone()
    moment = kept["optimizer"]["state"][0]["exp_avg"].clone()
    train(*made)
    assert torch.equal(kept["model"]["0.weight"], before)
    assert torch.equal(kept["optimizer"]["state"][0]["exp_avg"], moment)


class Odd(nn.Module):
    """A genuine submodule called module, and tied weights."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(3, 3)
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.module.weight


def test_wrappers_are_unwrapped_and_genuine_names_and_ties_survive(tmp_path):
    model = Odd()
    names = set(model.state_dict())
    for wrapped in (nn.DataParallel(model), nn.DataParallel(nn.DataParallel(model)), torch.compile(model)):
        assert set(model_state(wrapped)) == names
        path = tmp_path / "a.pt"
        save_checkpoint(wrapped, None, None, TrainState(), path)
        for target in (Odd(), nn.DataParallel(Odd()), torch.compile(Odd())):
            load_checkpoint(path, target, None, None)
            assert all(torch.equal(v, model.state_dict()[k]) for k, v in model_state(target).items())
    plain = Odd()
    load_checkpoint(path, plain, None, None)
    assert plain.tied.weight is plain.module.weight
    model.tied = torch.compile(model.tied)
    assert set(model_state(model)) == names
    load_checkpoint(path, model, None, None)


REFUSALS = {
    "larger model": (lambda: parts(width=8), "has shape"),
    "other model": (
        lambda: (lambda m: (m, build_optimizer(m, "adamw", lr=1, weight_decay=0.01), None))(
            nn.Sequential(nn.Linear(3, 4))
        ),
        "has, and the model lacks,",
    ),
    "another optimizer": (lambda: parts(name="sgd_momentum"), "holds the optimizer AdamW, and a SGD is to be loaded"),
    "another schedule": (lambda: parts(total=20), "made with another schedule"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_does_not_fit_is_refused_by_name_and_nothing_is_half_loaded(tmp_path, case):
    make, told = REFUSALS[case]
    path = tmp_path / "a.pt"
    saved(path, *parts())
    model, optimizer, scheduler = make()
    scheduler = scheduler or make_schedule(optimizer, "cosine", total_steps=10)
    before = snapshot(model, optimizer, scheduler)
    with pytest.raises(CheckpointError, match=told):
        load_checkpoint(path, model, optimizer, scheduler)
    assert snapshot(model, optimizer, scheduler) == before


def test_a_torn_an_altered_and_a_missing_file_are_refused_and_nothing_changes(tmp_path):
    path = tmp_path / "a.pt"
    made = parts()
    saved(path, *made)
    whole = path.read_bytes()
    before = snapshot(*made)
    for content, told in ((whole[: len(whole) // 2], "torn"), (whole[:700] + b"\xff" + whole[701:], "altered")):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=told):
            load_checkpoint(path, *made)
    path.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        load_checkpoint(path, *made)
    assert snapshot(*made) == before


class Evil:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (os.mkdir, (self.marker,))


def test_a_pickle_that_would_run_code_is_refused_and_nothing_runs(tmp_path):
    import hashlib

    marker, path = tmp_path / "ran", tmp_path / "evil.pt"
    torch.save({"schema": "ckpt.v1", "model": Evil(str(marker))}, path)
    data = path.read_bytes()
    with atomic_open(path) as file:  # with a good sum: someone meant it
        file.write(data + TRAILER + hashlib.sha256(data).hexdigest().encode() + b"\n")
    assert zipfile.is_zipfile(path)
    with pytest.raises(CheckpointError, match="cannot be read without running code"):
        load_checkpoint(path, *parts())
    assert not marker.exists()


@pytest.mark.parametrize(
    ("schema", "told"),
    [("weights.v1", "unknown schema 'weights.v1'"), (None, "unknown schema None"), ("ckpt.v9", "upgrade safetrain")],
)
def test_an_unknown_schema_is_refused(tmp_path, schema, told):
    path = tmp_path / "a.pt"
    atomic_save({"schema": schema} if schema else {"x": 1}, path)
    with pytest.raises(CheckpointError, match=told):
        load_checkpoint(path, *parts())


def test_an_old_schema_is_brought_to_the_present_one_with_a_warning(tmp_path):
    path = tmp_path / "old.pt"
    made = parts()
    train(*made)
    old = run_payload(*made, TrainState(step=3))
    atomic_save({**{k: old[k] for k in ("model", "optimizer", "scheduler", "state")}, "schema": "ckpt.v0"}, path)
    fresh = parts()
    before = torch.get_rng_state()
    with pytest.warns(UserWarning, match=r"ckpt\.v0 holds no random states"):
        assert load_checkpoint(path, *fresh).step == 3
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(fresh[0][0].weight, made[0][0].weight)


def test_a_file_that_lacks_a_part_is_refused(tmp_path):
    path = tmp_path / "a.pt"
    payload = run_payload(*parts(), TrainState())
    del payload["rng"]
    atomic_save(payload, path)
    with pytest.raises(CheckpointError, match="lacks rng"):
        load_checkpoint(path, *parts())


@pytest.mark.parametrize(
    ("saved_on", "loaded_on", "told"), [(True, False, "is dropped"), (False, True, "keeps its factor")]
)
def test_a_scaler_on_one_side_only_is_handled_and_logged(tmp_path, caplog, saved_on, loaded_on, told):
    made = parts()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=saved_on)
    saved(tmp_path / "a.pt", *made, scaler=scaler)
    other = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=loaded_on)
    load_checkpoint(tmp_path / "a.pt", *parts(), scaler=other)
    assert told in caplog.text
    assert other.get_scale() == (64.0 if loaded_on else 1.0)


def test_tied_gpt_round_trips_and_random_states_and_counters_weigh_under_50_kb(tmp_path):
    model = MiniGPT(MiniGPTConfig(vocab_size=11, context=8, layers=1, heads=1, width=8))
    save_checkpoint(model, None, None, TrainState(losses=[0.1] * 1000), tmp_path / "a.pt")
    again = MiniGPT(model.config)
    load_checkpoint(tmp_path / "a.pt", again, None, None)
    assert again.head.weight is again.tokens.weight
    atomic_save({"rng": capture_rng_state(), "state": TrainState(losses=[0.1] * 1000).to_dict()}, tmp_path / "b.pt")
    assert (tmp_path / "b.pt").stat().st_size < 50_000


def test_reading_gives_the_payload_on_the_cpu(tmp_path):
    saved(tmp_path / "a.pt", *parts())
    assert read_checkpoint(tmp_path / "a.pt")["state"]["step"] == 3


@pytest.mark.parametrize("part", ["rng", "state"])
def test_a_verified_file_with_a_malformed_part_is_refused_before_anything_is_changed(part, tmp_path):
    model = nn.Linear(2, 1)
    path = tmp_path / "a.pt"
    payload = run_payload(model, None, None, TrainState())
    payload[part] = {"python": 7}
    atomic_save(payload, path)
    other = nn.Linear(2, 1)
    before, drawn = other.weight.detach().clone(), torch.get_rng_state()
    with pytest.raises(CheckpointError, match=r"is damaged: .*; resume from an older checkpoint"):
        load_checkpoint(path, other, None, None)
    assert torch.equal(other.weight, before)
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.AdamW])
def test_moments_of_weights_in_another_order_are_refused(tmp_path, kind):
    model, _, _ = parts()
    optimizer = kind(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    save_checkpoint(model, optimizer, None, TrainState(), tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"does not fit the optimizer: .* has shape"):
        load_checkpoint(tmp_path / "a.pt", model, kind(list(model.parameters())[::-1]), None)


def test_weights_of_one_shape_in_another_order_are_refused_where_the_optimizer_knows_their_names(tmp_path):
    """Else each gets the moments of another, and nothing says so."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    optimizer = torch.optim.AdamW(model.named_parameters())
    save_checkpoint(model, optimizer, None, TrainState(), tmp_path / "a.pt")
    load_checkpoint(tmp_path / "a.pt", model, torch.optim.AdamW(model.named_parameters()), None)
    load_checkpoint(tmp_path / "a.pt", model, torch.optim.AdamW(model.parameters()), None)
    turned = torch.optim.AdamW(list(model.named_parameters())[::-1])
    with pytest.raises(CheckpointError, match=r"its weight 0 is 0\.weight there and 1\.weight here"):
        load_checkpoint(tmp_path / "a.pt", model, turned, None)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"state": None}, "state is a NoneType, expected a TrainState"),
        ({"model": None}, "model is a NoneType, expected a torch.nn.Module"),
        (
            {"loader": DataLoader([1, 2])},
            r"loader is a DataLoader without state_dict\(\); a StatefulDataLoader has one",
        ),
        ({"scheduler": 3}, r"scheduler is an int without state_dict\(\); pass None"),
    ],
)
def test_what_cannot_be_saved_or_loaded_is_refused_before_anything_is_written_or_read(tmp_path, change, told):
    parts = {"model": nn.Linear(1, 1), "optimizer": None, "scheduler": None, "state": TrainState(), **change}
    with pytest.raises(ValueError, match=told):
        save_checkpoint(**parts, out_path=tmp_path / "a.pt")
    assert list(tmp_path.iterdir()) == []
    del parts["state"]
    if "state" not in change:
        with pytest.raises(ValueError, match=told.replace("state_dict", "load_state_dict")):
            load_checkpoint(tmp_path / "none.pt", **parts)

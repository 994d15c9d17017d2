"""The callback in Lightning's own Trainer, on a tiny module: what it reads and stops, and that it changes nothing."""

import itertools
import logging
import math
import warnings

import pytest
import torch

pytest.importorskip("lightning.pytorch", reason="the extra lightning is not installed: make test-adapters")

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning_runs import BATCH, Module, fit, guarded, make, rows_of, same
from sources import AtStep, heat_at

from safetrain_core import ThermalAbort, TrainingFailed, diagnose
from safetrain_core.adapters.lightning import SafeTrainCallback


def numbers(path, column):
    return [float(row[column]) for row in rows_of(path)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 4, "max_steps": 6},
        {"gradient_clip_val": None},
        {"gradient_clip_algorithm": "value"},
    ],
    ids=["plain", "accumulated", "no clip", "clip by value"],
)
def test_weights_are_bit_for_bit_those_without_it_and_rows_are_what_the_module_logs(tmp_path, options):
    plain = fit(*make(tmp_path / "plain", **options), validate=True)
    csv = tmp_path / "run.csv"
    knobs = {"csv_log_path": str(csv), "loss_jump_factor": 50.0}
    trainer, module, callback = guarded(tmp_path / "run", knobs, logger=True, **options)
    fit(trainer, module, validate=True)
    assert same(plain, module)
    steps = options.get("max_steps", 12)
    assert numbers(csv, "step") == numbers(csv, "updates") == list(range(1, steps + 1))
    logs = rows_of(tmp_path / "run" / "metrics.csv")
    losses = [float(row["train_loss"]) for row in logs if row["train_loss"]]
    many = options.get("accumulate_grad_batches", 1)
    if many == 1:
        assert numbers(csv, "loss") == losses
    else:  # Lightning logs the last micro-batch of a window; the row has the mean
        assert losses != numbers(csv, "loss")
    assert numbers(csv, "effective_batch_size") == [BATCH * many] * steps
    told = [float(row["val_loss"]) for row in rows_of(csv) if row["val_loss"]]
    assert told == pytest.approx([float(row["val_loss"]) for row in logs if row["val_loss"]])
    norms, clipped = numbers(csv, "gradient_norm"), [row["gradient_norm_clipped"] for row in rows_of(csv)]
    if "gradient_clip_algorithm" in options:
        assert set(clipped) == {""}
    else:
        clip = options.get("gradient_clip_val", 1.0) or math.inf
        assert [float(value) for value in clipped] == [min(norm, clip) for norm in norms]
    assert callback.result.status == "completed"


def test_loss_and_norm_of_a_window_are_the_means_of_its_batches_also_of_a_short_one(tmp_path):
    """12 batches in windows of 5: the last has 2. Lightning divides it by 5, too; the row's loss is the mean."""
    seen, norms = [], []

    class Look(Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            norms.append(torch.nn.utils.get_total_norm([p.grad for p in module.parameters()]).item())

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            seen.append(outputs["loss"].item() * 5)

    trainer, module, callback = guarded(tmp_path, callbacks=[Look()], accumulate_grad_batches=5, max_epochs=1)
    fit(trainer, module)
    means = [sum(part) / len(part) for part in (seen[:5], seen[5:10], seen[10:])]
    assert [row.loss for row in callback.result.rows] == pytest.approx(means, rel=1e-6)
    assert [row.pre_clip for row in callback.result.rows] == pytest.approx(norms, rel=1e-6)


def test_a_nan_batch_is_told_by_the_doctor_once_and_in_the_log(tmp_path, caplog):
    csv = tmp_path / "run.csv"
    trainer, module, callback = guarded(tmp_path, {"csv_log_path": str(csv)}, max_steps=60)
    with caplog.at_level(logging.WARNING, "safetrain_core"):
        fit(trainer, module, {5: math.nan})
    assert [math.isnan(loss) for loss in numbers(csv, "loss")] == [step >= 5 for step in range(1, 61)]
    assert [finding.rule for finding in callback.result.findings] == ["nan_stays"]
    assert sum(record.message.startswith("doctor:") for record in caplog.records) == 1
    assert "nan_stays" in [finding.rule for finding in diagnose(csv)]


JUMP = {"loss_jump_factor": 3.0, "loss_jump_window": 5}


def test_a_loss_jump_stops_training_before_its_update(tmp_path, caplog):
    good = fit(*make(tmp_path / "good", max_steps=8))
    csv = tmp_path / "run.csv"
    trainer, module, callback = guarded(tmp_path / "run", {"csv_log_path": str(csv), **JUMP})
    fit(trainer, module, {9: 200.0})
    assert trainer.global_step == 9
    assert same(good, module)
    last = rows_of(csv)[-1]
    assert (last["step"], last["updates"], last["skipped"], last["skip_reason"]) == ("9", "8", "1", "loss_jump")
    said = [record.message for record in caplog.records if "loss_jump" in record.message]
    assert len(said) == 1
    assert "at step 9" in said[0]
    assert callback.result.status == "failed"


@pytest.mark.parametrize("factor", [200.0, math.nan])
def test_a_loss_jump_raises_before_anything_is_saved_where_that_is_asked_for(tmp_path, factor):
    saver = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=3, save_top_k=-1)
    knobs = {**JUMP, "raise_on_loss_jump": True}
    trainer, module, callback = guarded(tmp_path, knobs, enable_checkpointing=True, callbacks=[saver])
    with pytest.raises(TrainingFailed, match=r"at step 9 .* resume from .*step=6.ckpt") as raised:
        fit(trainer, module, {9: factor})
    assert raised.value.result is callback.result
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=0-step=3.ckpt", "epoch=0-step=6.ckpt"]
    assert all(weight.isfinite().all() for weight in module.state_dict().values())


def test_a_pause_saves_waits_and_ends_with_the_same_weights(tmp_path):
    plain = fit(*make(tmp_path / "plain"))
    knobs, card = heat_at(5, 86.0)
    csv, checkpoint = tmp_path / "run.csv", tmp_path / "run" / "safetrain_step_00000005.ckpt"
    card.cools_when(checkpoint.exists, 84.0, 80.0, 74.0)
    trainer, module, callback = guarded(tmp_path / "run", {**knobs, "csv_log_path": str(csv)})
    card.trainer = callback.run
    fit(trainer, module)
    assert same(plain, module)
    assert checkpoint.exists()
    assert (callback.result.pauses, callback.result.status) == (1, "completed")
    assert [event.state.value for event in callback.result.thermal_events] == ["paused", "normal"]
    events = {row["step"]: row["thermal_event"] for row in rows_of(csv) if row["thermal_event"]}
    assert list(events) == ["5"]
    assert events["5"].startswith("paused 86 C; resumed 74 C after")


def test_of_the_checkpoints_before_pauses_the_newest_is_kept(tmp_path):
    knobs, card = heat_at(3, 86.0)
    awaited = [3, 7]

    def saved():
        there = card.celsius == 86.0 and (tmp_path / "ours" / f"safetrain_step_{awaited[0]:08d}.ckpt").exists()
        return bool(there and awaited.pop(0))

    card.cools_when(saved, 74.0, 74.0)
    knobs["sinks"].append(AtStep(7, lambda: card.be(86.0)))
    trainer, module, callback = guarded(tmp_path, {**knobs, "checkpoint_dir": tmp_path / "ours"})
    card.trainer = callback.run
    fit(trainer, module)
    assert callback.result.pauses == 2
    assert [path.name for path in (tmp_path / "ours").iterdir()] == ["safetrain_step_00000007.ckpt"]


@pytest.mark.parametrize("how", ["critical", "lost"])
def test_an_abort_saves_a_checkpoint_and_raises_and_the_run_goes_on_from_there(tmp_path, how):
    """Without dropout and between two epochs: Lightning saves no random states, and begins a plain loader anew."""
    module = Module(dropout=0.0)
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    plain = fit(*make(tmp_path / "plain", max_steps=18, module=module))
    knobs, card = heat_at(12, 96.0)
    if how == "lost":
        knobs["sinks"][0].action = lambda: card.be(None, polls=3)
    csv = str(tmp_path / "run.csv")
    module = Module(dropout=0.0)
    module.load_state_dict(before)
    knobs["csv_log_path"] = csv
    trainer, module, callback = guarded(tmp_path / "run", knobs, max_steps=18, module=module)
    card.trainer = callback.run
    with pytest.raises(ThermalAbort, match=r"resume from .*safetrain_step_00000012.ckpt") as raised:
        fit(trainer, module)
    assert raised.value.result is callback.result
    assert callback.result.status == "aborted"
    assert rows_of(csv)[-1]["thermal_event"].startswith("aborted")
    knobs = {"csv_log_path": csv, "gpu_temp_guard": True, "thermal_source": lambda: 50.0}
    trainer, again, callback = guarded(tmp_path / "run", knobs, max_steps=18, module=Module(dropout=0.0))
    fit(trainer, again, ckpt_path=tmp_path / "run" / "safetrain_step_00000012.ckpt")
    assert numbers(csv, "step") == numbers(csv, "updates") == list(range(1, 19))
    assert same(plain, again)


def test_a_card_that_is_critical_before_the_first_step_never_trains(tmp_path):
    trainer, module, _ = guarded(tmp_path, {"gpu_temp_guard": True, "thermal_source": lambda: 99.0})
    with pytest.raises(ThermalAbort, match="above critical 95 C"):
        fit(trainer, module)
    assert trainer.global_step == 0


def test_a_resume_continues_log_counters_and_losses_with_no_step_twice(tmp_path):
    csv = tmp_path / "run.csv"
    knobs = {"csv_log_path": str(csv), **JUMP}
    saver = ModelCheckpoint(dirpath=tmp_path / "saved", every_n_train_steps=12, save_top_k=-1)
    trainer, module, callback = guarded(
        tmp_path, knobs, max_steps=24, enable_checkpointing=True, callbacks=[saver], module=Module()
    )
    fit(trainer, module)
    path = tmp_path / "saved" / "epoch=0-step=12.ckpt"
    kept = torch.load(path, weights_only=False)["callbacks"]["SafeTrainCallback"]
    assert kept["updates"] == 12
    assert kept["losses"] == numbers(csv, "loss")[7:12]
    sink = AtStep()
    trainer, again, callback = guarded(tmp_path, {**knobs, "sinks": [sink]}, max_steps=24)
    fit(trainer, again, ckpt_path=path)
    assert sink.resumed_after == 12
    assert [row["step"] for row in sink.rows] == list(range(13, 25))
    assert numbers(csv, "step") == numbers(csv, "updates") == list(range(1, 25))
    # The window of losses was full from the checkpoint on: a jump in the first step after it is seen.
    trainer, again, callback = guarded(tmp_path, knobs, max_steps=24)
    fit(trainer, again, {1: 500.0}, ckpt_path=path)
    assert callback.run.failure.step == 13


class Watch(Callback):
    """The weights before the first step, and after each."""

    def __init__(self):
        self.seen = []

    def on_train_start(self, trainer, module):
        self.on_train_batch_end(trainer, module)

    def on_train_batch_end(self, trainer, module, *args):
        self.seen.append([p.detach().clone() for p in module.parameters()])


def half(scale):
    """FP16 by Lightning's own plugin, with a real scaler on a CPU."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=6))


@pytest.mark.parametrize(("fused", "steps"), [(False, 1010), (True, 80)])
def test_what_a_real_scaler_skips_is_a_skip_and_too_many_of_them_are_warned_of(tmp_path, fused, steps):
    csv, watch = tmp_path / "run.csv", Watch()
    options = {"plugins": [half(2.0**40)], "max_steps": steps, "gradient_clip_val": None, "logger": False}
    module = Module(lr=1e-4, fused=fused)
    knobs = {"csv_log_path": str(csv), "skip_rate_alert": 0.1}
    trainer, module, _ = guarded(tmp_path, knobs, module=module, callbacks=[watch], **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(trainer, module)
    seen = watch.seen
    took = [not all(torch.equal(a, b) for a, b in zip(x, y, strict=True)) for x, y in itertools.pairwise(seen)]
    rows = rows_of(csv)
    assert [row["skipped"] == "0" for row in rows] == took
    skips = took.count(False)
    assert skips > steps / 10
    assert {row["skip_reason"] for row in rows} == {"", "non_finite_grad"}
    assert [float(row["scaler_scale"]) for row in rows[:2]] == [2.0**40, 2.0**39]
    assert int(rows[-1]["updates"]) == steps - skips
    norms = [float(row["gradient_norm"]) for row in rows if row["skipped"] == "0"]
    assert 0 < min(norms) <= max(norms) < 50  # of unscaled gradients
    assert all(0 < float(row["loss"]) < 5 for row in rows)  # not multiplied by the scale
    said = [str(w.message) for w in caught if "skip rate" in str(w.message)]
    assert len(said) == (steps > 1000)
    assert all("above 10.0%" in text for text in said)


@pytest.mark.parametrize("fused", [False, True])
def test_a_jump_under_a_scaler_leaves_the_update_out_too(tmp_path, fused):
    watch = Watch()
    options = {"plugins": [half(1024.0)], "max_steps": 24, "gradient_clip_val": None}
    trainer, module, callback = guarded(tmp_path, JUMP, module=Module(fused=fused), callbacks=[watch], **options)
    fit(trainer, module, {12: 30.0})
    assert callback.run.failure.step == 12
    assert all(torch.equal(a, b) for a, b in zip(watch.seen[-1], watch.seen[-2], strict=True))


def test_an_error_in_the_step_closes_the_log_and_the_next_run_may_write_it(tmp_path):
    class Torn(Module):
        def training_step(self, batch, batch_idx):
            if batch_idx == 3:
                raise KeyError("torn")
            return super().training_step(batch, batch_idx)

    csv, sink = tmp_path / "run.csv", AtStep()
    trainer, module, _ = guarded(tmp_path, {"csv_log_path": str(csv), "sinks": [sink]}, module=Torn())
    with pytest.raises(KeyError):
        fit(trainer, module)
    assert sink.closed
    assert numbers(csv, "step") == [1, 2, 3]
    fit(*guarded(tmp_path, {"csv_log_path": str(csv)})[:2])
    assert numbers(csv, "step") == list(range(1, 13))


def test_mistakes_are_told_at_once_and_by_name(tmp_path):
    for options, message in (
        ({"loss_jump_factor": 0.5}, r"loss_jump_factor=0.5 is out of range; allowed: number > 1"),
        ({"csv_log_pth": "x"}, "unknown key csv_log_pth; did you mean csv_log_path"),
        ({"max_steps": 3}, "max_steps is the trainer's own to say"),
        ({"gpu_temp_guard": True}, "gpu_temp_guard has no source of temperatures"),
    ):
        with pytest.raises(ValueError, match=message):
            SafeTrainCallback(**options)

    class ByHand(Module):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    with pytest.raises(ValueError, match="needs automatic optimization"):
        fit(*guarded(tmp_path, module=ByHand(), gradient_clip_val=None)[:2])

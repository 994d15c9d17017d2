"""The callback in Hugging Face's own Trainer, on tiny models: what it reads and stops, and that it changes nothing."""

import itertools
import json
import logging
import math
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the extra huggingface is not installed: make test-adapters")
pytest.importorskip("accelerate", reason="the extra huggingface is not installed: make test-adapters")

from hf_runs import BATCH, data, guarded, in_order, make, rows_of, same
from sources import AtStep, heat_at

from safetrain_core import ThermalAbort, TrainingFailed, diagnose
from safetrain_core.adapters.huggingface import SafeTrainerCallback


def logged(trainer, name="loss"):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def numbers(path, column):
    return [float(row[column]) for row in rows_of(path)]


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_accumulation_steps": 3, "max_steps": 6}, {"max_grad_norm": 0.0, "optim": "sgd"}],
    ids=["plain", "accumulated", "no clip"],
)
def test_weights_are_bit_for_bit_those_without_it_and_rows_are_what_the_trainer_logs(tmp_path, options):
    plain = make(tmp_path / "plain", **options)
    plain.train()
    csv = tmp_path / "run.csv"
    trainer, callback = guarded(tmp_path / "run", {"csv_log_path": str(csv), "loss_jump_factor": 50.0}, **options)
    trainer.train()
    assert same(plain.model, trainer.model)
    assert logged(plain) == logged(trainer)
    steps = options.get("max_steps", 12)
    assert numbers(csv, "step") == numbers(csv, "updates") == list(range(1, steps + 1))
    assert numbers(csv, "loss") == logged(trainer)
    assert numbers(csv, "gradient_norm") == logged(trainer, "grad_norm")
    assert numbers(csv, "learning_rate") == logged(trainer, "learning_rate")
    clip = options.get("max_grad_norm", 1.0) or math.inf
    assert numbers(csv, "gradient_norm_clipped") == [min(norm, clip) for norm in logged(trainer, "grad_norm")]
    assert numbers(csv, "effective_batch_size") == [BATCH * options.get("gradient_accumulation_steps", 1)] * steps
    assert {row["retries"] for row in rows_of(csv)} == {""}
    assert callback.result.status == "completed"
    assert vars(trainer).get("training_step") is None  # the trainer is as it was
    assert "clip_grad_norm_" not in vars(trainer.accelerator)


def test_a_model_of_the_library_with_token_weighted_windows_and_evaluations(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 32, (48, 12), generator=generator)
    labels = tokens.clone()
    labels[::2, 4:] = -100  # windows of unequal numbers of tokens
    examples = [{"input_ids": a, "labels": b} for a, b in zip(tokens, labels, strict=True)]
    torch.manual_seed(0)
    options = {
        "net": transformers.LlamaForCausalLM(config),
        "examples": examples,
        "gradient_accumulation_steps": 2,
        "max_steps": 30,
        "eval_strategy": "steps",
        "eval_steps": 10,
        "max_grad_norm": 100.0,
    }
    csv = tmp_path / "run.csv"
    trainer, _ = guarded(tmp_path / "run", {"csv_log_path": str(csv)}, **options)
    trainer.eval_dataset = examples[:8]
    trainer.train()
    assert numbers(csv, "loss") == pytest.approx(logged(trainer), rel=1e-6)
    told = {int(row["step"]): float(row["val_loss"]) for row in rows_of(csv) if row["val_loss"]}
    assert list(told) == [10, 20, 30]
    assert list(told.values()) == logged(trainer, "eval_loss")
    assert not [finding for finding in diagnose(csv) if finding.severity == "error"]


class Reweighted(in_order()):
    """A loss of its own, as many overrides have it: the model's output does not tell it."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        output = model(**inputs)
        loss = 3 * output["loss"] + output["logits"].square().mean()
        return (loss, output) if return_outputs else loss


def test_the_loss_is_the_one_that_backward_gets_not_the_one_in_the_models_output(tmp_path):
    trainer, callback = guarded(tmp_path, {}, trainer_class=Reweighted, gradient_accumulation_steps=2)
    trainer.train()
    assert [row.loss for row in callback.result.rows] == logged(trainer)


def test_a_nan_that_the_trainers_filter_hides_is_in_the_rows_and_the_doctor_says_so_once(tmp_path, caplog):
    csv = tmp_path / "run.csv"
    trainer, callback = guarded(tmp_path, {"csv_log_path": str(csv)}, examples=data({5: math.nan}), max_steps=60)
    with caplog.at_level(logging.WARNING, "safetrain_core"):
        trainer.train()
    assert set(logged(trainer)[5:]) == {0.0}  # what Hugging Face writes for NaN
    assert [math.isnan(loss) for loss in numbers(csv, "loss")] == [step >= 5 for step in range(1, 61)]
    assert [finding.rule for finding in callback.result.findings] == ["nan_stays"]
    said = [record.message for record in caplog.records if record.message.startswith("doctor:")]
    assert len(said) == 1
    assert "NaN" in said[0]
    assert "nan_stays" in [finding.rule for finding in diagnose(csv)]


JUMP = {"loss_jump_factor": 3.0, "loss_jump_window": 5}


def test_a_loss_jump_stops_training_before_its_update_and_saves_nothing(tmp_path, caplog):
    good = make(tmp_path / "good", max_steps=8, lr_scheduler_type="constant")
    good.train()
    csv = tmp_path / "run.csv"
    trainer, callback = guarded(
        tmp_path / "run",
        {"csv_log_path": str(csv), **JUMP},
        examples=data({9: 200.0}),
        lr_scheduler_type="constant",
        save_strategy="steps",
        save_steps=3,
        eval_strategy="epoch",
    )
    trainer.train()
    assert trainer.state.global_step == 9
    assert same(good.model, trainer.model)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoint-3", "checkpoint-6"]
    assert logged(trainer, "eval_loss") == []
    last = rows_of(csv)[-1]
    assert (last["step"], last["updates"], last["skipped"], last["skip_reason"]) == ("9", "8", "1", "loss_jump")
    said = [record.message for record in caplog.records if "loss_jump" in record.message]
    assert len(said) == 1
    assert "at step 9" in said[0]
    assert said[0].endswith("checkpoint-6")
    assert (callback.result.status, callback.run.failure.step) == ("failed", 9)


def test_a_loss_jump_raises_where_that_is_asked_for_and_so_does_a_loss_that_is_nan(tmp_path):
    for factor in (200.0, math.nan):
        knobs = {**JUMP, "raise_on_loss_jump": True}
        trainer, callback = guarded(tmp_path, knobs, examples=data({9: factor}))
        with pytest.raises(TrainingFailed, match=r"at step 9 .* no checkpoint was saved") as raised:
            trainer.train()
        assert raised.value.result is callback.result
        assert all(weight.isfinite().all() for weight in trainer.model.state_dict().values())


def test_a_pause_saves_waits_and_ends_with_the_same_weights(tmp_path):
    plain = make(tmp_path / "plain")
    plain.train()
    knobs, card = heat_at(5, 86.0)
    csv, checkpoint = tmp_path / "run.csv", tmp_path / "run" / "checkpoint-5"
    card.cools_when(lambda: (checkpoint / "trainer_state.json").exists(), 84.0, 80.0, 74.0)
    trainer, callback = guarded(tmp_path / "run", {**knobs, "csv_log_path": str(csv)})
    card.trainer = callback.run
    trainer.train()
    assert same(plain.model, trainer.model)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint-5"]
    assert (callback.result.pauses, callback.result.status) == (1, "completed")
    assert [event.state.value for event in callback.result.thermal_events] == ["paused", "normal"]
    events = {row["step"]: row["thermal_event"] for row in rows_of(csv) if row["thermal_event"]}
    assert list(events) == ["5"]
    assert events["5"].startswith("paused 86 C; resumed 74 C after")


@pytest.mark.parametrize("how", ["critical", "lost"])
def test_an_abort_saves_a_checkpoint_and_raises_and_the_run_goes_on_from_there(tmp_path, how):
    plain = make(tmp_path / "plain")
    plain.train()
    knobs, card = heat_at(5, 96.0)
    if how == "lost":
        knobs["sinks"][0].action = lambda: card.be(None, polls=3)
    csv = str(tmp_path / "run.csv")
    trainer, callback = guarded(tmp_path / "run", {**knobs, "csv_log_path": csv}, eval_strategy="epoch")
    card.trainer = callback.run
    with pytest.raises(ThermalAbort, match=r"resume from .*checkpoint-5") as raised:
        trainer.train()
    assert raised.value.result is callback.result
    assert callback.result.status == "aborted"
    assert logged(trainer, "eval_loss") == []  # no work for a card that is critical
    assert rows_of(csv)[-1]["thermal_event"].startswith("aborted")
    again, _ = guarded(tmp_path / "run", {"csv_log_path": csv, "gpu_temp_guard": True, "thermal_source": lambda: 50.0})
    again.train(resume_from_checkpoint=True)
    assert same(plain.model, again.model)
    assert numbers(csv, "step") == list(range(1, 13))


def test_a_card_that_is_critical_before_the_first_step_never_trains(tmp_path):
    trainer, _ = guarded(tmp_path, {"gpu_temp_guard": True, "thermal_source": lambda: 99.0})
    with pytest.raises(ThermalAbort, match="above critical 95 C"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_resume_continues_log_counters_and_losses_with_no_step_twice(tmp_path):
    csv = tmp_path / "run.csv"
    knobs = {"csv_log_path": str(csv), **JUMP}
    first, _ = guarded(tmp_path / "run", knobs, max_steps=12, save_strategy="steps", save_steps=5)
    first.train()
    whole = rows_of(csv)
    kept = json.loads((tmp_path / "run" / "checkpoint-5" / "trainer_state.json").read_text())["stateful_callbacks"]
    assert kept["safetrain"]["updates"] == 5
    assert kept["safetrain"]["losses"] == [float(row["loss"]) for row in whole[:5]]
    sink = AtStep()
    again, callback = guarded(tmp_path / "run", {**knobs, "sinks": [sink]}, max_steps=12)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-5"))
    assert sink.resumed_after == 5
    assert [row["step"] for row in sink.rows] == list(range(6, 13))
    timing = ("step_time_ms", "samples_per_s")
    assert [{k: v for k, v in row.items() if k not in timing} for row in rows_of(csv)] == [
        {k: v for k, v in row.items() if k not in timing} for row in whole
    ]
    assert same(first.model, again.model)
    # The window of losses was full from the checkpoint on: a jump in the first step after it is seen.
    spoilt, callback = guarded(tmp_path / "run", knobs, examples=data({6: 500.0}))
    spoilt.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-5"))
    assert callback.run.failure.step == 6


def test_a_checkpoint_of_a_run_without_the_callback_is_resumed_too(tmp_path):
    make(tmp_path / "run", save_strategy="steps", save_steps=5).train()
    csv = tmp_path / "run.csv"
    again, _ = guarded(tmp_path / "run", {"csv_log_path": str(csv)})
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-5"))
    assert numbers(csv, "step") == numbers(csv, "updates") == list(range(6, 13))


class Half(in_order()):
    """Accelerate's own FP16, with a real scaler, on a CPU, where it refuses to begin."""

    init_scale = 2.0**40

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.accelerator.state._mixed_precision = "fp16"
        self.accelerator.native_amp = True
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=self.init_scale, growth_interval=6)


class CalmHalf(Half):
    init_scale = 1024.0


@pytest.mark.parametrize(("optim", "steps"), [("adamw_torch", 1010), ("adamw_torch_fused", 80)])
def test_what_a_real_scaler_skips_is_a_skip_and_too_many_of_them_are_warned_of(tmp_path, optim, steps):
    csv = tmp_path / "run.csv"
    trainer, callback = guarded(
        tmp_path,
        {"csv_log_path": str(csv), "skip_rate_alert": 0.1},
        trainer_class=Half,
        optim=optim,
        max_steps=steps,
        learning_rate=1e-4,
        logging_strategy="no",
    )
    weights = []
    trainer.add_callback(Watch(weights))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    took = [not all(torch.equal(a, b) for a, b in zip(x, y, strict=True)) for x, y in itertools.pairwise(weights)]
    rows = rows_of(csv)
    assert [row["skipped"] == "0" for row in rows] == took
    skips = took.count(False)
    assert skips > steps / 10
    assert {row["skip_reason"] for row in rows} == {"", "non_finite_grad"}
    assert float(rows[0]["scaler_scale"]) == 2.0**40
    assert float(rows[1]["scaler_scale"]) == 2.0**39
    assert int(rows[-1]["updates"]) == steps - skips
    said = [str(w.message) for w in caught if "skip rate" in str(w.message)]
    assert len(said) == (steps > 1000)
    assert all("above 10.0%" in text for text in said)
    assert callback.result.skip_rate == skips / steps


class Watch(transformers.TrainerCallback):
    """The weights before the first step, and after each."""

    def __init__(self, seen):
        self.seen = seen

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.seen.append([p.detach().clone() for p in model.parameters()])

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.seen.append([p.detach().clone() for p in model.parameters()])


def test_a_jump_under_a_scaler_leaves_the_update_out_too(tmp_path):
    for optim in ("adamw_torch", "adamw_torch_fused"):
        weights = []
        trainer, callback = guarded(
            tmp_path, JUMP, trainer_class=CalmHalf, optim=optim, examples=data({12: 30.0}), max_steps=24
        )
        trainer.add_callback(Watch(weights))
        trainer.train()
        assert callback.run.failure.step == 12
        assert all(torch.equal(a, b) for a, b in zip(weights[-1], weights[-2], strict=True))


def test_an_error_in_the_step_closes_the_log_and_the_next_run_may_write_it(tmp_path):
    csv = str(tmp_path / "run.csv")

    class Torn(in_order()):
        def compute_loss(self, *args, **kwargs):
            if self.state.global_step == 3:
                raise KeyError("torn")
            return super().compute_loss(*args, **kwargs)

    sink = AtStep()
    trainer, _ = guarded(tmp_path, {"csv_log_path": csv, "sinks": [sink]}, trainer_class=Torn)
    with pytest.raises(KeyError):
        trainer.train()
    assert sink.closed
    assert numbers(csv, "step") == [1, 2, 3]

    class StopsInAnotherCallback(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                raise KeyError("elsewhere")

    trainer, _ = guarded(tmp_path, {"csv_log_path": csv}, callbacks=[StopsInAnotherCallback()])
    with pytest.raises(KeyError):
        trainer.train()
    trainer, _ = guarded(tmp_path, {"csv_log_path": csv})
    trainer.train()
    assert numbers(csv, "step") == list(range(1, 13))


def test_mistakes_are_told_at_once_and_by_name(tmp_path):
    trainer = make(tmp_path)
    for options, message in (
        ({"loss_jump_factor": 0.5}, r"loss_jump_factor=0.5 is out of range; allowed: number > 1"),
        ({"csv_log_pth": "x"}, "unknown key csv_log_pth; did you mean csv_log_path"),
        ({"batch_size": 3}, "batch_size is the trainer's own to say; this callback takes skip_rate_alert,"),
        ({"gpu_temp_guard": True}, "gpu_temp_guard has no source of temperatures"),
        ({"gpu_temp_guard": True, "thermal_source": 5}, "a source of temperatures is called"),
        ({"gpu_temp_pause_threshold_c": 60.0}, "thresholds must rise"),
        ({"nvml_device_index": 1}, "has no effect with gpu_metrics_backend=none"),
    ):
        with pytest.raises(ValueError, match=message):
            SafeTrainerCallback(trainer, **options)
    callback = SafeTrainerCallback(trainer)
    other = make(tmp_path)
    other.add_callback(callback)
    with pytest.raises(ValueError, match="made for another Trainer"):
        other.train()

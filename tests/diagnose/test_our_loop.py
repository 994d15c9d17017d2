"""Runs of SafeTrainer: their logs diagnosed, and the doctor that looks on while they run."""

import logging

import pytest
import torch
from hot import Card
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from safetrain_core import SafeTrainer, StepLog, ThermalAbort, TrainConfig, diagnose, read_log
from safetrain_core.diagnose.running import EVERY, WINDOW, RunningDoctor


def data(count=240, seed=1):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=g)
    return TensorDataset(x, x[:, :1] * 2 + 0.1 * torch.randn(count, 1, generator=g))


def run(tmp_path, *, fault=None, dtype=None, steps=120, dropout=0.0, checkpoint_dir=None, thermal_source=None, **more):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1))
    path = str(tmp_path / "log.csv")
    config = TrainConfig(
        **{"max_steps": steps, "learning_rate": 0.01, "csv_log_path": path, "max_nan_retries": 10**6}
        | ({"use_amp": True, "amp_dtype": dtype} if dtype else {})
        | more
    )
    # No validation where a run is to be continued: a loader's iterator draws a number, and the end of a run validates.
    loaders = DataLoader(data(), 8, shuffle=True), None if checkpoint_dir else DataLoader(data(64, 2), 32)
    trainer = SafeTrainer(
        model, config, *loaders, fault=fault, checkpoint_dir=checkpoint_dir, thermal_source=thermal_source
    )
    return trainer, config


def rules(found):
    return [finding.rule for finding in found if finding.severity != "info"]


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
def test_a_healthy_run_of_ours_is_healthy_and_the_running_doctor_is_silent(dtype, tmp_path, caplog):
    trainer, _ = run(tmp_path, dtype=dtype, eval_every_n_steps=20)
    with caplog.at_level(logging.WARNING):
        result = trainer.fit()
    found = diagnose(tmp_path / "log.csv")
    assert [f for f in found if f.severity == "error"] == []
    assert result.findings == []
    assert "doctor" not in caplog.text


def test_one_step_of_eight_overflowing_is_a_skip_rate(tmp_path):
    def fault(step, model):
        if step % 8 == 0:
            handle = model[0].weight.register_hook(lambda grad: (handle.remove(), grad * float("inf"))[1])

    trainer, _ = run(tmp_path, fault=fault, dtype="float16")
    trainer.fit()
    found = diagnose(tmp_path / "log.csv")
    assert found[0].rule == "skip_rate"
    assert "non_finite_grad" in found[0].symptom


def test_a_thermal_pause_is_told_with_its_seconds(tmp_path):
    card = Card()

    def fault(step, model):
        if step == 10:
            card.be(90)
            card.cools_when(lambda: trainer._thermal.guards[trainer._thermal.home].state.name == "PAUSED", 60)

    trainer, _ = run(
        tmp_path, fault=fault, steps=30, gpu_temp_guard=True, gpu_temp_poll_interval_seconds=0.01, thermal_source=card
    )
    card.trainer = trainer
    trainer.fit()
    found = next(f for f in diagnose(tmp_path / "log.csv") if f.rule == "thermal_pauses")
    assert "paused the run 1 time," in found.symptom
    assert "90" in str(found.evidence[0])


def test_a_lost_sensor_is_no_hot_card(tmp_path):
    card = Card()

    def fault(step, model):
        if step == 10:
            card.be(None, polls=4)

    trainer, _ = run(
        tmp_path, fault=fault, steps=30, gpu_temp_guard=True, gpu_temp_poll_interval_seconds=0.01, thermal_source=card
    )
    card.trainer = trainer
    with pytest.raises(ThermalAbort, match="sensor was lost"):
        trainer.fit()
    found = diagnose(tmp_path / "log.csv")
    assert (found[0].rule, found[0].severity) == ("sensor_lost", "error")
    assert "temperature unknown" in str(found[0].evidence[0])


def test_a_resumed_run_of_ours_equals_its_baseline_and_one_that_lost_its_generators_does_not(tmp_path):
    whole, split, bent = (tmp_path / name for name in ("whole", "split", "bent"))
    for folder in (whole, split, bent):
        folder.mkdir()

    def fit(folder, steps, resume=False, forget=False):
        trainer, _ = run(
            folder,
            steps=steps,
            scheduler_type="constant",
            checkpoint_dir=folder / "out",
            dropout=0.3,
            fault=(lambda step, model: torch.manual_seed(9) if forget and step == 31 else None),
        )
        if resume:
            trainer.resume()
        trainer.fit()

    fit(whole, 60)
    for folder, forget in ((split, False), (bent, True)):
        fit(folder, 30)
        fit(folder, 60, resume=True, forget=forget)
    assert rules(diagnose(split / "log.csv", baseline=whole / "log.csv")) == []
    found = diagnose(bent / "log.csv", baseline=whole / "log.csv")
    assert found[0].rule == "leaves_baseline"
    assert found[0].evidence[0].step == 31
    assert "random numbers" in found[0].cause


def test_a_baseline_of_another_run_is_refused():
    rows = [{"step": s, "loss": 1.0} for s in range(5)]
    with pytest.raises(ValueError, match="no step in common"):
        diagnose(rows, baseline=[{"step": s + 100, "loss": 1.0} for s in range(5)])


def stuck(step):
    return StepLog(step, 0.1, float("inf") if step % 9 == 0 else 1.0, None, 2.0, 64.0, step % 9 == 0, "non_finite_grad")


def test_the_running_doctor_says_a_finding_once_when_it_appears():
    said = []
    doctor = RunningDoctor(say=said.append)
    for step in range(1, 2001):
        doctor.see(stuck(step))
        if step < 25:
            assert not said
    assert [finding.rule for finding in said] == ["scale_never_moves"]
    assert doctor.findings == said


def test_the_running_doctor_reads_two_rows_per_row_at_most():
    doctor = RunningDoctor(say=lambda finding: None)
    for step in range(1, 5001):
        doctor.see(StepLog(step, 0.1, 1.0, 1.0, 2.0, None))
    assert doctor.rows_read <= 5000 * WINDOW / EVERY == 10_000


def test_what_is_said_of_the_beginning_is_not_said_of_a_window_in_the_middle():
    doctor = RunningDoctor()
    for step in range(1, 3001):
        train_loss = (
            1.0 if step < 1000 else 8.0
        )  # the validation loss goes down, the training loss up: no K micro-batches
        doctor.see(StepLog(step, 0.1, 1.0, 1.0, train_loss, None), val_loss=1.0 if step % 50 == 0 else None)
    assert "loss_times_k" not in [finding.rule for finding in doctor.findings]


def test_the_trainer_logs_what_the_running_doctor_finds(tmp_path, caplog):
    """A loss that is summed over the batch and not divided: training at 8 times what validation says."""

    def loss_fn(output, target):
        error = (output - target).square().mean()
        return error * 8 if output.requires_grad else error

    torch.manual_seed(0)
    config = TrainConfig(max_steps=60, learning_rate=1e-4, eval_every_n_steps=5, csv_log_path=str(tmp_path / "log.csv"))
    trainer = SafeTrainer(nn.Linear(6, 1), config, DataLoader(data(), 8), DataLoader(data(64, 2), 32), loss_fn=loss_fn)
    with caplog.at_level(logging.WARNING):
        result = trainer.fit()
    assert [finding.rule for finding in result.findings] == ["loss_times_k"]
    assert caplog.text.count("times the validation loss, from the first validation on") == 1
    assert "loss_times_k" in rules(diagnose(read_log(tmp_path / "log.csv")))

"""The thermal guard in the trainer: what it does between two windows, and that it does nothing else."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from hot import Card, at, counted, loader, make, model, pausing, rows_of, same
from torch import nn

from safetrain_core import GpuReading, SafeTrainer, SimulatedCard, ThermalAbort, TrainConfig
from safetrain_core.checkpoint.single import read_checkpoint


def test_a_pause_saves_first_waits_and_changes_nothing_in_the_run(tmp_path, caplog):
    card, log = Card(), tmp_path / "m.csv"
    plain, whole = make(tmp_path / "a")
    expected = whole.fit()
    net, trainer = make(tmp_path / "b", card, on_row=pausing(tmp_path / "b", card, 5), csv_log_path=str(log))
    result = trainer.fit()
    assert result.rows == expected.rows
    assert same(plain, net)
    assert (result.status, result.pauses, result.switches) == ("completed", 1, 0)
    assert result.paused_s > 0
    assert [e.state.value for e in result.thermal_events] == ["paused", "normal"]
    events = {row["step"]: row["thermal_event"] for row in rows_of(log) if row["thermal_event"]}
    assert list(events) == ["5"]
    assert events["5"].startswith("paused 8")
    assert "; resumed 74 C after " in events["5"]
    assert len(rows_of(log)) == 10
    assert "86 C is above pause 85 C" in caplog.text
    assert f"paused for {result.paused_s:.1f} s" in caplog.text


@pytest.mark.parametrize("options", [{"async_save": True}, {"gradient_accumulation_steps": 5}, {"use_amp": True}])
def test_other_ways_of_running_pause_without_a_trace_too(tmp_path, options):
    card = Card()
    plain, whole = make(tmp_path / "a", **options)
    expected = whole.fit()
    net, trainer = make(tmp_path / "b", card, on_row=pausing(tmp_path / "b", card, 3), **options)
    result = trainer.fit()
    assert (result.rows, result.pauses) == (expected.rows, 1)
    assert same(plain, net)


def test_a_run_that_begins_hot_waits_before_its_first_window(tmp_path):
    card, log = Card(90.0), tmp_path / "m.csv"
    plain, whole = make(tmp_path / "a")
    expected = whole.fit()
    card.cools_when((tmp_path / "b" / "step_00000000.pt").exists, 80.0, 74.0)
    net, trainer = make(tmp_path / "b", card, csv_log_path=str(log))
    result = trainer.fit()
    assert (result.rows, result.pauses) == (expected.rows, 1)
    assert same(plain, net)
    first = rows_of(log)[0]["thermal_event"]
    assert first.startswith("paused ")
    assert "; resumed 74 C" in first


def test_a_pause_falls_between_windows_never_into_one(tmp_path):
    card, passes = Card(), []

    def loss(output, target):
        passes.append(trainer.result.pauses)
        if len(passes) == 6:  # the second of four micro-batches of the second window
            card.be(86.0)
        return nn.functional.mse_loss(output, target)

    card.cools_when((tmp_path / "step_00000002.pt").exists, 74.0)
    _, trainer = make(tmp_path, card, loss_fn=loss, gradient_accumulation_steps=4, max_steps=3)
    result = trainer.fit()
    assert result.pauses == 1
    assert passes == [0] * 8 + [1] * 4


@pytest.mark.parametrize("first", [None, 86.0])
def test_critical_saves_aborts_and_the_resumed_run_is_the_same_run(tmp_path, first):
    log, card = tmp_path / "m.csv", Card()
    options = {"csv_log_path": str(log), "checkpoint_every_n_steps": 1000}
    plain, whole = make(tmp_path / "a")
    expected = whole.fit()
    saved = tmp_path / "b" / "step_00000005.pt"
    if first is None:
        _, trainer = make(tmp_path / "b", card, on_row=at(5, lambda: card.be(96.0)), **options)
    else:  # critical while it is paused
        card.cools_when(saved.exists, 90.0, 96.0, 20.0)
        _, trainer = make(tmp_path / "b", card, on_row=at(5, lambda: card.be(first)), **options)
    with pytest.raises(ThermalAbort, match=r"GPU: 96 C is above critical 95 C; .* then resume from .*step_00000005.pt"):
        trainer.fit()
    result = trainer.result
    assert (result.status, result.state.step, result.pauses) == ("aborted", 5, int(first is not None))
    assert rows_of(log)[-1]["thermal_event"].endswith("aborted 96 C")
    again, second = make(tmp_path / "b", Card(), **options)
    assert second.resume() == saved
    rest = second.fit()
    assert rest.rows == expected.rows[5:]
    assert same(plain, again)
    assert [int(row["step"]) for row in rows_of(log)] == list(range(1, 11))


def test_the_exception_carries_the_result_and_says_when_nothing_was_saved():
    card = Card()
    _, trainer = make(None, card, on_row=at(4, lambda: card.be(96.0)))
    with pytest.raises(ThermalAbort, match=r"then resume$") as caught:
        trainer.fit()
    assert caught.value.result is trainer.result
    assert trainer.result.state.step == 4


@pytest.mark.parametrize("lost", [None, math.nan])
def test_a_sensor_lost_during_the_run_aborts_after_three_polls_with_a_checkpoint(tmp_path, lost):
    card = Card()
    _, trainer = make(tmp_path, card, on_row=at(5, lambda: card.be(lost, polls=3)))
    with pytest.raises(ThermalAbort, match=r"the sensor was lost .* the last one was 60 C.*look at nvidia-smi"):
        trainer.fit()
    assert (tmp_path / "step_00000005.pt").exists()


def test_two_polls_without_a_temperature_are_survived(tmp_path):
    card = Card()
    left = [None, None, 60.0]
    card.then = lambda: setattr(card, "celsius", left.pop(0)) if left and trainer.state.step >= 5 else None
    _, trainer = make(tmp_path, card, on_row=at(5, lambda: card.be(60.0, polls=5)))
    assert trainer.fit().status == "completed"
    assert left == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_paused_ends_promptly_with_a_checkpoint_and_the_resumed_run_is_the_same(tmp_path, number):
    card, log = Card(), tmp_path / "m.csv"
    plain, whole = make(tmp_path / "a")
    expected = whole.fit()
    saved, struck = tmp_path / "b" / "step_00000005.pt", []

    def strike():
        if saved.exists() and not struck:
            struck.append(time.monotonic())
            os.kill(os.getpid(), number)

    card.then = strike
    _, trainer = make(tmp_path / "b", card, on_row=at(5, lambda: card.be(90.0)), csv_log_path=str(log))
    result = trainer.fit()
    assert time.monotonic() - struck[0] < 30
    assert (result.status, result.signal, result.state.step) == ("interrupted", number, 5)
    assert "; interrupted 90 C after" in rows_of(log)[-1]["thermal_event"]
    assert len(list((tmp_path / "b").glob("step_*.pt"))) == 1
    again, second = make(tmp_path / "b", Card())
    assert second.resume() == saved
    assert second.fit().rows == expected.rows[5:]
    assert same(plain, again)


def test_with_an_interval_a_pause_waits_for_the_look_and_changes_nothing(tmp_path):
    card, options = Card(), {"nan_check_interval": 4, "max_steps": 12}
    plain, whole = make(tmp_path / "a", **options)
    expected = whole.fit()
    calls = []

    def loss(output, target):
        calls.append(1)
        if len(calls) == 6:  # in the middle of the second interval
            card.be(86.0)
        return nn.functional.mse_loss(output, target)

    card.cools_when((tmp_path / "b" / "step_00000008.pt").exists, 74.0)
    net, trainer = make(tmp_path / "b", card, loss_fn=loss, **options)
    result = trainer.fit()
    assert (result.rows, result.pauses) == (expected.rows, 1)
    assert same(plain, net)


def test_with_an_interval_an_abort_does_not_wait_and_no_attempt_is_lost(tmp_path):
    card, calls = Card(), []

    def loss(output, target):
        calls.append(1)
        if len(calls) == 6:
            card.be(96.0)
        return nn.functional.mse_loss(output, target)

    options = {"nan_check_interval": 4, "max_steps": 12, "csv_log_path": str(tmp_path / "m.csv")}
    _, trainer = make(tmp_path / "b", card, loss_fn=loss, **options)
    with pytest.raises(ThermalAbort, match="step_00000006"):
        trainer.fit()
    assert [row["step"] for row in rows_of(tmp_path / "m.csv")] == list("123456")
    _, second = make(tmp_path / "b", Card(), **options)
    second.resume()
    assert second.fit().state.updates == 12


def test_critical_ends_a_long_validation_too_and_it_is_made_up_for(tmp_path):
    card, seen = Card(), []

    class Val:
        def __iter__(self):
            for i in range(1000):
                seen.append(i)
                if i == 3 and len(seen) == 4:
                    card.be(96.0)
                yield torch.ones(2, 3), torch.ones(2, 1)

    _, trainer = make(tmp_path, card, val_loader=Val(), max_steps=4)
    with pytest.raises(ThermalAbort, match="step_00000004"):
        trainer.fit()
    assert len(seen) < 10
    assert read_checkpoint(tmp_path / "step_00000004.pt")["trainer"]["validation_due"]


def test_a_save_that_fails_stops_a_pause_and_does_not_stop_an_abort(tmp_path):
    def full(*args, **kwargs):
        raise OSError("disk full")

    for celsius, error in ((86.0, OSError), (96.0, ThermalAbort)):
        card = Card()
        _, trainer = make(tmp_path / str(celsius), card, on_row=at(5, lambda c=celsius, k=card: k.be(c)))
        trainer._keeper.checkpoints.save = full
        with pytest.raises(error, match="disk full" if error is OSError else "96 C"):
            trainer.fit()


def test_the_guard_costs_no_host_read_no_operation_and_no_reading_in_a_step():
    (plain_reads, plain_ops, _), (reads, ops, card) = counted(False), counted(True)
    assert (reads, ops) == (plain_reads, plain_ops)
    assert reads >= 20
    own = threading.get_ident()
    assert card.threads.count(own) == 1  # the first, before the run


def test_the_columns_hold_the_pollers_last_reading_at_the_interval_and_are_empty_where_unknown(tmp_path):
    reading = GpuReading(61.0, power_w=250.5, memory_used_mib=1024.0)
    _, trainer = make(None, source=lambda: reading, csv_log_path=str(tmp_path / "m.csv"), gpu_temp_guard=False)
    trainer.fit()
    names = ("gpu_temperature_c", "gpu_power_w", "gpu_utilization_pct", "gpu_memory_used_mib")
    cells = [tuple(row[name] for name in names) for row in rows_of(tmp_path / "m.csv")]
    assert "thermal_event" not in rows_of(tmp_path / "m.csv")[0]
    assert cells == [("61.0", "250.5", "", "1024.0") if i % 3 == 0 else ("",) * 4 for i in range(1, 11)]


def test_without_guard_and_readings_the_log_has_no_such_columns(tmp_path):
    make(None, csv_log_path=str(tmp_path / "m.csv"))[1].fit()
    assert not [name for name in rows_of(tmp_path / "m.csv")[0] if name.startswith(("gpu_", "thermal"))]


def test_readings_asked_for_where_there_are_none_are_empty_cells_and_one_warning(tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, trainer = make(None, gpu_metrics_backend="nvml", csv_log_path=str(tmp_path / "m.csv"))
        trainer.fit()
    assert len([w for w in caught if "GPU readings: " in str(w.message)]) == 1
    assert {row["gpu_temperature_c"] for row in rows_of(tmp_path / "m.csv")} == {""}


def test_no_thread_is_left_however_the_run_ends():
    def polling():
        return [t for t in threading.enumerate() if t.name == "gpu-poller"]

    make(None, Card())[1].fit()
    assert polling() == []
    card = Card()
    with pytest.raises(ThermalAbort):
        make(None, card, on_row=at(2, lambda: card.be(96.0)))[1].fit()
    assert polling() == []

    def fails(row):
        raise OSError("the data server is gone")

    with pytest.raises(OSError, match="data server"):
        make(None, Card(), on_row=fails)[1].fit()
    assert polling() == []


def test_a_simulated_hot_card_pauses_and_cools_until_the_run_is_done():
    card = SimulatedCard(25, start_c=60, heat_capacity_j_per_c=1, cooling_time_s=0.2)

    def work(row):
        card.work(joules=4.0)
        trainer._thermal.poller.wait(30)

    _, trainer = make(None, on_row=work, source=card, gpu_temp_guard=True, max_steps=60)
    result = trainer.fit()
    assert (result.status, result.state.updates) == ("completed", 60)
    pauses = [e.temperature_c for e in result.thermal_events if e.state.value == "paused"]
    resumes = [e.temperature_c for e in result.thermal_events if e.state.value == "normal"]
    assert 1 <= len(resumes) <= len(pauses)
    assert result.pauses <= len(pauses)
    assert all(85 < celsius < 95 for celsius in pauses)
    assert all(celsius < 75 for celsius in resumes)


@pytest.mark.parametrize(
    ("config", "options", "told"),
    [
        ({"gpu_temp_guard": True}, {}, r"no source of temperatures: .*--gpu-metrics-backend nvml"),
        ({"gpu_temp_guard": True, "gpu_metrics_backend": "nvml"}, {}, r"gpu_temp_guard got no temperature of cpu: "),
        ({"nvml_device_index": 0}, {}, r"nvml_device_index=0 has no effect with gpu_metrics_backend=none"),
        ({"gpu_temp_guard": True}, {"thermal_source": 61.0}, r"a float cannot be asked"),
        ({}, {"thermal_devices": ["cpu", "cpu:1"]}, r"no effect without switch_on_thermal"),
        ({"gpu_temp_guard": True}, {"thermal_source": {"cuda:7": lambda: 1.0}}, r"tells of cuda:7"),
    ],
)
@pytest.mark.filterwarnings("ignore:GPU readings")
def test_a_guard_that_cannot_guard_is_refused_before_anything_is_done(tmp_path, config, options, told):
    with pytest.raises(ValueError, match=told):
        SafeTrainer(model(), TrainConfig(max_steps=2, **config), loader(), checkpoint_dir=tmp_path, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_source_that_gives_nothing_at_the_start_is_refused_before_the_first_step(tmp_path):
    net, trainer = make(tmp_path / "r", source=lambda: None, gpu_temp_guard=True)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with pytest.raises(ValueError, match="got no temperature"):
        trainer.fit()
    assert all(torch.equal(v, net.state_dict()[k]) for k, v in before.items())
    assert trainer.state.step == 0


def test_pausing_on_one_rank_pauses_all_an_abort_ends_all_and_switching_is_refused(tmp_path):
    script = Path(__file__).with_name("hot_ranks.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(tmp_path / "meet"), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        told = [rank.communicate(timeout=150) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for out, err in told:
        lines = out.splitlines()
        assert lines[:1] == ["refused switch_on_thermal moves one process, and this run has 2 ranks"], err
        assert lines[1] == "paused 1 completed 12", err
        # Hot after step 4: the ranks hear of it in the all-reduce of step 5, and look before step 6.
        assert lines[2].startswith("aborted at step 5"), err
    assert "another rank's GPU" in told[0][0]
    assert "96 C is above critical" in told[1][0]

"""SafeTrainer: updates and attempts, windows, retries, schedule, validation, the log, a clean stop."""

import csv
import math
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from safetrain_core import AmpTrainState, SafeTrainer, TrainConfig, TrainingFailed
from safetrain_core.optim.build import build_optimizer
from safetrain_core.optim.schedule import lr_factor
from safetrain_core.train.cursor import batch_to
from safetrain_core.train.worker import sharded


def model(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), *layers, nn.Tanh(), nn.Linear(6, 1))


def batches(count, bad=(), value=math.nan):
    generator = torch.Generator().manual_seed(1)
    made = [(torch.randn(4, 3, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(count)]
    return [(x, y + value if i in bad else y) for i, (x, y) in enumerate(made)]


def fit(loader, val_loader=None, net=None, on_row=None, **config):
    return SafeTrainer(net or model(), TrainConfig(**config), loader, val_loader, on_row=on_row).fit()


def test_the_run_equals_the_same_steps_by_hand():
    ours, hand = model(), model()
    loader = batches(10)
    result = fit(loader, net=ours, max_steps=8, learning_rate=0.05, scheduler_warmup_ratio=0.25)
    optimizer = build_optimizer(hand, "adamw", lr=0.05, weight_decay=0.01)
    state = AmpTrainState(hand, amp_dtype=torch.float32, optimizer=optimizer)
    for u in range(8):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * lr_factor(u, "cosine", total_steps=8, warmup_ratio=0.25)
        assert state.step(*loader[u]) == result.rows[u]
    for a, b in zip(ours.parameters(), hand.parameters(), strict=True):
        assert torch.equal(a, b)
    assert (result.status, result.state.updates, result.state.step, result.skips) == ("completed", 8, 8, 0)
    assert (result.first_loss, result.last_loss) == (result.rows[0].loss, result.rows[-1].loss)


@pytest.mark.parametrize(("count", "k", "windows"), [(10, 4, [4, 4, 2]), (3, 4, [3]), (8, 4, [4, 4])])
def test_a_short_last_window_divides_by_what_it_has_and_no_window_spans_two_epochs(count, k, windows, tmp_path):
    log = tmp_path / "m.csv"
    loader = batches(count)
    result = fit(loader, gradient_accumulation_steps=k, csv_log_path=str(log))
    assert result.state.updates == len(windows)
    rows = list(csv.DictReader(log.open(newline="")))
    assert [int(row["effective_batch_size"]) for row in rows] == [4 * w for w in windows]
    net = model()
    expected = sum(nn.functional.mse_loss(net(x), y).item() for x, y in loader[: windows[0]]) / windows[0]
    assert result.rows[0].loss == pytest.approx(expected, rel=1e-6)


def test_max_steps_counts_updates_and_a_skipped_window_does_not_move_the_schedule():
    result = fit(batches(6, bad={2}), max_steps=5, learning_rate=1.0)
    assert (result.state.updates, result.state.step, result.skips) == (5, 6, 1)
    assert result.rows[2].skip_reason == "non_finite_loss"
    assert result.rows[2].lr == result.rows[3].lr == lr_factor(2, "cosine", total_steps=5)
    assert result.state.retries == 1


def test_a_persistent_fault_ends_the_run_with_its_row_on_disk(tmp_path):
    log = tmp_path / "m.csv"
    with pytest.raises(TrainingFailed, match=r"loss=nan at step 4 \(non_finite_loss\), 3 of 3 retries used") as caught:
        fit(batches(50, bad=range(50)), max_steps=100, csv_log_path=str(log))
    failure = caught.value
    assert (failure.step, failure.reason, failure.newest_good) == (4, "non_finite_loss", None)
    assert math.isnan(failure.values["loss"])
    assert (failure.result.status, failure.result.state.updates, failure.result.skips) == ("failed", 0, 4)
    rows = list(csv.DictReader(log.open(newline="")))
    assert [(row["step"], row["skipped"], row["retries"]) for row in rows] == [
        ("1", "1", "1"),
        ("2", "1", "2"),
        ("3", "1", "3"),
        ("4", "1", "3"),
    ]


def test_no_retries_means_the_first_bad_step_ends_the_run():
    with pytest.raises(TrainingFailed, match="at step 3"):
        fit(batches(5, bad={2}), max_nan_retries=0)


def test_a_float16_overflow_is_the_scaler_at_work_and_spends_no_retry():
    class Hot(nn.Module):
        """Its gradient overflows float16 until the scale has halved several times."""

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 1)

        def forward(self, x):
            return self.linear(x * 100.0)

    result = fit(
        [(torch.ones(4, 3), torch.zeros(4, 1))] * 40,
        net=Hot(),
        use_amp=True,
        amp_dtype="float16",
        max_nan_retries=0,
        max_steps=5,
    )
    assert result.skips >= 5
    assert {row.skip_reason for row in result.rows if row.skipped} == {"non_finite_grad"}
    assert (result.state.retries, result.state.updates) == (0, 5)


def test_validation_runs_when_due_and_at_the_end_in_eval_mode_and_puts_modes_back(tmp_path):
    net = model(nn.BatchNorm1d(6), nn.Dropout(0.5))
    val = batches(3)
    log = tmp_path / "m.csv"
    trainer = SafeTrainer(net, TrainConfig(max_steps=5, eval_every_n_steps=2, csv_log_path=str(log)), batches(5), val)
    before = net[1].num_batches_tracked.item()
    result = trainer.fit()
    assert net.training
    assert net[2].training
    assert net[1].num_batches_tracked.item() - before == 5
    net.eval()
    expected = sum(nn.functional.mse_loss(net(x), y).item() for x, y in val) / 3
    assert result.val_loss == pytest.approx(expected, rel=1e-5)
    rows = list(csv.DictReader(log.open(newline="")))
    assert [row["val_loss"] != "" for row in rows] == [False, True, False, True, False]


def test_validation_weighs_batches_by_their_size():
    x, y = torch.randn(10, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(10, 1)
    net = model()
    trainer = SafeTrainer(net, TrainConfig(max_steps=1), batches(1), DataLoader(TensorDataset(x, y), batch_size=4))
    assert trainer.validate() == pytest.approx(nn.functional.mse_loss(net(x), y).item(), rel=1e-6)


def test_two_runs_of_one_config_are_the_same_run():
    data = TensorDataset(torch.randn(40, 3), torch.randn(40, 1))
    runs = []
    for noise in (1, 2):
        net = model(nn.Dropout(0.3))
        torch.manual_seed(noise)
        runs.append(fit(DataLoader(data, 4, shuffle=True), net=net, max_steps=15, seed=7).rows)
    assert runs[0] == runs[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_the_present_step(number):
    def strike(row):
        if row.step == 3:
            os.kill(os.getpid(), number)

    result = fit(batches(10), max_steps=10, on_row=strike)
    assert (result.status, result.signal) == ("interrupted", number)
    assert 3 <= result.state.updates <= 4


def test_a_csv_that_cannot_be_written_ends_the_run_before_its_first_step_and_a_missing_folder_is_made(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "other.csv").write_text("step,b\n")
    net = model()
    before = [p.clone() for p in net.parameters()]
    for path, told in (("file/m.csv", "cannot be written"), ("other.csv", r"only there: \['b'\]")):
        with pytest.raises(ValueError, match=told):
            fit(batches(2), net=net, csv_log_path=str(tmp_path / path), csv_rotate_on_schema_change=False)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    fit(batches(2), net=net, csv_log_path=str(tmp_path / "made" / "m.csv"))
    assert len((tmp_path / "made" / "m.csv").read_text().splitlines()) == 3


def test_rows_in_memory_are_bounded_while_the_log_has_them_all(tmp_path, monkeypatch):
    monkeypatch.setattr("safetrain_core.train.setup.ROWS_KEPT", 7)
    log = tmp_path / "m.csv"
    result = fit(batches(20), csv_log_path=str(log))
    assert [row.step for row in result.rows] == list(range(14, 21))
    assert len(log.read_text().splitlines()) == 21


@pytest.mark.parametrize(
    ("loader", "config", "told"),
    [
        ([], {}, "train_loader is empty"),
        (iter([]), {"max_steps": 3}, "train_loader is empty"),
        ([torch.zeros(2, 3)], {}, "a batch is a Tensor of 2, expected a pair"),
        ([{"x": 1}], {}, "a batch is a dict of 1, expected a pair.*collate_fn"),
        ([(torch.zeros(4, 3), {"y": torch.zeros(4, 1)})], {}, "targets are a dict.*pass loss_fn"),
        (iter([]), {}, "needs a length"),
        (
            batches(1),
            {"gpu_temp_guard": True},
            "gpu_temp_guard has no source of temperatures",
        ),
        ([(torch.zeros(4, 3), torch.zeros(4, 7))], {}, r"targets \(4, 7\); mse_loss would broadcast"),
        ([(torch.zeros(4, 9), torch.zeros(4, 1))], {}, r"shapes \(4, 9\) and \(4, 1\) does not fit"),
    ],
)
def test_what_cannot_be_trained_is_refused(loader, config, told):
    with pytest.raises(ValueError, match=told):
        fit(loader, **config)


class Answering(torch.nn.Module):
    """As the models of other libraries do: takes a dict, and answers with a tuple, or with an object."""

    def __init__(self, wrap):
        super().__init__()
        self.linear, self.wrap = torch.nn.Linear(3, 1), wrap

    def forward(self, inputs):
        return self.wrap(self.linear(inputs["x"]))


@pytest.mark.parametrize(
    ("wrap", "kind", "loss_fn"),
    [
        (lambda y: (y, None), "tuple", lambda output, targets: torch.nn.functional.mse_loss(output[0], targets)),
        (
            lambda y: SimpleNamespace(logits=y),
            "SimpleNamespace",
            lambda output, targets: torch.nn.functional.mse_loss(output.logits, targets),
        ),
    ],
)
def test_a_model_that_answers_with_no_tensor_needs_a_loss_fn_and_is_told_so(wrap, kind, loss_fn):
    data = [({"x": torch.zeros(4, 3)}, torch.zeros(4, 1))] * 2
    with pytest.raises(ValueError, match=rf"the model's output is a {kind}.*pass loss_fn.*output.logits"):
        SafeTrainer(Answering(wrap), TrainConfig(), data).fit()
    assert SafeTrainer(Answering(wrap), TrainConfig(), data, loss_fn=loss_fn).fit().state.updates == 2


def test_a_trainer_runs_once(tmp_path):
    log = tmp_path / "m.csv"
    trainer = SafeTrainer(model(), TrainConfig(csv_log_path=str(log)), batches(3))
    trainer.fit()
    before = log.read_text()
    with pytest.raises(ValueError, match="this trainer has run"):
        trainer.fit()
    assert log.read_text() == before


def test_a_frozen_model_and_an_empty_validation_are_refused():
    with pytest.raises(ValueError, match="no trainable parameter"):
        fit(batches(1), net=model().requires_grad_(False))
    with pytest.raises(ValueError, match="val_loader is empty"):
        fit(batches(1), val_loader=[])
    with pytest.raises(ValueError, match="no val_loader"):
        SafeTrainer(model(), TrainConfig(), batches(1)).validate()


def test_ranks_on_cpus_are_refused_where_torch_cannot_shard_there(monkeypatch):
    monkeypatch.delattr(torch.cpu.Stream, "record_event", raising=False)  # as in torch 2.6
    with pytest.raises(ValueError, match=r"FSDP2 on CPUs needs torch 2\.7 or newer, this is"):
        sharded(nn.Linear(1, 1), torch.device("cpu"))


def test_validations_without_a_val_loader_are_refused():
    with pytest.raises(ValueError, match="eval_every_n_steps=5 needs a val_loader"):
        fit(batches(2), max_steps=1, eval_every_n_steps=5)


class Half:
    """A sink without an end."""

    def begin(self, resume_after):
        pass

    def write(self, row):
        pass

    amend = write


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model": None}, "model is a NoneType, expected a torch.nn.Module"),
        ({"config": {"max_steps": 3}}, r"config is a dict, expected a TrainConfig: TrainConfig\(max_steps=...\)"),
        ({"train_loader": 5}, r"train_loader is an int, expected an iterable of \(inputs, targets\) batches"),
        ({"val_loader": 5}, "val_loader is an int"),
        ({"loss_fn": "mse"}, "loss_fn is a str, expected a function"),
        ({"on_row": "print"}, "are functions or None; one is a str"),
        ({"sinks": print}, "sinks is a builtin_function_or_method, expected a list of sinks"),
        ({"sinks": [Half()]}, r"a sink is a Half without close\(\)"),
        ({"blocks": ["net"]}, "blocks is a list, expected a dict"),
    ],
)
def test_a_part_of_a_wrong_kind_is_refused_before_the_run(change, told):
    parts = {"model": model(), "config": TrainConfig(max_steps=1), "train_loader": batches(2), **change}
    with pytest.raises(ValueError, match=told):
        SafeTrainer(**parts)


@pytest.mark.parametrize("there", ["a,b\n", "folder", "a file above"])
def test_a_log_that_cannot_be_written_is_refused_before_anything_is_changed(tmp_path, there):
    path = tmp_path / "m.csv"
    if there == "folder":
        path.mkdir()
    elif there == "a file above":
        path.write_text("x")
        path = path / "m.csv"
    else:
        path.write_text(there)
    trainer = SafeTrainer(
        model(), TrainConfig(max_steps=1, csv_log_path=str(path)), batches(2), checkpoint_dir=tmp_path / "a"
    )
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"csv log .*(no log|cannot be written)"):
        trainer.fit()
    assert torch.equal(torch.get_rng_state(), before)
    assert not (tmp_path / "a").exists()
    file = tmp_path / "m.csv"
    file.rmdir() if file.is_dir() else file.unlink()
    assert trainer.fit().status == "completed"


def test_the_validation_loss_weighs_batches_by_their_samples_where_targets_are_a_dict():
    net = nn.Linear(1, 1)
    nn.init.zeros_(net.weight), nn.init.zeros_(net.bias)
    val = [(torch.ones(3, 1), {"y": torch.ones(3, 1)}), (torch.ones(1, 1), {"y": torch.zeros(1, 1)})]
    trainer = SafeTrainer(net, TrainConfig(max_steps=1), val, val, loss_fn=lambda out, t: ((out - t["y"]) ** 2).mean())
    assert trainer.validate() == 0.75


def test_tensors_inside_a_batch_move_to_the_device_and_what_moves_itself_does_it_itself():
    class Encoding(dict):
        def to(self, device):
            return f"moved to {device}"

    inputs, targets = batch_to(
        torch.device("meta"), (({"ids": torch.ones(2)}, [torch.ones(1), "name"]), Encoding(a=torch.ones(1)))
    )
    assert inputs[0]["ids"].device == inputs[1][0].device == torch.device("meta")
    assert (inputs[1][1], targets) == ("name", "moved to meta")


def test_a_checkpoint_dir_that_is_no_folder_is_refused_before_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "link"):
        with pytest.raises(ValueError, match=f"checkpoint_dir .*{name} is no folder"):
            SafeTrainer(model(), TrainConfig(max_steps=1), batches(1), checkpoint_dir=tmp_path / name)

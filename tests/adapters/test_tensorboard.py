"""The TensorBoard sink: the rows of the CSV as scalars, no step twice, and read back by the doctor."""

import csv
import subprocess
import sys

import pytest
import torch
from torch import nn

from safetrain_core import SafeTrainer, TrainConfig, diagnose, read_log
from safetrain_core.adapters.tensorboard import TensorBoardSink

needs_tensorboard = pytest.mark.skipif(
    __import__("importlib").util.find_spec("tensorboard") is None,
    reason="the extra tensorboard is not installed: make test-adapters",
)


def trainer(folder, csv_path, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    generator = torch.Generator().manual_seed(1)
    data = [(x, x.sum(1, keepdim=True)) for x in torch.randn(8, 4, 3, generator=generator)]
    config = TrainConfig(
        csv_log_path=str(csv_path),
        scheduler_type="constant",
        max_nan_retries=50,
        checkpoint_every_n_steps=10,
        **options,
    )
    data[6] = (data[6][0], data[6][1] * torch.nan)
    sinks = [TensorBoardSink(folder / "events")]
    return SafeTrainer(model, config, data, data[:1], sinks=sinks, checkpoint_dir=folder)


def values(log, role):
    series = log.series[role]
    return dict(zip(series.steps.astype(int).tolist(), series.values.tolist(), strict=True))


def same_as_csv(events, path):
    rows = list(csv.DictReader(path.open(newline="")))
    for role, column in (("loss", "loss"), ("lr", "learning_rate"), ("norm", "gradient_norm"), ("skipped", "skipped")):
        told = {int(row["step"]): float(row[column]) for row in rows if row[column]}
        assert values(events, role) == pytest.approx(told, rel=1e-6, nan_ok=True), column
    return len(rows)


@needs_tensorboard
def test_the_sink_has_the_rows_of_the_csv_also_after_a_resume_with_no_step_twice(tmp_path):
    path = tmp_path / "metrics.csv"
    trainer(tmp_path, path, max_steps=34, eval_every_n_steps=10).fit()
    assert same_as_csv(read_log(tmp_path / "events"), path) == 38
    again = trainer(tmp_path, path, max_steps=44, eval_every_n_steps=10)
    # From an earlier checkpoint than the last row: the rows after it are hidden, and told anew.
    assert again.resume(sorted(tmp_path.glob("step_*.pt"))[-2]).name == "step_00000034.pt"
    again.fit()
    events = read_log(tmp_path / "events")
    assert same_as_csv(events, path) == 50
    losses = {int(row["step"]): row["val_loss"] for row in csv.DictReader(path.open(newline="")) if row["val_loss"]}
    assert list(values(events, "val_loss")) == list(losses)


@needs_tensorboard
def test_a_fresh_run_in_a_used_folder_hides_the_old_one(tmp_path):
    for steps in (30, 20):
        sink = TensorBoardSink(tmp_path)
        sink.begin(None)
        for step in range(1, steps + 1):
            sink.write({"step": step, "loss": steps + 1 / step})
        sink.close()
    assert list(values(read_log(tmp_path), "loss")) == list(range(1, 21))
    assert min(values(read_log(tmp_path), "loss").values()) < 21


@needs_tensorboard
def test_safetrain_diagnose_finds_a_planted_fault_in_what_the_sink_wrote(tmp_path):
    sink = TensorBoardSink(tmp_path / "events")
    sink.begin(None)
    for step in range(1, 61):
        bad = step > 40
        sink.write(
            {"step": step, "loss": float("nan") if bad else 2 - step / 40, "skip_reason": "words" if bad else None}
        )
    sink.amend({"thermal_event": "paused 86 C"})
    sink.close()
    assert [finding.rule for finding in diagnose(tmp_path / "events")][:1] == ["nan_stays"]
    argv = [sys.executable, "-m", "safetrain_core", "diagnose", str(tmp_path / "events")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "NaN from step 41 on" in done.stdout


def test_without_the_package_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"pip install 'safetrain-core\[tensorboard\]'"):
        TensorBoardSink(tmp_path)


@needs_tensorboard
def test_scalars_that_were_written_as_tensors_are_read_too(tmp_path):
    """As TensorFlow 2 writes them, and torch with ``new_style``."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    for step in (1, 2, 3):
        writer.add_scalar("loss", 1 / step, step, new_style=True)
    writer.close()
    assert values(read_log(tmp_path), "loss") == pytest.approx({1: 1.0, 2: 0.5, 3: 1 / 3}, rel=1e-6)

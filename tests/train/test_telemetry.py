"""The CSV log: one header, no step twice, torn tails trimmed, one writer; and the norms of blocks."""

import csv
import subprocess
import sys

import pytest
import torch
from torch import nn

from safetrain_core import MiniGPT, MiniGPTConfig
from safetrain_core.records import BASE_COLUMNS
from safetrain_core.train.csv_log import CsvLog
from safetrain_core.train.telemetry import block_norms, blocks_of

COLUMNS = ("step", "loss")


def write(path, steps, columns=COLUMNS, **options):
    with CsvLog(path, columns, **options) as log:
        for step in steps:
            log.write({"step": step, "loss": step / 2})


def steps_in(path):
    lines = path.read_text().splitlines()
    assert lines[0] == ",".join(COLUMNS)
    assert path.read_text().endswith("\n")
    return [int(line.split(",")[0]) for line in lines[1:]]


def test_rows_are_on_disk_when_written_and_what_is_missing_is_empty(tmp_path):
    path = tmp_path / "deep" / "er" / "m.csv"
    with CsvLog(path) as log:
        log.write({"step": 1, "loss": 0.1 + 0.2, "skipped": True, "skip_reason": "non_finite_grad"})
        rows = list(csv.DictReader(path.open(newline="")))
        assert tuple(rows[0]) == BASE_COLUMNS
        assert (rows[0]["step"], float(rows[0]["loss"]), rows[0]["skipped"]) == ("1", 0.1 + 0.2, "1")
        assert rows[0]["val_loss"] == rows[0]["gradient_norm"] == ""


@pytest.mark.parametrize("tail", [b"", b"4", b"4,2.", b"4,2.0", b"4,2.0,7\n", b"x,1\n", b"\xc3", b"\0\0\0"])
def test_a_resume_drops_rows_after_its_step_and_a_torn_last_line(tmp_path, tail):
    path = tmp_path / "m.csv"
    write(path, [1, 2, 3])
    path.write_bytes(path.read_bytes() + tail)
    write(path, [4, 5], resume_after=3)
    assert steps_in(path) == [1, 2, 3, 4, 5]
    write(path, [3], resume_after=2)
    assert steps_in(path) == [1, 2, 3]
    write(path, [1], resume_after=0)
    assert steps_in(path) == [1]
    assert list(tmp_path.iterdir()) == [path]


def test_a_resume_whose_log_is_missing_or_empty_starts_one(tmp_path):
    write(tmp_path / "a.csv", [4], resume_after=3)
    assert steps_in(tmp_path / "a.csv") == [4]
    (tmp_path / "b.csv").write_text("")
    write(tmp_path / "b.csv", [4], resume_after=3)
    assert steps_in(tmp_path / "b.csv") == [4]


def test_a_log_with_other_columns_is_set_aside_whole_and_so_is_a_former_run(tmp_path):
    path = tmp_path / "m.csv"
    write(path, [1, 2])
    first = path.read_text()
    write(path, [3], ("step", "loss", "new"), resume_after=2)
    second = path.read_text()
    write(path, [1])
    assert (tmp_path / "m.1.csv").read_text() == first
    assert (tmp_path / "m.2.csv").read_text() == second
    assert steps_in(path) == [1]


def test_with_rotation_off_a_log_in_the_way_is_an_error_that_names_the_columns_and_it_is_left_alone(tmp_path):
    path = tmp_path / "m.csv"
    write(path, [1, 2])
    before = path.read_text()
    with pytest.raises(ValueError, match=r"only there: \['loss'\], only now: \['val_loss'\]"):
        write(path, [3], ("step", "val_loss"), resume_after=2, rotate=False)
    with pytest.raises(ValueError, match=r"has other columns \(only there: \[\], only now: \['new'\]\)"):
        write(path, [3], ("step", "loss", "new"), rotate=False)
    with pytest.raises(ValueError, match="holds a run already"):
        write(path, [3], rotate=False)
    assert path.read_text() == before


def test_a_second_process_is_refused_and_the_log_is_whole(tmp_path):
    path = tmp_path / "m.csv"
    code = f"from safetrain_core.train.csv_log import CsvLog; CsvLog({str(path)!r}, ('step', 'loss'), resume_after=1)"
    with CsvLog(path, COLUMNS) as log:
        log.write({"step": 1, "loss": 0.5})
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        log.write({"step": 2, "loss": 0.5})
    assert other.returncode == 1
    assert "is being written by another process" in other.stderr
    assert steps_in(path) == [1, 2]


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "m.csv", tmp_path):
        with pytest.raises(ValueError, match="cannot be written"):
            CsvLog(path)


def test_a_column_that_the_header_lacks_is_refused(tmp_path):
    with CsvLog(tmp_path / "m.csv", ["step"]) as log, pytest.raises(ValueError, match="no column loss"):
        log.write({"step": 1, "loss": 2})


def test_blocks_are_the_top_level_ones_with_numbered_layers_apart_and_every_weight_once():
    model = MiniGPT(MiniGPTConfig(vocab_size=5, context=4, layers=2, heads=1, width=4))
    blocks = blocks_of(model)
    assert list(blocks) == ["tokens", "positions", "blocks.0", "blocks.1", "norm"]
    assert {id(p) for weights in blocks.values() for p in weights} == {id(p) for p in model.parameters()}
    assert list(blocks_of(nn.DataParallel(model))) == list(blocks)
    assert list(blocks_of(model, {"mine": model.norm, "list": [model.tokens.weight]})) == ["mine", "list"]
    assert list(blocks_of(nn.ParameterList([torch.ones(1)]))) == ["0"]


def test_a_blocks_norm_is_the_norm_of_its_gradients():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model(torch.ones(1, 3)).sum().backward()
    norm_of = {p: p.grad.norm().item() for p in model.parameters()}
    for name, value in block_norms(blocks_of(model), norm_of).items():
        layer = model[int(name.removeprefix("grad_norm_"))]
        assert value == pytest.approx(nn.utils.get_total_norm([p.grad for p in layer.parameters()]).item())


def test_amending_puts_cells_into_the_last_row_of_this_log_and_touches_no_other(tmp_path):
    path = tmp_path / "m.csv"
    with CsvLog(path, ["step", "loss", "thermal_event"]) as log:
        assert log.amend({"thermal_event": "early"}) is False
        log.write({"step": 1, "loss": 0.5})
        log.write({"step": 2, "loss": 0.25})
        assert log.amend({"thermal_event": "paused 86 C"})
        assert log.amend({"thermal_event": "paused 86 C; resumed 74 C"})
        assert path.read_text().splitlines()[1:] == ["1,0.5,", "2,0.25,paused 86 C; resumed 74 C"]
        with pytest.raises(ValueError, match="has no column heat"):
            log.amend({"heat": 1})
        log.write({"step": 3, "loss": 0.1})
    with CsvLog(path, ["step", "loss", "thermal_event"], resume_after=2) as log:
        assert log.amend({"thermal_event": "another run's row"}) is False
        log.write({"step": 3, "loss": 0.1})
    assert path.read_text().splitlines()[1:] == ["1,0.5,", "2,0.25,paused 86 C; resumed 74 C", "3,0.1,"]

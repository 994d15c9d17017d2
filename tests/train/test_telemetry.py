"""The CSV log."""

import csv

import pytest

from safetrain_core.records import BASE_COLUMNS
from safetrain_core.train.telemetry import CsvLog


def test_rows_are_on_disk_when_written_and_what_is_missing_is_empty(tmp_path):
    path = tmp_path / "deep" / "er" / "m.csv"
    with CsvLog(path) as log:
        log.write({"step": 1, "loss": 0.1 + 0.2, "skipped": True, "skip_reason": "non_finite_grad"})
        rows = list(csv.DictReader(path.open(newline="")))
        assert tuple(rows[0]) == BASE_COLUMNS
        assert (rows[0]["step"], float(rows[0]["loss"]), rows[0]["skipped"]) == ("1", 0.1 + 0.2, "1")
        assert rows[0]["val_loss"] == rows[0]["gradient_norm"] == ""


def test_a_file_that_is_there_already_is_left_alone(tmp_path):
    path = tmp_path / "m.csv"
    path.write_text("precious\n")
    with pytest.raises(ValueError, match="is there already"):
        CsvLog(path)
    assert path.read_text() == "precious\n"


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        CsvLog(tmp_path / "file" / "m.csv")


def test_a_column_that_the_header_lacks_is_refused(tmp_path):
    with CsvLog(tmp_path / "m.csv", ["step"]) as log, pytest.raises(ValueError, match="no column loss"):
        log.write({"step": 1, "loss": 2})

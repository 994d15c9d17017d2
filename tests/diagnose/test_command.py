"""``safetrain diagnose``: what it prints, its exit status, JSON and the picture."""

import importlib
import json
import subprocess
import sys

import pytest
from corpus import broken, healthy, write_csv

from safetrain_core.cli import main


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    bent, baseline = broken("resume leaves its baseline", 0)
    for name, rows in {
        "nan": broken("NaN that stays", 0)[0],
        "clip": broken("clip at every step", 0)[0],
        "good": healthy("plain", 0),
        "bent": bent,
        "base": baseline,
    }.items():
        write_csv(rows, folder / f"{name}.csv")
    return folder


def test_status_is_1_for_an_error_and_0_for_a_warning_or_a_healthy_run(logs, capsys):
    assert main(["diagnose", str(logs / "nan.csv")]) == 1
    assert "ERROR loss is" in capsys.readouterr().out
    assert main(["diagnose", str(logs / "clip.csv")]) == 0
    assert "WARNING" in capsys.readouterr().out
    assert main(["diagnose", str(logs / "good.csv")]) == 0
    assert "good.csv: healthy" in capsys.readouterr().out
    assert main(["diagnose", str(logs / "good.csv"), str(logs / "nan.csv")]) == 1


def test_baseline_names_the_first_step_that_differs(logs, capsys):
    assert main(["diagnose", str(logs / "bent.csv"), "--baseline", str(logs / "base.csv")]) == 1
    assert "ERROR the run leaves its baseline at step" in capsys.readouterr().out
    assert main(["diagnose", str(logs / "base.csv"), "--baseline", str(logs / "base.csv")]) == 0


def test_another_batch_size_is_named_as_the_cause_where_both_logs_tell_it(logs, tmp_path, capsys):
    rows = [{"step": s, "loss": 5 - s / 10, "effective_batch_size": 32} for s in range(1, 30)]
    other = [{**row, "loss": row["loss"] + 0.1, "effective_batch_size": 16} for row in rows]
    write_csv(rows, tmp_path / "one.csv")
    write_csv(other, tmp_path / "two.csv")
    assert main(["diagnose", str(tmp_path / "two.csv"), "--baseline", str(tmp_path / "one.csv")]) == 1
    told = capsys.readouterr().out
    assert "cause     another batch size: 16 samples behind an update at step 1, 32 in the baseline" in told
    write_csv([{**row, "effective_batch_size": 32} for row in other], tmp_path / "same.csv")
    assert main(["diagnose", str(tmp_path / "same.csv"), "--baseline", str(tmp_path / "one.csv")]) == 1
    assert "another batch size: " not in capsys.readouterr().out


def test_json_is_json_although_there_is_nan_in_it(logs, capsys):
    main(["diagnose", "--json", str(logs / "nan.csv")])

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    told = json.loads(capsys.readouterr().out, parse_constant=refuse)
    first = told[str(logs / "nan.csv")][0]
    assert first["rule"] == "nan_stays"
    assert first["evidence"][0]["values"]["loss"] in ("nan", "inf")


def test_columns_must_be_role_and_name(logs, capsys):
    for words, says in (
        ("loss", "must be ROLE=NAME"),
        ("loss=nothing", "no column nothing"),
        ("lss=loss", "did you mean"),
    ):
        assert main(["diagnose", str(logs / "good.csv"), "--columns", words]) == 2
        assert says in capsys.readouterr().err


def test_the_picture_marks_the_evidence_and_a_missing_matplotlib_is_named(logs, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "a.svg"
    assert main(["diagnose", str(logs / "nan.csv"), "--plot", str(picture)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"picture: {picture}"
    assert main(["diagnose", str(logs / "nan.csv"), "--json", "--plot", str(picture)]) == 1
    assert json.loads(capsys.readouterr().out)
    assert "nan_stays" in picture.read_text() or "clipPath" in picture.read_text()
    plain = tmp_path / "b.svg"
    main(["diagnose", str(logs / "good.csv"), "--plot", str(plain)])
    assert picture.read_text().count("stroke: #b2182b") > plain.read_text().count("stroke: #b2182b") == 0
    capsys.readouterr()
    assert main(["diagnose", str(logs / "good.csv"), "--plot", str(tmp_path / "no" / "b.png")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert main(["diagnose", str(logs / "good.csv"), str(logs / "nan.csv"), "--plot", "x.png"]) == 2
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["diagnose", str(logs / "good.csv"), "--plot", str(tmp_path / "c.png")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_a_diagnosis_needs_neither_torch_nor_matplotlib(logs):
    code = (
        "import sys; from safetrain_core.cli import main; "
        f"main(['diagnose', {str(logs / 'good.csv')!r}]); print(sorted({{'torch', 'matplotlib'}} & set(sys.modules)))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.splitlines()[-1] == "[]"


def test_the_room_can_be_called_whatever_was_imported_first():
    for first in ("safetrain_core.diagnose.doctor", "safetrain_core.cli", "safetrain_core"):
        importlib.import_module(first)
        code = (
            f"import {first}; from safetrain_core import diagnose; import safetrain_core.diagnose.doctor as doctor; "
            "rows = [{'step': 1, 'loss': 1.0}]; print(diagnose(rows) == doctor.diagnose(rows))"
        )
        told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert told == "True\n"


def test_a_log_may_stand_behind_the_columns(logs, capsys):
    assert main(["diagnose", "--columns", "loss=loss", str(logs / "nan.csv")]) == 1
    assert main(["diagnose", "--columns", "loss=loss"]) == 2
    assert "name a LOG" in capsys.readouterr().err


def test_a_picture_needs_a_known_ending(logs, tmp_path, capsys):
    assert main(["diagnose", str(logs / "nan.csv"), "--plot", str(tmp_path / "run")]) == 2
    assert "must end in one of .png" in capsys.readouterr().err

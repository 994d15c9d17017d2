"""Parameters, the environment check, the index, tables and claims."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from support import environment, index, params, report
from support.doctor import told

from safetrain_core import Finding


@pytest.fixture
def fresh_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> report.Run:
    run = report.Run(out=tmp_path / "out")
    monkeypatch.setattr(report, "current", run)
    return run


def healthy(**changes: object) -> environment.Facts:
    facts = {
        "python": (3, 12),
        "interpreter": "/somewhere/python",
        "versions": dict.fromkeys(environment.NEEDED, "99.1.0+cpu"),
        "package_found": True,
    }
    return environment.Facts(**{**facts, **changes})


def problems(facts: environment.Facts) -> list[environment.Finding]:
    return [finding for finding in environment.check(facts) if not finding.good]


def test_a_healthy_computer_has_no_problem() -> None:
    assert problems(healthy()) == []
    lines = [str(finding) for finding in environment.check(healthy())]
    assert all(line.startswith("PASS  ") for line in lines)
    assert not any("99.1" in line or "/somewhere" in line for line in lines), "what varies must not be printed"


@pytest.mark.parametrize(
    ("changes", "named", "fix"),
    [
        ({"python": (3, 10)}, "Python is 3.10", "make setup PYTHON="),
        ({"package_found": False}, "/somewhere/python, which has no safetrain_core", "pip install -e '.[dev]'"),
        ({"out_error": "runs: Permission denied"}, "cannot be written: runs: Permission denied", "--out DIR"),
        *[
            ({"versions": {**healthy().versions, name: None}}, f"{name} is not installed", f"pip install '{name}>=")
            for name in environment.NEEDED
        ],
        ({"versions": {**healthy().versions, "torch": "2.5.1"}}, "torch is 2.5.1", "torch>=2.6"),
        ({"versions": {**healthy().versions, "matplotlib": "3.7.9"}}, "matplotlib is 3.7.9", "matplotlib>=3.8"),
    ],
)
def test_each_problem_is_named_with_its_fix(changes: dict[str, object], named: str, fix: str) -> None:
    (problem,) = problems(healthy(**changes))
    assert named in problem.what
    assert fix in problem.fix
    assert str(problem).startswith("FIX   ")


@pytest.mark.parametrize("version", ["2.6", "2.6.0", "2.10.1+cu121", "3.0.0rc1", "2.6.0a0+git1"])
def test_new_enough_versions_are_recognised(version: str) -> None:
    assert problems(healthy(versions={**healthy().versions, "torch": version})) == []


def test_the_needed_versions_are_those_that_the_package_declares() -> None:
    from importlib.metadata import requires

    from packaging.requirements import Requirement

    declared = {r.name: r.specifier for r in map(Requirement, requires("safetrain-core") or [])}
    for name, least in environment.NEEDED.items():
        assert f">={least}" in str(declared[name])


def test_looking_finds_this_interpreter(tmp_path: Path) -> None:
    assert problems(environment.look(tmp_path / "out")) == []


def test_looking_notices_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert environment.look(tmp_path / "file" / "out").out_error


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--num-steps", "0"], "0 is not a whole number at least 1"),
        (["--num-steps", "many"], "'many' is not a whole number"),
        (["--num-steps", "1.5"], "'1.5' is not a whole number"),
        (["--seed", "-1"], "at least 0"),
        (["--steps", "5"], "--steps"),
        (["--grid", "1,x"], "'x' is not a whole number"),
        (["--share", "nan"], "nan is not a number at least 0.0"),
        (["--num-steps"], "expected one argument"),
    ],
)
def test_a_bad_value_is_one_line_and_status_2(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        params.lesson_args(
            "01_clipping_amp", argv, num_steps=20, grid=params.whole_list([1, 2]), share=params.fraction(0.5)
        )
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_an_output_folder_that_is_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        params.lesson_args("01_clipping_amp", ["--out", str(tmp_path / "file" / "out")])
    assert "is a file; name a folder" in capsys.readouterr().err


def test_defaults_and_the_folder_below_the_current_one() -> None:
    args = params.lesson_args("02_accumulation", [], grid=params.whole_list([1, 2, 4]))
    assert (args.grid, args.seed, args.out) == ([1, 2, 4], 0, Path("runs/02_accumulation"))


def test_a_failed_claim_ends_a_script_with_status_1(fresh_run: report.Run, capsys: pytest.CaptureFixture[str]) -> None:
    report.claim(True, "water is wet")
    report.claim(False, "pigs fly")
    with pytest.raises(SystemExit) as stop:
        report.finish()
    assert stop.value.code == 1
    assert "1 of 2 claims failed:\n  pigs fly" in capsys.readouterr().out


def test_a_table_is_saved_without_its_marks(fresh_run: report.Run) -> None:
    report.table("costs", ["what", "bytes"], [["a", "~12"], ["b", 7]])
    saved = list(csv.reader((fresh_run.out / "costs.csv").open(newline="")))
    assert saved == [["what", "bytes"], ["a", "12"], ["b", "7"]]


def test_the_index_has_14_symptoms_and_a_lesson_for_each() -> None:
    assert (len(index.TRAINING), len(index.LOADING)) == (8, 6)
    names = {lesson.name for lesson in index.LESSONS}
    for symptom in index.SYMPTOMS:
        assert symptom.lesson in names
        assert symptom.seen
        assert symptom.cause
        assert symptom.fix


def test_a_lesson_to_come_is_plain_text_and_becomes_a_link_when_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "FOLDER", tmp_path)
    assert index.link("02_accumulation") == "lesson 02 (coming)"
    (tmp_path / "02_accumulation.py").write_text("")
    assert index.link("02_accumulation") == "[lesson 02](02_accumulation.ipynb)"
    assert "[Gradient accumulation](02_accumulation.ipynb)" in index.nav("01_clipping_amp")


def test_the_doctors_long_sentences_are_broken_between_words_wherever_a_number_varies() -> None:
    def lines_for(number: str) -> list[str]:
        symptom = f"the loss rose {number} times " + "and more " * 20
        return told(Finding(symptom, "x", "error", (), "because it " * 20, "mend " * 30)).splitlines()

    lines = lines_for("3.52")
    assert lines[0].startswith("ERROR the loss rose ~3.52 times")
    assert all(len(line) <= 92 for line in lines)
    assert [line[:12].strip() for line in lines[1:]] == ["", "", "cause", "", "", "fix", ""]
    assert " ".join(" ".join(lines[3:6]).split()) == ("cause " + "because it " * 20).strip()
    assert lines_for("1234.5678") == [lines[0].replace("3.52", "1234.5678"), *lines[1:]]

"""What is measured is kept whole and honestly, and the README quotes no figure that is not kept."""

import math
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from headlines import HEADLINES, measured_table
from quoted import FIGURES, README, with_present_figures, wrong
from results import AREAS, BROKEN, HOLDS, KEPT, SHORT, SKIPPED, Row, as_markdown, as_text, read, write

ROOT = Path(__file__).parents[1]
MATH = "predicted against counted peak bytes, math, largest error"
TEXT = README.read_text(encoding="utf-8")

# --- the README


def test_the_readme_quotes_no_figure_that_is_not_in_the_results():
    assert wrong(TEXT, read()) == []


@pytest.mark.parametrize(
    "claim",
    [
        "It is 3.7 times faster.",
        "It is 3.7x faster.",
        "It takes `3.7` times as long.",
        "It saves 40 % of the memory.",
        "It is twice as fast as anything else.",
        "It needs half the memory.",
        "Loads take six times as long elsewhere.",
        "A tenfold gain.",
        "[It took 12 s](https://example.org).",
        "- 1,000 healthy runs",
        "| speed | 5.5 |",
        "It found at least 20 of 20 of everything.",
    ],
)
def test_a_figure_that_nothing_stands_behind_is_named(claim):
    told = wrong(f"{TEXT}\n\n{claim}\n", read())
    assert len(told) >= 1
    assert all("no row of RESULTS.md stands behind" in line for line in told)


@pytest.mark.parametrize(
    "harmless",
    [
        "```sh\nsafetrain train --steps 77\n```",
        "FP16, FSDP2, sha256 and bfloat16 are names, as `step_00000010` and `--steps 77` are.",
        "<!-- lessons: made by `make readme` -->\n| [77 x](y) | z | 12 |\n<!-- end of lessons -->",
        "[a link](https://example.org/123)",
        "One process, two files and no number.",
    ],
)
def test_names_code_and_generated_parts_are_no_figures(harmless):
    assert wrong(f"{TEXT}\n\n{harmless}\n", read()) == []


def test_a_quoted_figure_that_is_not_its_rows_is_named_and_make_readme_mends_it():
    rows = read()
    found = next(row for row in rows if row.what == "found least often of all symptoms")
    assert f"at least {found.value:.0f} of 20 of each symptom" in re.sub(r"\s+", " ", TEXT)
    better = TEXT.replace(f"at least {found.value:.0f} of 20", "at least 21 of 20")
    assert better != TEXT
    (told,) = wrong(better, rows)
    assert "says '21'" in told
    assert f"should be {found.value:.0f}" in told
    assert with_present_figures(better, rows) == TEXT


def test_a_target_is_quoted_only_where_it_holds():
    rows = read()
    at = next(i for i, row in enumerate(rows) if row.what == MATH)
    rows[at] = Row(rows[at].area, rows[at].what, 11.0, "%", "<=", 10.0)
    (told,) = wrong(TEXT, rows)
    assert "within 10 % of the count" in told
    assert SHORT in told


def test_a_phrase_that_the_readme_lacks_and_a_row_that_the_results_lack_are_named():
    assert "does not say 'exits with 0 only if' any more" in wrong(TEXT.replace("exits with 0 only", "ends"), read())[0]
    with pytest.raises(ValueError, match="has no row 'low rank: state of GaLore, rank 64'"):
        wrong(TEXT, [row for row in read() if row.what != "state of GaLore, rank 64"])


def test_each_figure_and_headline_has_its_row():
    named = {f"{row.area}: {row.what}" for row in read()}
    wanted = {name for names in FIGURES.values() for many in names for name in many.split("; ")}
    assert wanted | set(HEADLINES) <= named
    table = measured_table()
    for row in read():
        if row.verdict == SHORT:
            assert row.what in table, "what falls short is shown, whatever it is"


# --- the kept table


def test_the_kept_results_name_machine_and_versions_and_neither_host_nor_path():
    page = KEPT.read_text(encoding="utf-8")
    assert re.search(r"^- on: \d+ cores \(.+\), \d+ GiB of memory, .*Python 3\.\d+", page, flags=re.MULTILINE)
    assert re.search(r"^- when: \d{4}-\d\d-\d\d, \d+ minutes", page, flags=re.MULTILINE)
    for package in ("torch", "lightning", "accelerate", "galore-torch"):
        assert re.search(rf"{package} \d", page), package
    assert not re.search(r"(?<![\w.])/[a-z]+/|https?:|[A-Z]:\\", page)
    if len(platform.node()) > 3:
        assert platform.node() not in page
    assert {row.area for row in read()} == set(AREAS)


ROWS = [
    Row("kit", "last", 3),
    Row("step", "a | b", 1.0312, "x", "<=", 1.03, 0.99, 1.1),
    Row("step", "nan", math.nan, "", "<=", 1),
    Row("step", "good", 0.5, "s", "<=", 1),
    Row("doctor", "gone", 0, why="skipped: x is not installed"),
    Row("doctor", "fell over", 0, why="ValueError: no"),
]


def test_rows_go_by_area_and_come_back_as_they_were_written(tmp_path):
    write(ROWS, tmp_path / "R.md", date="2026-01-01", took={"a.py": 60.0})
    back = read(tmp_path / "R.md")
    assert [(r.area, r.what, r.verdict) for r in back] == [
        ("step", "a | b", SHORT),
        ("step", "nan", SHORT),
        ("step", "good", HOLDS),
        ("kit", "last", "-"),
    ]
    assert (back[0].value, back[0].unit, back[0].target) == (1.031, "x", 1.03)
    text = as_markdown(ROWS)
    assert f"skipped: x is not installed |  | {SKIPPED}" in text
    assert f"ValueError: no |  | {BROKEN}" in text
    assert len(as_text(ROWS)) == len(ROWS) + 1
    assert [path.name for path in tmp_path.iterdir()] == ["R.md"]


def test_a_write_that_fails_leaves_the_old_table_and_nothing_beside_it(tmp_path, monkeypatch):
    write(ROWS, tmp_path / "R.md", date="2026-01-01", took={})
    before = (tmp_path / "R.md").read_text()

    def refuses(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuses)
    with pytest.raises(OSError, match="disk full"):
        write(ROWS[:1], tmp_path / "R.md", date="2027-01-01", took={})
    assert (tmp_path / "R.md").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["R.md"]


# --- a run of the benches

BENCHES = {
    "test_one.py": """
import pytest
AREA = "step"
def test_short(claim):
    claim("falls short", 2.0, "<=", 1, "x")
    claim("holds, though the one before does not", 1.0, "<=", 1, "x")
def test_absent(claim):
    pytest.importorskip("no_such_package", reason="no_such_package is not installed")
""",
    "test_two.py": """
AREA = "kit"
def test_compares(compare):
    compare("seen", 7)
def test_breaks(claim):
    raise RuntimeError("cannot open /some/where/else now")
""",
}


@pytest.fixture
def benches(tmp_path):
    """Two files of benches beside the real conftest; runs pytest on them and gives its output and RESULTS.md."""
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    shutil.copyfile(ROOT / "tests" / "benchmarks" / "conftest.py", folder / "conftest.py")
    for name, text in BENCHES.items():
        (folder / name).write_text(text)

    def run(*argv):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *argv],
            capture_output=True, text=True, cwd=folder, timeout=300,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)])},
        )  # fmt: skip
        kept = folder / "RESULTS.md"
        return done, kept.read_text(encoding="utf-8") if kept.exists() else None

    return run


def test_a_complete_run_keeps_all_rows_those_that_fell_short_were_skipped_or_broke_marked(benches):
    done, page = benches(".")
    assert done.returncode == 1
    assert "2 failed, 1 passed, 1 skipped" in done.stdout
    for line in (
        "| step | falls short | 2 x | <= 1 x | FALLS SHORT |  |",
        "| step | holds, though the one before does not | 1 x | <= 1 x | holds |  |",
        "| step | absent | skipped: no_such_package is not installed |  | skipped |  |",
        "| kit | seen | 7 |  | - |  |",
        "| kit | breaks | RuntimeError: cannot open (path) now |  | DID NOT END |  |",
    ):
        assert line in page, page
    assert "2 claims, 1 of them falls short, 1 benches did not end, 1 skipped" in page
    assert "FALLS SHORT" in done.stdout


@pytest.mark.parametrize(
    "argv", [["test_one.py"], [".", "-k", "short"], ["test_one.py", "test_two.py::test_compares"], [".", "-x"]]
)
def test_a_part_of_a_run_shows_its_rows_and_keeps_nothing(benches, argv):
    done, page = benches(*argv)
    assert "falls short" in done.stdout
    assert "not a complete run" in done.stdout
    assert page is None


def test_two_rows_of_one_name_or_an_unknown_area_are_refused(benches, tmp_path):
    (tmp_path / "benchmarks" / "test_two.py").write_text(
        'AREA = "step"\ndef test_again(claim):\n    claim("falls short", 1, "<=", 1)\n'
    )
    assert "two rows are called step: falls short" in benches(".")[0].stdout
    (tmp_path / "benchmarks" / "test_two.py").write_text(
        'AREA = "speed"\ndef test_other(claim):\n    claim("new", 1, "<=", 1)\n'
    )
    assert "which results.AREAS lacks" in benches(".")[0].stdout

"""Lesson 00: each symptom is really there, the doctor names it, and without the fault it finds nothing."""

from __future__ import annotations

import inspect
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import ipywidgets
import pytest
import torch
from support import index, knobs, report
from support.symptom_page import Shown, figure_of, page_of
from support.symptoms import CASES, Case, break_it, pressed

IDS = [f"{case.number}-{case.rule}" for case in CASES]


@cache
def made(number: int, seed: int = 1, mended: bool = False) -> Shown:
    """A symptom, produced once for all tests."""
    return break_it(number, seed, mended=mended)


def test_there_is_a_case_for_each_row_of_the_two_tables() -> None:
    assert [case.number for case in CASES] == list(range(1, len(index.SYMPTOMS) + 1))
    assert len({case.rule for case in CASES}) == len(CASES)
    for case in CASES:
        assert case.lessons <= {lesson.name for lesson in index.LESSONS}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_doctor_names_each_symptom_first_and_its_lesson(case: Case, seed: int) -> None:
    shown = made(case.number, seed)
    assert shown.lines
    assert shown.first is not None
    assert shown.first.rule == case.rule
    assert shown.first.severity == ("warning" if case.rule == "no_rotation" else "error")
    assert shown.first.lesson in case.lessons


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_without_the_fault_the_doctor_finds_nothing(case: Case) -> None:
    assert [f.rule for f in made(case.number, mended=True).findings if f.severity != "info"] == []


def losses(number: int, **how: Any) -> list[float]:
    return list(made(number, **how).picture.curves["loss"])


def test_the_spike_stays_and_a_clip_holds_it() -> None:
    broken, clipped = losses(1), losses(1, mended=True)
    assert min(broken[30:]) > 5 * max(broken[:28])
    assert max(clipped[30:]) < max(clipped[:28])


def test_one_step_makes_every_weight_nan() -> None:
    assert made(2).lines[-1] == "577 of 577 weights are NaN"
    assert made(2, mended=True).lines[-1] == "0 of 577 weights are NaN"
    good = [math.isfinite(loss) for loss in losses(2)]
    assert good == [True] * 12 + [False] * 12


def test_the_factor_stays_where_it_overflows_and_halves_when_mended() -> None:
    stuck, mended = (list(made(3, mended=m).picture.curves["scaling factor"]) for m in (False, True))
    assert set(stuck) == {2.0**19}
    assert mended[1] == mended[0] / 2
    assert mended[-1] < mended[0]


def test_the_norm_is_multiplied_by_the_factor() -> None:
    (norms, factors), (plain, _) = (list(made(4, mended=m).picture.curves.values()) for m in (False, True))
    assert norms[0] / factors[0] == pytest.approx(plain[0], rel=0.01)
    assert max(plain) < 10


def test_values_past_float16_are_refused_one_by_one() -> None:
    skips = made(5).picture.skips
    assert 10 < len(skips) < 60
    assert len(made(5, mended=True).picture.skips) < 3, "at most the scaler's search for its factor"


def test_sixteen_undivided_losses_make_a_step_sixteen_times_too_long() -> None:
    assert "16.0 times as far" in made(6).lines[-1]
    assert "1.0 times as far" in made(6, mended=True).lines[-1]


def test_the_resumed_curve_leaves_at_the_first_step_after_the_resume() -> None:
    whole, resumed = made(7).picture.curves.values()
    assert whole[:10] == resumed[:10]
    assert whole[10] != resumed[10]
    whole, resumed = made(7, mended=True).picture.curves.values()
    assert whole == resumed


def test_activations_outgrow_the_device_and_recomputed_ones_do_not() -> None:
    for mended in (False, True):
        kept, device = made(8, mended=mended).picture.curves.values()
        assert (kept[-1] > device[-1]) is not mended


@pytest.mark.parametrize("number", [9, 10, 11, 12])
def test_the_load_fails_with_the_words_of_the_table_and_works_when_mended(number: int) -> None:
    words = CASES[number - 1].seen
    assert any(line.startswith("CheckpointError: ") and words in line for line in made(number).lines)
    assert made(number, mended=True).lines[-1].startswith("loaded")


def test_the_partial_shard_trains_well_for_79_steps_and_then_is_nan() -> None:
    broken, whole = losses(13), losses(13, mended=True)
    assert broken[:99] == whole[:99]
    assert all(math.isnan(loss) for loss in broken[99:])
    assert all(math.isfinite(loss) for loss in whole)


def test_without_rotation_the_disk_fills() -> None:
    grown, kept = (made(14, mended=m).picture.curves["checkpoints"] for m in (False, True))
    assert grown[-1] / grown[0] == pytest.approx(24, rel=0.02)
    assert kept[-1] / kept[0] == pytest.approx(5, rel=0.02)


def test_nothing_is_left_behind_and_random_states_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    before = torch.get_rng_state()
    for case in CASES:
        for finding in break_it(case.number).findings:
            assert str(tmp_path) not in str(finding), "a folder of this computer is named"
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.are_deterministic_algorithms_enabled()
    assert list(tmp_path.iterdir()) == []
    assert not recwarn.list


# --- what the page shows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [case.number for case in CASES])
def test_what_a_press_shows_is_whole(number: int) -> None:
    case = CASES[number - 1]
    html = page_of(made(number), case.seen, inspect.getsource(case.produce))
    assert f"ERROR {case.rule}" in html or f"WARNING {case.rule}" in html
    assert f"def {case.produce.__name__}(" in html
    assert html.count("<img alt=") == (made(number).picture is not None)
    for tag in ("pre", "table", "details", "tr", "td"):
        assert html.count(f"<{tag}") == html.count(f"</{tag}>")


def test_a_press_on_mend_says_that_nothing_is_found() -> None:
    assert "ERROR spike_stays" in pressed("break", 1)
    assert "def spike(" in pressed("break", 1)
    assert "Nothing found" in pressed("mend", 11)
    assert "INFO healthy" in pressed("mend", 1)


def test_what_is_shown_is_escaped() -> None:
    page = page_of(Shown(["<script>"], []), "a < b", "x < y")
    assert "<script>" not in page
    assert "a &lt; b" in page


def test_the_evidence_is_marked_where_the_doctor_found_it() -> None:
    shown = made(1)
    lines = {line.get_label(): line for line in figure_of(shown, "spike").axes[0].lines}
    marks = lines["the doctor's evidence"].get_xdata()
    assert list(marks) == [e.step for e in shown.first.evidence] == [30, 30]
    healthy = figure_of(made(1, mended=True), "healthy").axes[0].lines
    assert "the doctor's evidence" not in [line.get_label() for line in healthy]


def widgets_of(monkeypatch: pytest.MonkeyPatch, show: Any) -> tuple[list[Any], Any]:
    """The buttons and the page below them, made as in a notebook."""
    monkeypatch.setattr(report, "in_notebook", lambda: True)
    chosen = knobs.dropdown("Symptom", [("nine", 9), ("eleven", 11)], 9)
    box = knobs.buttons(show, {"break": "Break it", "mend": "Mend it"}, number=chosen)
    first, row, page = box.children
    assert first is chosen
    return list(row.children), page


def test_nothing_runs_until_a_button_is_pressed_and_then_what_was_chosen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def show(action: str, number: int) -> str:
        calls.append((action, number))
        assert all(button.disabled for button in buttons)
        return pressed(action, number)

    buttons, page = widgets_of(monkeypatch, show)
    assert knobs.INVITATION in capsys.readouterr().out
    assert calls == []
    assert page.value == ""
    buttons[0].click()
    assert "ERROR world_size_mismatch" in page.value
    buttons[1].click()
    assert "Nothing found" in page.value
    assert calls == [("break", 9), ("mend", 9)]
    assert not any(button.disabled for button in buttons)
    assert capsys.readouterr().out == "", "a callback that prints leaks into the notebook"


def test_a_press_that_fails_says_so_and_can_be_repeated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def show(action: str, number: int) -> str:
        raise OSError("the disk is <full>")

    buttons, page = widgets_of(monkeypatch, show)
    buttons[0].click()
    assert "Traceback" in caplog.text, "ipywidgets hands it to the log"
    assert "OSError: the disk is &lt;full&gt;" in page.value
    assert isinstance(buttons[0], ipywidgets.Button)
    assert not buttons[0].disabled


def test_in_a_script_there_are_no_buttons() -> None:
    assert knobs.dropdown("Symptom", [("nine", 9)], 9) is None
    assert knobs.buttons(pressed, {"break": "Break it"}) is None


def test_the_stored_page_shows_all_14_and_two_of_them_whole(lessons_folder: Path) -> None:
    notebook = (lessons_folder / "00_start_here.ipynb").read_text(encoding="utf-8")
    for case in CASES:
        assert re.search(rf'"{case.number:2d}  {re.escape(case.did)} +{case.rule} ', notebook)
    assert notebook.count("HELD   the doctor names it: ") == 2

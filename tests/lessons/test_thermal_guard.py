"""The experiments behind lesson 06's claims, pictures and controls."""

from __future__ import annotations

import math
import random
import threading
from pathlib import Path

import pytest
import torch
from support import thermal as lab
from support import thermal_figures as pictures

from safetrain_core import RecordedTrace, Thresholds

LIMITS = Thresholds(85, 75, 95)
STEPS = 100


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> lab.HotRun:
    return lab.train(tmp_path_factory.mktemp("plain"), STEPS, 0, None)


# --- simulated time --------------------------------------------------------------------------------------------


def test_the_card_heats_by_newtons_law() -> None:
    course = lab.simulate(lab.no_guard, seconds=600)
    q = math.exp(-lab.STEP_S / lab.TAU_S)
    rise = lab.WATTS * lab.STEP_S / lab.HEAT_CAPACITY_J_PER_C
    for n in (1, 60, 600):  # a geometric sum: each step's heat, cooled ever since
        assert course.celsius[n - 1] == pytest.approx(lab.AMBIENT_C + rise * q * (1 - q**n) / (1 - q))
    assert course.hottest_c < lab.STEADY_C


def test_one_threshold_flaps_and_two_do_not() -> None:
    one = lab.simulate(lab.one_threshold(85), poll_s=1)
    two = lab.simulate(lab.guard_rule(85, 75), poll_s=1)
    assert one.changes > 9 * two.changes > 0
    assert one.pauses == sum(span[0] > 0 for span in one.spans("paused"))


def test_nan_is_cool_to_one_threshold_and_not_to_the_guard() -> None:
    assert lab.simulate(lab.one_threshold(85), seconds=240, blind_from_s=20).hottest_c > 95
    paused = lab.simulate(lab.guard_rule(85, 75), seconds=240, blind_from_s=75)
    assert paused.states[70:] == ["paused"] * 170, "blind in a pause, it stays paused"


def test_a_course_counts_what_it_holds() -> None:
    course = lab.Course()
    for second, state in enumerate(["normal", "paused", "paused", "normal", "paused"], start=1):
        course.note(float(second), 80.0 + second, state)
    assert (course.changes, course.pauses, course.trained, course.hottest_c) == (3, 2, 0.4, 85.0)
    assert course.spans("paused") == [(1.0, 3.0), (4.0, 5.0)]
    assert course.spans("normal") == [(0.0, 1.0), (3.0, 4.0)]


@pytest.mark.parametrize("pause_c", [60, 75, 85, 90])
@pytest.mark.parametrize("poll_s", [1, 7, 20, 40])
def test_no_card_passes_the_ceiling_and_the_worst_comes_near(pause_c: int, poll_s: int) -> None:
    found, most = lab.hottest_by_phase(pause_c, poll_s), lab.ceiling_c(pause_c, poll_s)
    assert most - 1.5 < found <= most


@pytest.mark.parametrize(("pause_c", "critical_c"), [(85, 95), (60, 95), (90, 95)])
def test_the_longest_poll_interval_ends_exactly_at_critical(pause_c: int, critical_c: int) -> None:
    seconds = lab.longest_poll_s(pause_c, critical_c)
    assert lab.ceiling_c(pause_c, seconds) == pytest.approx(critical_c)
    assert lab.hottest_by_phase(pause_c, math.floor(seconds)) <= critical_c
    assert lab.hottest_by_phase(pause_c, math.ceil(seconds) + 4) > critical_c


@pytest.mark.parametrize("gap", [1, 5, 20, 40])
def test_the_share_in_training_is_that_of_the_formula(gap: int) -> None:
    course = lab.simulate(lab.guard_rule(85, 85 - gap), seconds=7200, poll_s=1, start_c=85 - gap)
    assert course.trained == pytest.approx(lab.cycle_share(85, 85 - gap), abs=0.015)


def test_random_traces_hold_thresholds_and_unknowns() -> None:
    values = [v for seed in range(20) for v in lab.random_trace(random.Random(seed), LIMITS)]
    assert {75.0, 85.0, 95.0, None} <= {v for v in values if v is None or v == v}
    assert any(v is not None and math.isnan(v) for v in values)
    assert len(values) == 800


# --- a real run ------------------------------------------------------------------------------------------------


def test_a_run_without_a_guard_completes_and_cooks_the_card(plain: lab.HotRun) -> None:
    assert plain.result.status == "completed"
    assert plain.bench.course.hottest_c > 95
    assert plain.events == []
    assert 1 <= sum(row.skipped for row in plain.rows) == len(plain.skipped_at)


@pytest.mark.parametrize(("pause_c", "resume_c", "poll_s"), [(85, 75, 5), (60, 59, 5), (90, 40, 5), (80, 75, 2)])
def test_a_run_that_pauses_is_the_same_run_and_goes_as_the_function_says(
    plain: lab.HotRun, pause_c: int, resume_c: int, poll_s: int, tmp_path: Path
) -> None:
    run = lab.train(tmp_path, STEPS, 0, Thresholds(pause_c, resume_c, 95), poll_s=poll_s)
    course = run.bench.course
    pure = lab.simulate(lab.guard_rule(pause_c, resume_c), seconds=len(course.seconds), poll_s=poll_s)
    assert (course.celsius, course.states) == (pure.celsius, pure.states)
    assert run.result.pauses == course.pauses > 0
    assert course.hottest_c < 95
    assert lab.losses(run.rows) == lab.losses(plain.rows)
    assert lab.same_end(run, plain)
    assert run.bench.threads.count(threading.get_ident()) == 1
    told = "; ".join(text for _, text in run.events)
    assert told.count("paused") == told.count("resumed") == run.result.pauses


def test_same_end_sees_one_different_bit_of_a_weight_and_of_a_moment(plain: lab.HotRun, tmp_path: Path) -> None:
    for spoil in (
        lambda t: next(t.model.parameters()),
        lambda t: next(iter(t.amp.optimizer.state.values()))["exp_avg"],
    ):
        other = lab.train(tmp_path / spoil.__code__.co_name / str(id(spoil)), STEPS, 0, None)
        assert lab.same_end(plain, other)
        with torch.no_grad():
            tensor = spoil(other.trainer).view(-1)
            tensor[0] = torch.nextafter(tensor[0], torch.tensor(9.0))
        assert not lab.same_end(plain, other)


def test_a_neighbour_makes_it_critical_and_the_resumed_run_ends_the_same(plain: lab.HotRun, tmp_path: Path) -> None:
    first = lab.train(tmp_path, STEPS, 0, LIMITS, neighbour_w=400, neighbour_from_s=60)
    assert first.result.status == "aborted"
    assert "above critical 95 C" in str(first.abort)
    assert str(tmp_path / f"step_{first.rows[-1].step:08d}.pt") in str(first.abort)
    second = lab.train(tmp_path, STEPS, 0, LIMITS, resume=True)
    assert second.rows[0].step == first.rows[-1].step + 1
    assert lab.losses(first.rows) | lab.losses(second.rows) == lab.losses(plain.rows)
    assert lab.same_end(second, plain)


@pytest.mark.parametrize("blind_from_s", [20, 75])  # while it trains, and in a pause
def test_a_lost_sensor_ends_the_run_with_a_checkpoint(blind_from_s: int, tmp_path: Path) -> None:
    run = lab.train(tmp_path, STEPS, 0, LIMITS, blind_from_s=blind_from_s)
    assert "the sensor was lost (3 readings in a row" in str(run.abort)
    assert len(run.rows) == min(blind_from_s, 70)
    assert (tmp_path / f"step_{len(run.rows):08d}.pt").exists()


def test_a_switch_waits_for_nothing_and_ends_the_same(plain: lab.HotRun, tmp_path: Path) -> None:
    run = lab.train(tmp_path, STEPS, 0, LIMITS, switch=True)
    assert run.result.switches >= 1
    assert (run.result.pauses, len(run.bench.course.seconds)) == (0, len(run.rows))
    assert "away" in run.bench.course.states
    assert lab.same_end(run, plain)


# --- traces ----------------------------------------------------------------------------------------------------


def test_a_written_trace_is_read_back_with_its_holes(tmp_path: Path) -> None:
    lab.write_trace(tmp_path / "t.csv", [(5.0, 70.125), (10.0, None), (15.0, 86.0)])
    rows = RecordedTrace(tmp_path / "t.csv").rows
    assert [(r.seconds, r.reading.temperature_c) for r in rows] == [(5.0, 70.12), (10.0, None), (15.0, 86.0)]


def test_the_replayed_trace_gives_the_status_and_the_lines_of_the_command(tmp_path: Path) -> None:
    lab.write_trace(tmp_path / "t.csv", [(5.0, 70.0), (10.0, 86.0), (15.0, 80.0), (20.0, 96.0)])
    status, lines = lab.safetrain("watch", "--replay", str(tmp_path / "t.csv"))
    assert status == 75
    assert ["would pause" in line for line in lines] == [False, True, True, False, False]
    assert "would abort" in lines[3]


# --- pictures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [LIMITS, Thresholds(60, 59, 95), Thresholds(90, 40, 95)])
def test_the_walk_goes_through_the_whole_table(limits: Thresholds) -> None:
    states = pictures.walked(limits, pictures.walk_around(limits))
    assert states == ["normal", "normal", *["paused"] * 3, "normal", "paused", "aborted", "aborted"]


@pytest.mark.parametrize("number", range(10))
def test_the_machine_is_drawn_at_each_reading_with_its_state_filled(number: int) -> None:
    fig, text = pictures.machine_picture(LIMITS, number)
    expected = ["normal", *pictures.walked(LIMITS, pictures.walk_around(LIMITS))][number]
    filled = [t.get_text() for t in fig.axes[0].texts if t.get_color() == "#FFFFFF"]
    assert filled == [expected]
    assert text.endswith(f"{expected}.")


@pytest.mark.parametrize(
    ("pause_c", "gap_c", "poll_s", "told"),
    [(85, 10, 5, "14 pauses"), (85, 1, 1, " pauses"), (60, 30, 60, " pauses"), (90, 10, 60, "aborted after 120 s")],
)
def test_the_control_draws_what_the_function_gives(pause_c: int, gap_c: int, poll_s: int, told: str) -> None:
    fig, text = pictures.settings_picture(pause_c, gap_c, poll_s)
    course = lab.simulate(lab.guard_rule(pause_c, pause_c - gap_c), poll_s=poll_s)
    assert list(fig.axes[0].lines[0].get_ydata()) == course.celsius
    assert len(fig.axes[0].patches) == len(course.spans("paused"))
    assert told in text
    assert f"{course.pauses} pauses" in text
    assert fig.axes[0].get_xlabel().endswith("(s)")
    assert fig.axes[0].get_ylabel().endswith("(C)")


def test_the_runs_picture_shades_pauses_and_marks_skips_and_the_abort(tmp_path: Path) -> None:
    run = lab.train(tmp_path, STEPS, 0, LIMITS, neighbour_w=400, neighbour_from_s=60)
    ax = pictures.run_figure(run, LIMITS, "title", note=(60, "here")).axes[0]
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["PAUSED", "SKIP", "ABORT"]
    lines = {line.get_label(): line for line in ax.lines}
    assert list(lines["SKIP"].get_xdata()) == run.skipped_at
    assert list(lines["ABORT"].get_ydata()) == [run.bench.course.celsius[-1]]
    assert len(ax.patches) == len(run.bench.course.spans("paused")) == 1


def test_the_overshoot_picture_plots_what_was_found() -> None:
    found = {p: lab.hottest_by_phase(85, p) for p in (1, 30)}
    curve, points = pictures.overshoot_figure(found, LIMITS).axes[0].lines[:2]
    assert list(points.get_ydata()) == list(found.values())
    assert curve.get_ydata()[-1] == pytest.approx(lab.ceiling_c(85, 30))

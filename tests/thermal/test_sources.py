"""Sources without a card: the simulated one follows Newton's law, a recorded one gives what the file says."""

import math

import pytest

from safetrain_core import RecordedTrace, SimulatedCard


def test_cooling_is_newtons_law_in_closed_form_however_often_it_is_looked_at():
    for looks in (1, 7, 100):
        now = [0.0]
        card = SimulatedCard(25, start_c=95, cooling_time_s=30, clock=lambda now=now: now[0])
        for _ in range(looks):
            now[0] += 45 / looks
            celsius = card.read().temperature_c
        assert celsius == pytest.approx(25 + 70 * math.exp(-45 / 30), rel=1e-12)


def test_steady_work_settles_where_heating_and_cooling_are_even():
    now = [0.0]
    card = SimulatedCard(25, heat_capacity_j_per_c=10, cooling_time_s=20, clock=lambda: now[0])
    for _ in range(200_000 // 100):
        for _ in range(10):
            now[0] += 0.01
            card.work(joules=0.3)  # 30 W
        reading = card.read()
    assert reading.temperature_c == pytest.approx(25 + 30 * 20 / 10, abs=0.05)
    assert reading.power_w == pytest.approx(30)


def test_it_never_cools_below_the_air_and_takes_no_negative_work():
    now = [0.0]
    card = SimulatedCard(25, start_c=80, clock=lambda: now[0])
    now[0] += 1e6
    assert card.read().temperature_c == 25
    for joules in (-1, math.nan):
        with pytest.raises(ValueError, match="at least 0"):
            card.work(joules)
    for bad in ({"heat_capacity_j_per_c": 0}, {"cooling_time_s": math.inf}, {"cooling_time_s": math.nan}):
        with pytest.raises(ValueError, match="must be finite and above 0"):
            SimulatedCard(25, **bad)


def trace(tmp_path, text):
    path = tmp_path / "t.csv"
    path.write_text(text)
    return RecordedTrace(path)


def test_a_trace_gives_its_rows_in_turn_empty_cells_as_unknown(tmp_path):
    told = trace(tmp_path, "gpu_power_w,seconds,gpu_temperature_c,note\n100,0,70,a\n,5,,b\n,10,nan,c\n120,15,86,d\n")
    assert [row.seconds for row in told.rows] == [0, 5, 10, 15]
    read = [told.read() for _ in range(5)]
    assert [r.temperature_c for r in read] == [70, None, None, 86, 86]
    assert [r.power_w for r in read[:2]] == [100, None]


def test_a_runs_own_log_is_a_trace_without_the_rows_between_readings(tmp_path):
    told = trace(tmp_path, "step,loss,gpu_temperature_c,gpu_power_w\n1,2,,\n2,2,70,\n3,2,,\n4,2,,90\n5,1,71,\n")
    assert [(r.reading.temperature_c, r.reading.power_w) for r in told.rows] == [(70, None), (None, 90), (71, None)]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no column gpu_temperature_c; it has none"),
        ("a,b\n1,2\n", "has no column gpu_temperature_c; it has a, b"),
        ("gpu_temperature_c\n", "holds no reading"),
        ("gpu_temperature_c\n70\nhot\n", "line 3: gpu_temperature_c='hot' is no number"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path, text, why):
    with pytest.raises(ValueError, match=why):
        trace(tmp_path, text)


def test_a_trace_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"cannot be read: No such file"):
        RecordedTrace(tmp_path / "missing.csv")
    (tmp_path / "b").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="cannot be read"):
        RecordedTrace(tmp_path / "b")

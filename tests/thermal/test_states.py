"""The state machine, by its table and by random traces."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safetrain_core import Thresholds, next_state, thermal
from safetrain_core.thermal.guard import ThermalGuard
from safetrain_core.thermal.states import ThermalState

NORMAL, PAUSED, ABORTED = ThermalState.NORMAL, ThermalState.PAUSED, ThermalState.ABORTED
LIMITS = Thresholds(pause_c=85, resume_c=75, critical_c=95)

#: Temperature -> the state after it, from normal and from paused. At a threshold itself, nothing has been passed.
TABLE = [
    (20.0, NORMAL, NORMAL),
    (74.9, NORMAL, NORMAL),
    (75.0, NORMAL, PAUSED),
    (80.0, NORMAL, PAUSED),
    (85.0, NORMAL, PAUSED),
    (85.1, PAUSED, PAUSED),
    (95.0, PAUSED, PAUSED),
    (95.1, ABORTED, ABORTED),
    (math.inf, ABORTED, ABORTED),
    (None, NORMAL, PAUSED),
    (math.nan, NORMAL, PAUSED),
    (-math.inf, NORMAL, PAUSED),
]


@pytest.mark.parametrize(("celsius", "from_normal", "from_paused"), TABLE)
def test_the_state_table(celsius, from_normal, from_paused):
    assert next_state(NORMAL, celsius, LIMITS) is from_normal
    assert next_state(PAUSED, celsius, LIMITS) is from_paused
    assert next_state(ABORTED, celsius, LIMITS) is ABORTED


def test_the_name_that_is_fixed_is_where_it_is_said_to_be():
    assert thermal.next_state is next_state


thresholds = st.lists(st.integers(0, 1200), min_size=3, max_size=3, unique=True).map(
    lambda three: Thresholds(*(sorted(three)[i] / 10 for i in (1, 0, 2)))
)
readings = st.one_of(
    st.none(), st.just(math.nan), st.just(math.inf), st.just(-math.inf), st.floats(-20, 130), st.integers(0, 120)
)


@given(thresholds, st.lists(readings, max_size=40))
def test_by_random_traces_it_never_trains_too_hot_never_resumes_too_warm_and_never_comes_back(limits, trace):
    state = NORMAL
    for celsius in trace:
        was, state = state, next_state(state, celsius, limits)
        known = celsius is not None and not math.isnan(celsius) and celsius != -math.inf
        if known and celsius > limits.critical_c:
            assert state is ABORTED
        if known and celsius > limits.pause_c:
            assert state is not NORMAL
        if was is PAUSED and state is NORMAL:
            assert known
            assert celsius < limits.resume_c
        if was is ABORTED:
            assert state is ABORTED
        if not known:
            assert state is was
        if was is NORMAL and state is PAUSED:
            assert celsius > limits.pause_c


@given(thresholds, st.lists(readings, max_size=40))
def test_the_guard_is_the_state_machine_and_a_sensor_lost_for_three_readings(limits, trace):
    guard = ThermalGuard(lambda: None, limits.pause_c, limits.resume_c, limits.critical_c, on_event=lambda event: None)
    state, lost = NORMAL, 0
    for celsius in trace:
        known = celsius is not None and not math.isnan(celsius) and celsius != -math.inf
        lost = 0 if known else lost + 1
        state = ABORTED if lost >= 3 else next_state(state, celsius, limits)
        assert guard.see(celsius) is state
    changes = [event.state for event in guard.events]
    assert all(a is not b for a, b in zip([NORMAL, *changes], changes, strict=False))
    assert ([NORMAL, *changes])[-1] is state


def test_one_threshold_flaps_and_two_do_not():
    trace = [84.5, 85.5] * 50
    narrow, wide = Thresholds(85, 84.9999, 95), Thresholds(85, 75, 95)

    def changes(limits):
        states = [NORMAL]
        for celsius in trace:
            states.append(next_state(states[-1], celsius, limits))
        return sum(a is not b for a, b in itertools.pairwise(states))

    assert (changes(narrow), changes(wide)) == (99, 1)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ((85, 85, 95), "must rise: resume 85 C < pause 85 C < critical 95 C does not hold"),
        ((85, 90, 95), "must rise"),
        ((95, 75, 95), "must rise"),
        ((85, -1, 95), "resume_c=-1 is out of range; allowed: 0..120 C"),
        ((85, 75, 121), "critical_c=121 is out of range"),
        ((math.nan, 75, 95), "pause_c=nan is out of range"),
    ],
)
def test_thresholds_out_of_order_or_range_are_refused(values, told):
    with pytest.raises(ValueError, match=told):
        Thresholds(*values)
    with pytest.raises(ValueError, match=told):
        ThermalGuard(lambda: 60.0, *values)

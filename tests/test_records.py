"""Rows, refused rows, counters, and the rolling skip rate."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safetrain_core import SKIP_REASONS, SkipLog, StepLog, TrainState, rolling_skip_rate


def row(step, skipped=False):
    return StepLog(step, 0.1, 1.0, 1.0, 0.5, None, skipped, "non_finite_loss" if skipped else None)


def test_the_line_of_a_step_is_the_one_that_is_documented():
    line = "STEP step=  7 lr=0.010000 pre_clip=  1.234567 post_clip=  1.000000 loss=0.123456 scale=65536.0 reason=-"
    assert str(StepLog(7, 0.01, 1.234567, 1.0, 0.123456, 65536.0)) == line


def test_the_line_of_a_skip_starts_with_its_tag_and_shows_what_is_unknown_as_a_dash():
    line = str(StepLog(1234, 0.01, None, None, math.nan, None, True, "non_finite_loss"))
    assert line.split() == [
        "SKIP",
        "step=1234",
        "lr=0.010000",
        "pre_clip=",
        "-",
        "post_clip=",
        "-",
        "loss=nan",
        "scale=-",
        "reason=non_finite_loss",
    ]


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 20))
def test_rolling_skip_rate_equals_its_definition(skips, window):
    rates = rolling_skip_rate((row(i, s) for i, s in enumerate(skips, 1)), window)
    spans = [skips[max(0, i + 1 - window) : i + 1] for i in range(len(skips))]
    assert rates == [sum(span) / len(span) for span in spans]


def test_rolling_skip_rate_refuses_a_window_below_one():
    with pytest.raises(ValueError, match="window=0"):
        rolling_skip_rate([], 0)


def test_a_step_that_was_not_skipped_has_no_skip_log():
    assert SkipLog.from_row(row(3, True)).reason in SKIP_REASONS
    with pytest.raises(ValueError, match="step 3 was not skipped"):
        SkipLog.from_row(row(3))


def test_train_state_keeps_the_last_thousand_losses_and_round_trips_as_plain_types():
    state = TrainState()
    for i in range(2500):
        state.accept(float(i))
    assert (state.updates, len(state.losses), state.losses[0], state.losses[-1]) == (
        2500,
        1000,
        1500.0,
        2499.0,
    )
    data = state.to_dict()
    assert TrainState.from_dict(data) == state
    assert {type(v) for v in data.values()} == {int, list}
    assert data["losses"] is not state.losses


def test_train_state_refuses_other_keys():
    with pytest.raises(ValueError, match="expected"):
        TrainState.from_dict({"step": 1})

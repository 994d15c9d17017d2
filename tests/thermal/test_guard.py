"""The guard in a loop of one's own: its poller, its waiting, and a sensor that fails in each way."""

import logging
import math
import os
import threading
import time

import pytest

from safetrain_core import GpuReading, SimulatedCard, ThermalAbort, ThermalGuard
from safetrain_core.thermal.hold import Wish, wait_while_hot
from safetrain_core.thermal.poller import Poller

QUICK = {"poll_interval_s": 0.005}


def run_on(guard, save=lambda: None):
    """Go on for as long as the guard lets."""
    while guard.hold(save=save):
        time.sleep(0.001)


def follow(celsius, last=None):
    """A source that gives these temperatures in turn, then the last for ever."""
    left = list(celsius)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


def test_it_saves_then_waits_then_resumes_below_resume(caplog):
    celsius, asked = [60.0], []

    def save():
        asked.append("saved")
        celsius[0] = 80.0  # not cool yet: between the thresholds

    def should_stop():
        asked.append(guard.state.value)
        if asked.count("paused") == 3:
            celsius[0] = 74.0
        return False

    with ThermalGuard(lambda: celsius[0], **QUICK) as guard, caplog.at_level(logging.WARNING):
        assert guard.hold()
        celsius[0] = 86.0
        while not guard.events:
            guard.poller.wait(20)
        assert guard.hold(save=save, should_stop=should_stop)
    assert asked[:2] == ["paused", "saved"]
    assert asked[-1] == "normal"
    assert asked.count("saved") == 1
    assert asked.count("paused") >= 3
    assert [str(event) for event in guard.events] == [
        "paused: 86 C is above pause 85 C",
        "normal: 74 C is below resume 75 C",
    ]
    assert [record.getMessage() for record in caplog.records] == [f"GPU {event}" for event in guard.events]
    assert guard.paused_s > 0


def test_pausing_cools_a_simulated_card_and_keeps_it_below_the_pause_threshold_and_one_step():
    card = SimulatedCard(25, start_c=60, heat_capacity_j_per_c=1, cooling_time_s=0.05)
    saved, hottest = [], 0.0
    with ThermalGuard(card, **QUICK) as guard:
        for _ in range(200):
            guard.hold(save=lambda: saved.append(1))
            card.work(joules=3)
            hottest = max(hottest, card.read().temperature_c)
            time.sleep(0.001)
    pauses = [e for e in guard.events if e.state == "paused"]
    assert len(pauses) >= 2
    assert len(saved) <= len(pauses)
    assert guard.paused_s > 0
    assert hottest > 85


@pytest.mark.parametrize("start", [60, 86])
def test_critical_from_normal_and_from_paused_saves_once_and_aborts(start):
    saved = []
    with (
        ThermalGuard(follow([start, start, 96, 20]), **QUICK) as guard,
        pytest.raises(ThermalAbort, match="96 C is above critical 95 C; let it cool"),
    ):
        run_on(guard, save=lambda: saved.append(guard.state))
    assert len(saved) == 1
    with pytest.raises(ThermalAbort):
        guard.hold()  # it stays so


def broken():
    raise OSError("bus error")


@pytest.mark.parametrize("lost", [None, math.nan, -math.inf, GpuReading(power_w=3.0), broken])
@pytest.mark.parametrize("before", [60, 86])
def test_a_sensor_lost_for_three_polls_aborts_from_normal_and_from_paused(lost, before, caplog):
    polls, left = [], [before, before]

    def source():
        polls.append(1)
        if left:
            return left.pop()
        return lost() if callable(lost) else lost

    saved = []
    with (
        ThermalGuard(source, **QUICK) as guard,
        pytest.raises(ThermalAbort, match=r"the sensor was lost .3 readings in a row without a temperature, the last"),
    ):
        run_on(guard, save=lambda: saved.append(1))
    assert len(saved) == 1
    assert guard.unknown_in_a_row >= 3
    assert [e.state.value for e in guard.events][-1] == "aborted"
    assert sum("bus error" in r.getMessage() for r in caplog.records) == (lost is broken)


def test_two_unknown_readings_are_forgiven_and_never_count_as_cool():
    guard = ThermalGuard(lambda: None)
    states = [guard.see(c).value for c in (86, None, None, 80, math.nan, None, 74, None, None, 60)]
    assert states == ["paused"] * 6 + ["normal"] * 4


def test_a_source_that_gives_nothing_at_the_start_is_refused_and_leaves_no_thread():
    before = threading.active_count()
    with (
        pytest.raises(ValueError, match=r"no temperature of GPU at the start.*watch --once"),
        ThermalGuard(lambda: None),
    ):
        pass
    assert threading.active_count() == before


@pytest.mark.parametrize("source", [61.0, "cuda:0", None])
def test_what_cannot_be_asked_is_refused(source):
    with pytest.raises(ValueError, match="cannot be asked"):
        ThermalGuard(source)


@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf])
def test_a_poll_interval_that_is_no_time_is_refused(seconds):
    with pytest.raises(ValueError, match="poll_interval_s"):
        ThermalGuard(lambda: 60.0, poll_interval_s=seconds)


def test_should_stop_ends_the_wait_promptly():
    with ThermalGuard(lambda: 90.0, **QUICK) as guard:
        start = time.monotonic()
        asked = []
        assert guard.hold(should_stop=lambda: asked.append(1) or len(asked) > 3) is False
        assert len(asked) == 4
        assert time.monotonic() - start < 30
    assert guard.paused_s > 0


def test_what_save_raises_before_a_pause_is_raised_and_before_an_abort_does_not_hide_it(caplog):
    def full():
        raise OSError("disk full")

    with ThermalGuard(lambda: 90.0, **QUICK) as guard, pytest.raises(OSError, match="disk full"):
        guard.hold(save=full)
    with ThermalGuard(lambda: 96.0, **QUICK) as guard, pytest.raises(ThermalAbort, match="96 C"):
        guard.hold(save=full)
    assert "disk full" in caplog.text


def test_holding_reads_nothing_itself_the_poller_does_in_its_own_thread():
    threads = []

    def source():
        threads.append(threading.get_ident())
        return 60.0

    with ThermalGuard(source, poll_interval_s=0.01) as guard:
        for _ in range(1000):
            guard.hold()
        while guard.poller.polls < 3:
            guard.hold()
    assert threads.count(threading.get_ident()) == 1  # the first reading
    assert len(set(threads)) == 2
    polls = len(threads)
    time.sleep(0.05)
    assert len(threads) == polls, "the poller ends with the guard"


def test_a_driver_that_hangs_is_a_lost_sensor_and_does_not_hang_the_end():
    hangs, go = threading.Event(), threading.Event()

    def source():
        if threading.current_thread() is threading.main_thread():
            return 60.0
        hangs.set()
        go.wait(60)
        return 60.0

    with ThermalGuard(source, **QUICK) as guard:
        assert hangs.wait(30)
        with pytest.raises(ThermalAbort, match=r"no answer for .* the driver hangs"):
            run_on(guard)
    go.set()


def test_a_process_that_was_stopped_for_long_is_not_a_lost_sensor():
    with ThermalGuard(lambda: 60.0, **QUICK) as guard:
        guard.poller._polled_at -= 3600  # as after SIGSTOP: the poller reads again at once
        assert guard.hold()
    assert guard.events == []


def test_in_a_forked_child_leaving_the_guard_does_nothing_and_hangs_nothing():
    with ThermalGuard(lambda: 60.0, **QUICK) as guard:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                assert not guard.poller.running
                guard.__exit__(None, None, None)
                with ThermalGuard(lambda: 61.0, **QUICK) as own:  # one of its own works
                    status = 0 if own.poller.wait(20) else 2
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        assert guard.poller.wait(20), "the parent's goes on"


def test_a_pause_threshold_above_the_cards_own_slowdown_is_warned_of(caplog):
    ThermalGuard(lambda: 60.0, pause_c=85, slowdown_c=83)
    assert "slows itself down at 83 C, below the pause threshold of 85 C" in caplog.text
    caplog.clear()
    ThermalGuard(lambda: 60.0, pause_c=85, slowdown_c=85)
    ThermalGuard(lambda: 60.0, pause_c=85)
    assert caplog.text == ""


def test_the_largest_wish_of_several_ranks_counts():
    assert Wish.GO < Wish.PAUSE < Wish.STOP < Wish.ABORT
    for wish in (Wish.GO, Wish.STOP):
        saved = []
        assert wait_while_hot(lambda wish=wish: wish, time.sleep, lambda saved=saved: saved.append(1)) == (wish, 0.0)
        assert saved == []


def test_a_poller_is_entered_once_at_a_time():
    with Poller(lambda: 1.0, 1.0) as poller, pytest.raises(ValueError, match="running already"):
        poller.__enter__()


def test_a_guard_that_is_not_watching_says_so_and_an_abort_stays_one():
    guard = ThermalGuard(lambda: 50.0, **QUICK)
    with pytest.raises(ValueError, match="the thermal guard of GPU is not watching"):
        guard.hold()
    with guard:
        assert guard.hold()
    with pytest.raises(ValueError, match="is not watching"):
        guard.hold()
    guard.see(99.0)
    with pytest.raises(ThermalAbort):
        guard.hold()


def test_what_on_event_raises_is_logged_and_the_guard_goes_on_watching(caplog):
    """Raised in the poller's thread it would end that, and look like a driver that hangs."""
    celsius = [60.0]

    def fail(event):
        raise OSError("no network")

    with ThermalGuard(lambda: celsius[0], poll_interval_s=0.01, on_event=fail) as guard:
        celsius[0] = 90.0
        while not guard.events:
            time.sleep(0.01)
        celsius[0] = 60.0
        assert guard.hold()
    assert [event.state.value for event in guard.events] == ["paused", "normal"]
    assert "OSError: no network" in caplog.text


def test_on_event_may_ask_the_guard_and_hand_it_a_reading():
    guard = ThermalGuard(lambda: 60.0, on_event=lambda event: guard.see(60.0))
    thread = threading.Thread(target=guard.see, args=(90.0,), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert guard.state == "normal"


def test_a_guard_that_is_entered_again_begins_anew_after_an_abort():
    celsius = [60.0]
    guard = ThermalGuard(lambda: celsius[0], poll_interval_s=0.01)
    with guard:
        celsius[0] = 99.0
        while guard.state != "aborted":
            time.sleep(0.01)
        with pytest.raises(ThermalAbort):
            guard.hold()
    celsius[0] = 60.0
    with guard:
        assert guard.hold()

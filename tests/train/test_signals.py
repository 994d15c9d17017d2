"""A signal asks for an end; a second SIGINT is obeyed at once; handlers are put back."""

import signal
import threading

import pytest

from safetrain_core.train.signals import StopSignals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_handlers_are_put_back(number):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopSignals() as stop:
        assert stop.received is None
        signal.raise_signal(number)
        assert stop.received is number
        signal.raise_signal(signal.SIGTERM)
        assert stop.received is number
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_second_sigint_raises_at_once_and_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT)
    stop = StopSignals()
    with stop:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert stop.received is signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is before


def test_outside_the_main_thread_it_watches_nothing():
    seen = []

    def work():
        with StopSignals() as stop:
            seen.append(stop.received)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [None]

"""For all tests: a runner that was started in the background ignores SIGINT, and so would each process of a test."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

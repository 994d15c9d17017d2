"""For all tests: signals as in the foreground, and files that stay whole where several processes share the tests."""

import signal

import pytest

# A runner that was started in the background ignores SIGINT, and so would each process of a test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before the plugin reads the groups
def pytest_collection_modifyitems(items):
    """The tests of a file, the cells of a notebook, go to one process in order, unless they say otherwise."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))

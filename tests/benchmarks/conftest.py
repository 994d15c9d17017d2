"""One table at the end of `make bench`: what was measured, against what, the target, and whether it holds.

A complete run (every file, nothing deselected, run to its end) also writes it to RESULTS.md beside this file. A claim
that does not hold fails its test, and stands in the table all the same; so do tests that were skipped, with the reason,
and tests that did not end. Each file names the area of its rows: ``AREA = "step"``.
"""

import datetime
import re
import time
from collections import Counter
from pathlib import Path

import pytest
from results import AREAS, HOLDS, Row, as_text, machine, versions, write

HERE = Path(__file__).parent
SHORT = pytest.StashKey[list]()


class Run:
    """What this run of pytest has gathered."""

    def __init__(self):
        self.rows, self.took, self.deselected, self.ended, self.session = [], Counter(), 0, 0, None

    def is_complete(self):
        """Whether every test of every file here was selected and ran to its end."""
        items = self.session.items
        return (
            {item.path for item in items if item.path.parent == HERE} == set(HERE.glob("test_*.py"))
            and not any("::" in arg for arg in self.session.config.args)
            and self.deselected == 0
            and self.ended == len(items)
        )


RUN = Run()


def _add(request, what, value, unit, sign=None, target=None):
    area = request.module.AREA
    assert area in AREAS, f"{request.module.__name__} has the area {area}, which results.AREAS lacks"
    assert all((row.area, row.what) != (area, what) for row in RUN.rows), f"two rows are called {area}: {what}"
    low, high = getattr(value, "low", None), getattr(value, "high", None)
    RUN.rows.append(Row(area, what, float(value), unit, sign, target, low, high))
    return RUN.rows[-1]


@pytest.fixture
def claim(request):
    """``claim(what, value, "<=", target, unit)``: a row of the table; one that does not hold fails the test at its end.

    Of a ``Measured`` value the quartiles are told too.
    """
    short = request.node.stash.setdefault(SHORT, [])

    def record(what, value, sign, target, unit=""):
        row = _add(request, what, value, unit, sign, target)
        if row.verdict != HOLDS:
            short.append(f"{what}: {row.cells()[2]}, target {row.cells()[3]}")

    return record


@pytest.fixture
def compare(request):
    """``compare(what, value, unit)``: a row without a target, that another is read beside."""
    return lambda what, value, unit="": _add(request, what, value, unit)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    yield
    if short := item.stash.get(SHORT, []):
        pytest.fail("; ".join(short), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    why = None
    if report.skipped:
        why = f"skipped: {report.longrepr[2].removeprefix('Skipped: ')}"
    elif report.failed and not (call.when == "call" and item.stash.get(SHORT, [])):
        why = f"{call.excinfo.typename}: {(str(call.excinfo.value).splitlines() or [''])[0]}"
    if why is not None:
        area = getattr(getattr(item, "module", None), "AREA", AREAS[-1])
        name = item.name.removeprefix("test_").replace("_", " ")
        RUN.rows.append(Row(area, name, 0, why=re.sub(r"(?<!\S)[\"']?(/|[A-Z]:\\)\S+", "(path)", why)[:160]))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    start = time.perf_counter()
    result = yield
    RUN.took[item.path.name] += time.perf_counter() - start
    RUN.ended += 1
    return result


def pytest_deselected(items):
    RUN.deselected += len(items)


def pytest_collection_finish(session):
    RUN.session = session


def pytest_terminal_summary(terminalreporter):
    if not RUN.rows:
        return
    for line in ("", ", ".join(machine()), ", ".join(versions()), "", *as_text(RUN.rows), ""):
        terminalreporter.write_line(line)
    if RUN.is_complete():
        write(RUN.rows, HERE / "RESULTS.md", date=datetime.date.today().isoformat(), took=RUN.took)
        terminalreporter.write_line(f"kept in {HERE.name}/RESULTS.md; `make readme` takes its figures over")
    else:
        terminalreporter.write_line("not a complete run: RESULTS.md stays as it was")

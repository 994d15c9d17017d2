"""One JupyterLab and one Chromium for all lessons; a failed test leaves a picture under runs/browser/."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lab_server import Server
    from learner import Learner
    from playwright.sync_api import Page

ROOT = Path(__file__).resolve().parents[2]
LESSONS = sorted(path.stem for path in (ROOT / "lessons").glob("[0-9][0-9]_*.ipynb"))
SHOTS = ROOT / "runs" / "browser"
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests" / "lessons")]

BROWSERS = ("chromium", "google-chrome", "google-chrome-stable", "chromium-browser")
#: Without these, Chromium asks its makers' hosts for news at every start.
QUIET = ("disable-gpu", "disable-quic", "no-first-run", "disable-background-networking", "disable-component-update")
ACTION_LIMIT_S = 30


@pytest.fixture(scope="session")
def chromium() -> str:
    """The system's Chromium; Playwright's own is never downloaded."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)} is on the PATH (Debian: apt-get install chromium)")
    pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: `make browser` installs it")
    return found


@pytest.fixture(scope="session")
def server(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    from lab_server import serving

    with serving(ROOT / "lessons", tmp_path_factory.mktemp("lab")) as running:
        yield running


@pytest.fixture(scope="session")
def page(chromium: str, server: Server) -> Iterator[Page]:
    from learner import HELPERS
    from playwright.sync_api import sync_playwright

    shutil.rmtree(SHOTS, ignore_errors=True)  # pictures of an earlier run would mislead
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=[f"--{flag}" for flag in QUIET])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(ACTION_LIMIT_S * 1000)
        page.add_init_script(HELPERS)
        yield page
        browser.close()


# The entrance comes last, when there are passed exercises to tell of.
@pytest.fixture(scope="module", params=[*LESSONS[1:], *LESSONS[:1]])
def learner(request: pytest.FixtureRequest, page: Page, server: Server) -> Iterator[Learner]:
    """A learner who has opened the lesson and run all of it; what the page's console complains of is kept."""
    from learner import Learner

    here = Learner(page, server, request.param, SHOTS)

    def hear_console(message) -> None:
        if message.type == "error":
            here.complaints.append(f"{here.lesson}, the browser's console: {message.text}")

    def hear_error(error) -> None:
        here.complaints.append(f"{here.lesson}, an error in the page: {error}")

    page.on("console", hear_console)
    page.on("pageerror", hear_error)
    try:
        here.open()
        here.shot("top")
        here.run_all()
        yield here
    finally:
        page.remove_listener("console", hear_console)
        page.remove_listener("pageerror", hear_error)
        server.end_kernels()


@pytest.fixture(scope="session")
def lessons() -> list[str]:
    """The names of all lessons, in order."""
    return LESSONS


@pytest.fixture(scope="session")
def passed() -> list[str]:
    """The exercises that were answered rightly so far."""
    return []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Names a picture of the page as it was when the test failed."""
    report = yield
    page = getattr(item, "funcargs", {}).get("page")
    if report.failed and page is not None and report.when != "teardown":
        from playwright.sync_api import Error

        path = SHOTS / f"failed-{item.name}.png"
        with contextlib.suppress(Error):  # a page that has crashed has no picture
            page.screenshot(path=path)
            report.sections.append(("the page when it failed", str(path.relative_to(ROOT))))
    return report

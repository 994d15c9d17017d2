"""Puts the lessons' folder on the path, as in a lesson, and runs each test that takes ``script`` once per lesson."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

LESSONS = Path(__file__).resolve().parents[2] / "lessons"
sys.path[:0] = [str(LESSONS), str(Path(__file__).parent)]

# As in support/__init__.py, and here before anything has loaded torch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

SCRIPTS = sorted(LESSONS.glob("[0-9][0-9]_*.py"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes ``script`` runs once for each lesson."""
    if "script" in metafunc.fixturenames:
        metafunc.parametrize("script", SCRIPTS, ids=[path.stem for path in SCRIPTS])


@pytest.fixture
def lessons_folder() -> Path:
    return LESSONS

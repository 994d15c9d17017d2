"""One table at the end of `make bench`: what was measured, against what, the target, and whether it holds."""

import platform

import pytest
import torch

ROWS: list[tuple[str, float, str, float]] = []


@pytest.fixture
def claim():
    """``claim(what, value, "<=", target)``: a row of the table, and a failure where it does not hold."""

    def record(what: str, value: float, sign: str, target: float) -> None:
        ROWS.append((what, value, sign, target))
        holds = value <= target if sign == "<=" else value >= target
        assert holds, f"{what}: {value:.3f}, target {sign} {target}"

    return record


def pytest_terminal_summary(terminalreporter):
    if not ROWS:
        return
    write = terminalreporter.write_line
    write("")
    write(f"torch {torch.__version__}, {torch.get_num_threads()} threads, Python {platform.python_version()}")
    width = max(len(row[0]) for row in ROWS)
    for what, value, sign, target in ROWS:
        holds = value <= target if sign == "<=" else value >= target
        write(f"{what:<{width}}  {value:8.3f}  target {sign} {target:<6g} {'' if holds else 'FALLS SHORT'}")

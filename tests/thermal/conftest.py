"""Fixtures of the thermal tests."""

import pytest
from fake_nvml.build import COMPILER, FakeNvml


@pytest.fixture
def fake(tmp_path):
    """One fake card behind the real pynvml."""
    if COMPILER is None:
        pytest.skip("no C compiler (cc) to build tests/fake_nvml with")
    pytest.importorskip("pynvml", reason="nvidia-ml-py, an optional package, is missing")
    return FakeNvml(tmp_path)


@pytest.fixture
def fakes(fake, tmp_path):
    """Three fake cards, GPU-aaaa, GPU-bbbb and GPU-cccc, at 61, 62 and 63 C."""
    return FakeNvml(tmp_path, cards=3).set(gpu1_temperature=62, gpu2_temperature=63)

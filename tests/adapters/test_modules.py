"""The adapters as modules: each asks for its own library only, says what is missing, and its examples run."""

import doctest
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import safetrain_core

ROOT = Path(__file__).parents[2]
NEEDS = {
    "host": "torch",
    "huggingface": "transformers",
    "lightning": "lightning",
    "tensorboard": "tensorboard",
    "window": "torch",
}


def test_each_module_is_listed_here():
    assert {path.stem for path in (ROOT / "safetrain_core" / "adapters").glob("[a-z]*.py")} == set(NEEDS)


@pytest.mark.parametrize("module", NEEDS)
def test_the_examples_in_the_docstrings_run(module):
    pytest.importorskip(NEEDS[module], reason=f"{NEEDS[module]} is not installed: make test-adapters")
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    found = importlib.import_module(f"safetrain_core.adapters.{module}")
    assert doctest.testmod(found, optionflags=options).failed == 0
    assert set(found.__all__) <= set(vars(found))


@pytest.mark.parametrize(("module", "package"), [("huggingface", "transformers"), ("lightning", "lightning")])
def test_without_its_library_a_module_names_the_extra(module, package):
    code = f"import sys; sys.modules[{package!r}] = None; from safetrain_core.adapters import {module}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: safetrain_core.adapters.{module} needs the package {package}")
    assert last.endswith(f"pip install 'safetrain-core[{module}]'")


def test_nothing_of_the_package_imports_the_libraries_of_others():
    code = """
import sys, safetrain_core, safetrain_core.adapters, safetrain_core.cli, safetrain_core.train.trainer
import safetrain_core.adapters.host, safetrain_core.adapters.window, safetrain_core.adapters.tensorboard
for name in safetrain_core.__all__:
    getattr(safetrain_core, name)
print(sorted({"transformers", "lightning", "accelerate", "tensorboard"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.stdout == "[]\n", done.stderr
    assert "adapters" not in safetrain_core._HOME.values()

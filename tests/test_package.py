"""The package as a whole: what it shows, what importing it does, and that its lists of dependencies agree."""

import ast
import itertools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import safetrain_core

ROOT = Path(__file__).parents[1]


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_every_public_name_can_be_imported_and_the_list_is_sorted():
    assert safetrain_core.__all__ == sorted(safetrain_core.__all__)
    for name in safetrain_core.__all__:
        assert getattr(safetrain_core, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = safetrain_core.no_such_name


def test_the_names_for_type_checkers_are_the_names_at_run_time():
    tree = ast.parse(Path(safetrain_core.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    told = {alias.name: node.module for node in block.body for alias in node.names}
    assert told == safetrain_core._HOME


def test_importing_loads_nothing_and_changes_nothing():
    assert (
        run("import sys, safetrain_core; print(sorted({'torch', 'numpy', 'pydantic', 'yaml'} & set(sys.modules)))")
        == "[]\n"
    )
    before_and_after = """
import logging, os, random, signal, sys, warnings
import numpy, torch
def look():
    return (dict(os.environ), random.getstate(), numpy.random.get_state()[1].tobytes(),
            torch.get_rng_state().numpy().tobytes(),
            signal.getsignal(signal.SIGINT), logging.getLogger().handlers[:], logging.getLogger().level,
            warnings.filters[:], torch.get_default_dtype(), torch.get_num_threads(), os.getcwd(), sys.path[:])
import pydantic, yaml, torch.utils.data
before = look()
import safetrain_core
for name in safetrain_core.__all__:
    getattr(safetrain_core, name)
import safetrain_core.cli
print(look() == before)
"""
    assert run(before_and_after) == "True\n"


def test_help_and_config_errors_come_before_torch_is_imported():
    code = """
import sys
from safetrain_core.cli import main
for argv in (['train', '--help'], ['train', '--batch-size', '0'], ['train', '--nonsense'], ['train', '--print-config']):
    try:
        main(argv)
    except SystemExit:
        pass
print('torch' in sys.modules)
"""
    assert run(code).splitlines()[-1] == "False"


def test_no_assert_and_no_unsafe_load_in_the_package():
    for path in (ROOT / "safetrain_core").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(text))), path
        assert "weights_only=False" not in text, path
        assert "set_num_threads" not in text, path


#: Extras that neither `make setup` nor `make test-adapters` installs, so that nothing pins them.
NOT_SET_UP = ("apollo", "peers")


def dependencies(leave_out=()):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [entries for name, entries in project["optional-dependencies"].items() if name not in leave_out]
    listed = [*project["dependencies"], *itertools.chain(*extras)]
    return {re.match(r"[\w.-]+", entry)[0].lower(): entry for entry in listed if not entry.startswith(project["name"])}


def pins():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.lower().replace("_", "-").split("==") for line in lines if line and not line.startswith("#"))


def test_every_dependency_is_pinned_within_its_range():
    from packaging.requirements import Requirement

    assert pins()["torch"] == "2.13.0"
    for name, entry in dependencies(leave_out=NOT_SET_UP).items():
        assert Requirement(entry).specifier.contains(pins()[name]), f"{entry} is pinned to {pins()[name]}"


def test_the_conda_environment_holds_python_pip_and_this_folder_with_the_pins():
    import yaml

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    python, pip, nested = environment["dependencies"]
    assert python == "python" + project["requires-python"]
    assert pip == "pip"
    assert nested == {"pip": ["-c constraints.txt", "-e .[dev]"]}


def test_the_readme_gives_a_reason_for_each_dependency():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    missing = [name for name in dependencies() if f"| {name} |" not in readme.lower()]
    assert not missing

"""The public names: what is listed is what can be seen, and each is explained, with an example and its errors."""

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest

import safetrain_core

ROOT = Path(__file__).parents[1]

#: What a module lists that another one defines: where a reader would look for it.
SHOWN_ELSEWHERE = {
    "safetrain_core.thermal": {"Thresholds", "next_state"},
    "safetrain_core.thermal.guard": {"ThermalState"},
}

#: Our own errors, and the one for bad arguments.
ERRORS = {"ValueError", "CheckpointError", "RankFailed", "ThermalAbort", "TrainingFailed"}

MODULES = sorted(found.name for found in pkgutil.walk_packages(safetrain_core.__path__, "safetrain_core."))
EXPLAINED = [name for name in safetrain_core.__all__ if callable(getattr(safetrain_core, name))]


def in_order(names):
    """Constants, then classes, then functions; each by name."""
    return sorted(names, key=lambda name: (not name.isupper(), not name[:1].isupper(), name))


def defined_in(module):
    """Names that the module's own statements make, imports left out."""
    made = set()
    for node in ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            made.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                made |= {leaf.id for leaf in ast.walk(target) if isinstance(leaf, ast.Name)}
    return made


def own_methods(kind):
    """The functions of a class's own body, properties and class methods too; not what dataclass makes."""
    for name, member in vars(kind).items():
        function = inspect.unwrap(member.fget if isinstance(member, property) else getattr(member, "__func__", member))
        if inspect.isfunction(function) and function.__code__.co_filename == inspect.getsourcefile(kind):
            yield name, function


def raises(function, look_into=True):
    """Names of ``ERRORS`` that a function raises itself, or the package's functions that it calls by name."""
    told = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.Raise):
            told |= {leaf.id for leaf in ast.walk(node) if isinstance(leaf, ast.Name)} & ERRORS
        elif look_into and isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called = inspect.unwrap(function.__globals__.get(node.func.id))
            if isinstance(called, types.FunctionType) and called.__module__.startswith("safetrain_core"):
                told |= raises(called, look_into=False)
    return told


def test_all_is_what_is_visible_and_sorted():
    visible = [name for name in dir(safetrain_core) if not name.startswith("_")]
    assert safetrain_core.__all__ == sorted(set(safetrain_core.__all__)) == visible
    assert all(getattr(safetrain_core, name) is not None for name in visible)


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_a_module_lists_what_it_defines_in_order(name):
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        if "safetrain_core.adapters" not in name:
            raise
        pytest.skip(str(error))  # the library that it adapts to is not installed
    listed = getattr(module, "__all__", [])
    assert list(listed) == in_order(set(listed))
    assert set(listed) <= set(dir(module))
    assert set(listed) - defined_in(module) == SHOWN_ELSEWHERE.get(name, set())
    if not listed:
        assert not [made for made in defined_in(module) if made[0] != "_" and callable(getattr(module, made))]


@pytest.mark.parametrize("name", EXPLAINED)
def test_a_public_name_and_its_methods_are_explained(name):
    shown = getattr(safetrain_core, name)
    assert inspect.getdoc(shown)
    assert not shown.__doc__.startswith(f"{name}("), "that is what dataclass makes up by itself"
    if inspect.isclass(shown):
        assert [method for method, body in own_methods(shown) if method[0] != "_" and not body.__doc__] == []


@pytest.mark.parametrize("name", EXPLAINED)
def test_a_public_name_tells_the_errors_that_it_raises(name):
    shown = getattr(safetrain_core, name)
    if isinstance(shown, types.ModuleType):  # diagnose: the room, which can be called
        shown = importlib.import_module("safetrain_core.diagnose.doctor").diagnose
    if not inspect.isclass(shown):
        assert [error for error in raises(inspect.unwrap(shown)) if error not in shown.__doc__] == []
        return
    for method, body in own_methods(shown):
        if method[0] != "_" or method in ("__init__", "__post_init__", "__enter__"):
            told = shown.__doc__ + (body.__doc__ or "")
            assert [error for error in raises(body) if error not in told] == [], method


def test_each_public_function_and_class_has_an_example_that_the_tests_run():
    told = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", "safetrain_core"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout
    run = {line.split("::")[-1] for line in told.splitlines()}
    homes = {name: f"safetrain_core.{safetrain_core._HOME[name]}" for name in EXPLAINED}
    without = [
        name
        for name, home in homes.items()
        if f"{home}.{name}" not in run and not (name == "diagnose" and home in run)  # its example is its room's
    ]
    assert without == []

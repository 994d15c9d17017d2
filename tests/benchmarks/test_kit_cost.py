"""What the kit itself costs: to import, to ask for help, to see its first step, to install."""

import importlib.metadata
import statistics
import subprocess
import sys
import time
from pathlib import Path

AREA = "kit"
ROOT = Path(__file__).parents[2]


def run(*argv):
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_import_time(claim):
    code = "import time, torch; s = time.perf_counter(); import safetrain_core; print(time.perf_counter() - s)"
    claim(
        "import safetrain_core after torch", statistics.median(float(run("-c", code)) for _ in range(5)), "<=", 0.1, "s"
    )


def seconds_to(line, *argv):
    """From the start of the command to the first line that begins so."""
    start = time.perf_counter()
    with subprocess.Popen([sys.executable, "-m", "safetrain_core", *argv], stdout=subprocess.PIPE, text=True) as child:
        for told in child.stdout:
            if told.startswith(line):
                took = time.perf_counter() - start
                child.stdout.read()
                return took
    raise AssertionError(f"{argv} printed no {line}")


def test_commands(claim, compare, tmp_path):
    times = [seconds_to("usage:", "train", "--help") for _ in range(5)]
    claim("safetrain train --help", statistics.median(times), "<=", 1, "s")
    times = [seconds_to("STEP step=  1 ", "train", "--steps", "1", "--out", str(tmp_path / str(i))) for i in range(3)]
    compare("safetrain train: from the command to its first STEP row", statistics.median(times), "s")


def installed(name, extras=()):
    """The names of all that ``name`` with these extras needs here, itself included."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found, open_ones = set(), [(canonicalize_name(name), tuple(extras))]
    while open_ones:
        wanted = open_ones.pop()
        if wanted in found:
            continue
        found.add(wanted)
        for text in importlib.metadata.requires(wanted[0]) or ():
            need = Requirement(text)
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *wanted[1])):
                open_ones.append((canonicalize_name(need.name), tuple(sorted(need.extras))))
    return {name for name, _ in found}


def size_of(names):
    """GB of their files."""
    files = [file.locate() for name in names for file in importlib.metadata.files(name) or ()]
    return sum(path.stat().st_size for path in files if path.is_file()) / 1e9


def test_size_of_what_is_installed(compare):
    core, everything = installed("safetrain-core"), installed("safetrain-core", ["dev"])
    build = "CPU build" if "+cpu" in importlib.metadata.version("torch") else "this build"
    compare(f"size of the core's dependencies, with a {build} of torch", size_of(core), "GB")
    compare(f"size of all that make setup installs, with a {build} of torch", size_of(everything), "GB")
    compare("packages that the core needs, all told", len(core) - 1)
    compare("packages that make setup installs", len(everything) - 1)

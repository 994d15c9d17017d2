"""The builder is repeatable, and never replaces a good notebook by one that fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat

BUILDER = Path(__file__).with_name("build_notebooks.py")


def build(*scripts: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BUILDER), *map(str, scripts)], capture_output=True, text=True, timeout=120
    )


def test_building_twice_gives_the_same_bytes_by_this_interpreter_and_a_failure_keeps_the_old(tmp_path: Path) -> None:
    script = tmp_path / "09_small.py"
    source = '# %% [markdown]\n# # Small\n\n# %% tags=["nbval-ignore-output"]\nimport sys\n\nprint(sys.executable)\n'
    script.write_text(source)
    notebook = script.with_suffix(".ipynb")

    assert build(script).returncode == 0
    first = notebook.read_bytes()
    cell = nbformat.read(notebook, as_version=4).cells[1]
    assert cell.outputs[0].text.strip() == sys.executable
    assert cell.metadata == {"tags": ["nbval-ignore-output"]}

    script.write_text(source + "\n# %%\nraise RuntimeError('broken')\n")
    failed = build(script)
    assert failed.returncode == 1
    assert "broken" in failed.stderr
    assert notebook.read_bytes() == first

    script.write_text(source)
    assert build(script).returncode == 0
    assert notebook.read_bytes() == first

"""Rebuild each lesson's notebook from its script, and run it: ``python tests/lessons/build_notebooks.py lessons/*.py``.

The script is the source. What is between marks in its Markdown (links, lists, tables) is written anew first, then the
notebook gets the script's cells, runs in the lessons' folder, and is stored with its outputs. Cell ids and metadata
depend on the cells alone, so that a rebuild shows nothing but real changes. A notebook in which a cell raises is
reported, and the old one stays.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jupytext
import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[2]
KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
WIDGET = "application/vnd.jupyter.widget-view+json"


def cells_of(script: Path) -> NotebookNode:
    """The script as a notebook without outputs, with ids that follow from the cells."""
    read = jupytext.read(script, fmt="py:percent")
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": KERNELSPEC, "language_info": {"name": "python"}})
    seen: dict[str, int] = {}
    for cell in read.cells:
        make = nbformat.v4.new_code_cell if cell.cell_type == "code" else nbformat.v4.new_markdown_cell
        occurrence = seen[cell.source] = seen.get(cell.source, 0) + 1
        ident = hashlib.sha256(f"{occurrence}:{cell.source}".encode()).hexdigest()[:12]
        metadata = {"tags": cell.metadata["tags"]} if cell.metadata.get("tags") else {}
        notebook.cells.append(make(cell.source, id=ident, metadata=metadata))
    return notebook


def run(notebook: NotebookNode, folder: Path, timeout_s: int) -> None:
    """Execute in ``folder`` with the interpreter that runs this script, whatever kernels are installed."""
    kernel = AsyncKernelManager(kernel_name="python3")
    kernel._kernel_spec = KernelSpec(
        argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        display_name=KERNELSPEC["display_name"],
        language="python",
    )
    client = NotebookClient(
        notebook,
        km=kernel,
        timeout=timeout_s,
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        store_widget_state=False,
    )
    client.execute(stderr=subprocess.DEVNULL)  # a kernel's remarks about its connection


def settle(notebook: NotebookNode) -> None:
    """Drop what differs from run to run: views of widgets that no longer live, what the kernel says of itself."""
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNELSPEC, "language_info": {"name": "python"}})
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "data" in output:
                output["data"].pop(WIDGET, None)


def refreshed(script: Path) -> None:
    """Write the generated parts of the script's Markdown anew."""
    sys.path.insert(0, str(ROOT / "lessons"))
    from support import index

    old = script.read_text(encoding="utf-8")
    new = index.refresh(old, script.stem)
    if new != old:
        script.write_text(new, encoding="utf-8")


def build(script: Path, timeout_s: int) -> str | None:
    """Rebuild one notebook; what went wrong, or None."""
    try:
        refreshed(script)
    except ValueError as error:  # a lesson that is not on the list
        return str(error)
    notebook = cells_of(script)
    try:
        run(notebook, script.parent, timeout_s)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        return str(error)
    settle(notebook)
    nbformat.validate(notebook)
    nbformat.write(notebook, script.with_suffix(".ipynb"))
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("scripts", nargs="+", type=Path, help="lessons/NN_name.py")
    parser.add_argument("--cell-timeout", type=int, default=120, metavar="S", help="seconds for one cell")
    args = parser.parse_args()
    # What its builder has passed is not stored with lesson 00.
    os.environ["SAFETRAIN_PROGRESS"] = str(Path(tempfile.gettempdir(), f"safetrain-progress-{os.getpid()}.json"))
    bad = 0
    for script in args.scripts:
        start = time.perf_counter()
        problem = build(script.resolve(), args.cell_timeout)
        if problem is None:
            size = script.with_suffix(".ipynb").stat().st_size
            print(f"built {script.with_suffix('.ipynb')}: {time.perf_counter() - start:.1f} s, {size / 1000:.0f} kB")
        else:
            bad += 1
            print(f"FAILED {script}; its old notebook stays as it was\n{problem}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The README's snippets for the trainers of others, run with a tiny model in place of the reader's own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SNIPPETS = [
    snippet
    for snippet in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    if "safetrain_core.adapters" in snippet
]
#: Module of the snippet -> what it takes for granted.
BEFORE = {
    "huggingface": "from hf_runs import Net, data as examples; model, data = Net(), examples()",
    "lightning": "from lightning_runs import Module, loader as batches; module, loader = Module(), batches()",
}
LIBRARY = {"huggingface": "transformers", "lightning": "lightning"}


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda text: re.search(r"adapters\.(\w+)", text)[1])
def test_the_snippet_runs_as_it_stands_and_writes_what_it_names(snippet, tmp_path):
    host = re.search(r"adapters\.(huggingface|lightning)", snippet)[1]
    pytest.importorskip(LIBRARY[host], reason=f"the extra {host} is not installed: make test-adapters")
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "adapters"), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", f"{BEFORE[host]}\n{snippet}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for name in re.findall(r'csv_log_path="([^"]+)"', snippet):
        assert (tmp_path / name).read_text().startswith("step,updates,epoch,loss")
    for name in re.findall(r'TensorBoardSink\("([^"]+)"', snippet):
        assert list((tmp_path / name).glob("events.out.tfevents*"))

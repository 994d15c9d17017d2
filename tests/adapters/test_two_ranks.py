"""Two ranks under torchrun: what one of them meets, both obey at the same step, and one of them writes."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Seconds for two processes to import a trainer and take twelve steps, on a machine that has other work.
PATIENCE_S = 240


@pytest.fixture(params=["huggingface", "lightning"])
def host(request):
    for package in {"huggingface": ["transformers", "accelerate"], "lightning": ["lightning.pytorch"]}[request.param]:
        pytest.importorskip(package, reason=f"the extra {request.param} is not installed: make test-adapters")
    return request.param


def on_two_ranks(host, case, folder):
    script = Path(__file__).with_name("on_two_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(script), host, case, str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    rows = list(csv.DictReader((folder / "run.csv").open(newline="")))
    return told, rows


def test_heat_on_one_rank_pauses_both_and_a_jump_on_one_stops_both_at_the_same_step(tmp_path, host):
    (first, second), rows = on_two_ranks(host, "jump", tmp_path)
    assert first == second  # losses are the mean over ranks, and weights are alike
    assert first["steps"] == 5
    assert first["reasons"] == [None] * 4 + ["loss_jump"]
    assert [row["step"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert [float(row["loss"]) for row in rows] == first["losses"]
    assert {row["effective_batch_size"] for row in rows} == {"8"}
    assert first["pauses"] == 1
    events = [row["thermal_event"] for row in rows if row["thermal_event"]]
    assert len(events) == 1
    assert events[0].startswith("paused for another rank; resumed")


@pytest.mark.parametrize("host", ["huggingface"], indirect=True)
def test_heat_on_one_rank_ends_both_with_a_checkpoint(tmp_path, host):
    (first, second), _ = on_two_ranks(host, "abort", tmp_path)
    assert first["raised"].startswith("another rank's GPU is too hot")
    assert "96 C is above critical 95 C" in second["raised"]
    assert first["status"] == second["status"] == "aborted"
    assert first["steps"] == second["steps"] < 12
    assert (tmp_path / "run" / f"checkpoint-{first['steps']}" / "model.safetensors").exists()

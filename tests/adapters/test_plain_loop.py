"""The recipe for a loop of one's own: short, whole, and its resumed run is the same run."""

import csv
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "lessons" / "recipes" / "plain_loop.py"


def run(folder, *flags):
    done = subprocess.run(
        [sys.executable, str(RECIPE), str(folder), *flags], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def rows_of(folder):
    return list(csv.DictReader((folder / "metrics.csv").open(newline="")))


def test_the_recipe_skips_logs_saves_rotates_resumes_and_is_diagnosed_in_under_40_lines(tmp_path):
    assert len(RECIPE.read_text(encoding="utf-8").splitlines()) < 40
    told = run(tmp_path / "whole")
    assert told.startswith("59 updates\nINFO nothing found in 60 steps")
    rows = rows_of(tmp_path / "whole")
    assert [row["step"] for row in rows if row["skipped"] == "1"] == ["25"]
    assert rows[24]["skip_reason"] == "non_finite_loss"
    names = ["metrics.csv", *(f"step_{step:08d}.pt" for step in (40, 50, 60))]
    assert sorted(path.name for path in (tmp_path / "whole").iterdir()) == names

    # Ended in the middle, its newest file torn, and run again: the same rows and the same weights.
    run(tmp_path / "cut", "37")
    torn = tmp_path / "cut" / "step_00000030.pt"
    torn.write_bytes(torn.read_bytes()[:-100])
    subprocess.run([sys.executable, str(RECIPE), str(tmp_path / "cut")], check=True, capture_output=True)
    assert rows_of(tmp_path / "cut") == rows
    ends = [torch.load(tmp_path / name / "step_00000060.pt")["model"] for name in ("whole", "cut")]
    assert all(torch.equal(weight, ends[1][name]) for name, weight in ends[0].items())

"""Each lesson runs as a plain script, from anywhere, and its exit status tells whether its claims held."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

#: What makes a lesson short; most take ``--num-steps``.
SHORT = {
    "03_checkpoint_resume": ("--total-steps", "16"),
    "04_sharded_resume": ("--ranks", "2"),
    "05_gradient_checkpointing": ("--layers", "8"),
    "06_thermal_guard": ("--num-steps", "100"),
}


def run(script: Path, *flags: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONWARNINGS": "default"}
    return subprocess.run(
        [sys.executable, str(script), *flags], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )


def test_script_runs_headless_and_saves_its_pictures(script: Path, tmp_path: Path) -> None:
    done = run(script, *SHORT.get(script.stem, ("--num-steps", "14")), "--out", "here", cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "STEP step=" in done.stdout
    assert "SKIP step=" in done.stdout or script.stem in SHORT
    assert "Every claim of this lesson held." in done.stdout
    assert done.stderr == ""
    pictures = list((tmp_path / "here").glob("*.png"))
    assert pictures
    for path in (tmp_path / "here").iterdir():
        assert path.stat().st_size > 0
        assert f"saved here/{path.name}" in done.stdout.replace(os.sep, "/")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["here"], "it wrote outside --out"


def test_help_names_every_flag(script: Path, tmp_path: Path) -> None:
    done = run(script, "--help", cwd=tmp_path)
    assert done.returncode == 0
    for flag in ("--seed", "--out", "--help"):
        assert flag in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flags", [("--num-steps", "0"), ("--colour", "red")])
def test_a_bad_flag_is_one_line_and_status_2(script: Path, flags: tuple[str, ...], tmp_path: Path) -> None:
    done = run(script, *flags, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("steps", ["1", "12"])
def test_lesson_01_may_be_short_and_may_end_on_the_bad_batch(lessons_folder: Path, steps: str, tmp_path: Path) -> None:
    done = run(lessons_folder / "01_clipping_amp.py", "--num-steps", steps, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "too short a run to show this" in done.stdout
    assert (tmp_path / "runs" / "01_clipping_amp" / "spike.png").is_file()


def test_lesson_01_with_100_steps_and_another_seed(lessons_folder: Path, tmp_path: Path) -> None:
    done = run(lessons_folder / "01_clipping_amp.py", "--num-steps", "100", "--seed", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "step=100 " in done.stdout


def test_a_lesson_imports_support_before_torch_so_that_idle_threads_sleep(script: Path) -> None:
    lines = script.read_text(encoding="utf-8").splitlines()

    def first(name: str) -> int:
        return next((i for i, line in enumerate(lines) if re.match(rf"(from|import) {name}\b", line)), len(lines))

    assert first("support") < min(first("torch"), first("safetrain_core"))

"""Each lesson runs as a plain script, from anywhere, and its exit status tells whether its claims held.

Here is every start of a lesson as a process: a run in full for each row of ``RUNS``, and the mistakes of ``MISTAKES``.
No row has the defaults of all flags, as the notebooks are checked with these.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from exercises import LESSONS

SHORT = "too short a run to show this: "


class Run(NamedTuple):
    """Flags of a run, and what it must say and save beside what each run does."""

    flags: str
    told: tuple[str, ...] = ()
    #: Its rows: lessons 03, 04 and 05 skip no step.
    rows: tuple[str, ...] = ("STEP step=", "SKIP step=")
    #: A table, and its first column.
    table: tuple[str, list[str]] | None = None
    #: None: without --out, in the folder that is the default.
    out: str | None = "here"


STEP, SKIP = ("STEP step=",), ("SKIP step=",)

RUNS: dict[str, list[Run]] = {
    "00_start_here": [Run("--num-steps 14 --seed 1")],
    "01_clipping_amp": [
        Run("--num-steps 100 --seed 3", ("step=100 ",)),
        # It ends on the bad batch, so no later row shows what became of the factor.
        Run("--num-steps 12", (SHORT, "saved here/spike.png")),
        # Its one step overflows.
        Run("--num-steps 1", (SHORT, "saved runs/01_clipping_amp/spike.png"), rows=SKIP, out=None),
    ],
    "02_accumulation": [
        Run(
            "--num-steps 1 --accum-grid 2 --micro-batch 3 --seed 1",
            (
                SHORT + "--num-steps 12",
                SHORT + "--accum-grid with two different values",
                "3 rows x 4 micro-batches x 2 ranks = 24 rows",
            ),
            table=("throughput.csv", ["K", "2"]),
        )
    ],
    "03_checkpoint_resume": [
        # Interrupted at an epoch's end; and a step before the end of a short run.
        Run("--total-steps 16 --interrupt-at 8", (SHORT, "loss difference to the uninterrupted run: 0.0\n"), STEP),
        Run(
            "--total-steps 7 --interrupt-at 6 --seed 2",
            (SHORT, "loss difference to the uninterrupted run: 0.0\n"),
            STEP,
        ),
    ],
    "04_sharded_resume": [Run("--ranks 3 --seed 1", rows=STEP), Run("--num-steps 11 --ranks 2 --seed 2", rows=STEP)],
    "05_gradient_checkpointing": [
        Run("--layers 6 --seed 2", ("least by the rule at k = 2 and by count at k = 1",), STEP),
    ],
    "06_thermal_guard": [
        Run(
            "--pause-c 61 --resume-c 60 --num-steps 100 --seed 3",
            (SHORT + "at least 5 C", "is above pause 61 C"),
        )
    ],
    "07_low_rank_gradients": [Run("--num-steps 12 --seed 3")],
    "08_distributed_run": [
        # Three ranks: dimensions do not divide by them.
        Run(
            "--ranks 3 --num-steps 2 --seed 4",
            (
                "RESUME VERIFIED: from step 1 to 2",
                "3 of 3 shards reloaded",
                "exactly 12 P / N on each rank for N = 1\n",
            ),
        )
    ],
}

#: For each lesson, flags that it refuses, and why.
MISTAKES: dict[str, list[tuple[str, str]]] = {
    "00_start_here": [],
    "01_clipping_amp": [],
    "02_accumulation": [
        ("--accum-grid 1,0", "0 is not a whole number at least 1"),
        ("--accum-grid 2,x", "'x' is not a whole number at least 1"),
        ("--accum-grid ''", "'' is not a whole number at least 1"),
        ("--micro-batch 0", "0 is not a whole number at least 1"),
    ],
    "03_checkpoint_resume": [
        ("--total-steps 10 --interrupt-at 10", "--interrupt-at 10 must be less than --total-steps 10"),
        ("--interrupt-at 24", "--interrupt-at 24 must be less than --total-steps 24"),
        ("--interrupt-at 0", "not a whole number at least 1"),
        ("--total-steps x", "not a whole number"),
    ],
    "04_sharded_resume": [
        ("--ranks 1", "not a whole number at least 2"),
        ("--ranks 9", "at most 8"),
        ("--num-steps 10", "not a whole number at least 11"),
    ],
    "05_gradient_checkpointing": [
        ("--layers 3", "at least 4 and at most 64"),
        ("--layers 65", "at least 4 and at most 64"),
        ("--layers many", "at least 4 and at most 64"),
    ],
    "06_thermal_guard": [
        ("--resume-c 85", "--resume-c 85 must be less than --pause-c 85"),
        ("--pause-c 91", "not a whole number at least 60 and at most 90"),
        ("--pause-c nan", "not a whole number"),
        ("--num-steps 99", "at least 100"),
    ],
    "07_low_rank_gradients": [("--num-steps 11", "not a whole number at least 12")],
    "08_distributed_run": [
        ("--ranks 1", "1 is not a whole number at least 2 and at most 8"),
        ("--ranks 9", "9 is not a whole number at least 2 and at most 8"),
        ("--num-steps 1", "at least 2"),
    ],
}

#: What every lesson refuses: no steps (or a flag that it does not have), and a flag that none has.
ALWAYS = [("--num-steps 0", "--num-steps"), ("--colour red", "unrecognized arguments: --colour red")]

ALL_RUNS = [pytest.param(stem, run, id=f"{stem} {run.flags}") for stem, runs in RUNS.items() for run in runs]
ALL_MISTAKES = [
    pytest.param(stem, flags, told, id=f"{stem} {flags}")
    for stem, mistakes in MISTAKES.items()
    for flags, told in [*ALWAYS, *mistakes]
]


def start(stem: str, *flags: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONWARNINGS": "default"}
    command = [sys.executable, str(LESSONS / f"{stem}.py"), *flags]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=150)


def test_each_lesson_has_a_run(script: Path) -> None:
    assert RUNS[script.stem]
    assert script.stem in MISTAKES


@pytest.mark.parametrize(("stem", "run"), ALL_RUNS)
def test_script_runs_headless_and_saves_its_pictures(stem: str, run: Run, tmp_path: Path) -> None:
    done = start(stem, *run.flags.split(), *(["--out", run.out] if run.out else []), cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stderr == ""
    for words in (*run.rows, *run.told, "Every claim of this lesson held."):
        assert words in done.stdout or words in done.stdout.replace("\n", " ")

    out = run.out or f"runs/{stem}"
    folder = tmp_path / out
    assert list(folder.glob("*.png"))
    saved = re.findall(rf"^saved ({re.escape(out)}/.+)$", done.stdout.replace(os.sep, "/"), re.MULTILINE)
    assert {f"{out}/{path.name}" for path in folder.iterdir()} == set(saved)
    assert all(path.stat().st_size > 0 for path in folder.iterdir())
    inside = {folder, *folder.iterdir(), *folder.parents}
    assert [path for path in tmp_path.rglob("*") if path not in inside] == [], "it wrote outside --out"
    if run.table is not None:
        name, column = run.table
        assert [line.split(",")[0] for line in (folder / name).read_text().splitlines()] == column


@pytest.fixture(scope="module")
def told_to(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, dict[str, Any]]]:
    """What a lesson answers to ``--help`` and to each mistake, from one process for all of them."""

    @cache
    def answers(stem: str) -> dict[str, dict[str, Any]]:
        asked = ["--help", *(flags for flags, _ in [*ALWAYS, *MISTAKES[stem]])]
        argvs = json.dumps([shlex.split(flags) for flags in asked])
        command = [sys.executable, str(Path(__file__).with_name("run_each.py")), str(LESSONS / f"{stem}.py"), argvs]
        done = subprocess.run(
            command, cwd=tmp_path_factory.mktemp("asked"), capture_output=True, text=True, timeout=150, check=True
        )
        return dict(zip(asked, json.loads(done.stdout), strict=True))

    return answers


def test_help_names_every_flag_and_each_is_used_in_a_run(script: Path, told_to: Callable) -> None:
    done = told_to(script.stem)["--help"]
    assert done["status"] == 0
    assert done["stderr"] == ""
    assert "--help" in done["stdout"]
    used = {word for run in RUNS[script.stem] for word in run.flags.split() if word.startswith("--")}
    assert "--seed" in used
    assert set(re.findall(r"^  (--[a-z-]+) ", done["stdout"], re.MULTILINE)) == used | {"--out"}
    if script.stem == "02_accumulation":
        assert "1,2,4,8,16" in done["stdout"]
    assert done["left"] == []


def assert_refused(status: int, stderr: str, told: str, left: list[str]) -> None:
    assert status == 2
    assert stderr.count("\n") == 1
    assert "Traceback" not in stderr
    assert told in stderr
    assert left == []


@pytest.mark.parametrize(("stem", "flags", "told"), ALL_MISTAKES)
def test_a_mistake_is_one_line_and_status_2(stem: str, flags: str, told: str, told_to: Callable) -> None:
    done = told_to(stem)[flags]
    assert_refused(done["status"], done["stderr"], told, done["left"])


def test_a_process_of_its_own_refuses_as_well(script: Path, tmp_path: Path) -> None:
    flags, told = [*ALWAYS, *MISTAKES[script.stem]][-1]
    done = start(script.stem, *shlex.split(flags), cwd=tmp_path)
    assert_refused(done.returncode, done.stderr, told, [path.name for path in tmp_path.iterdir()])


def test_a_lesson_imports_support_before_torch_so_that_idle_threads_sleep(script: Path) -> None:
    lines = script.read_text(encoding="utf-8").splitlines()

    def first(name: str) -> int:
        return next((i for i, line in enumerate(lines) if re.match(rf"(from|import) {name}\b", line)), len(lines))

    assert first("support") < min(first("torch"), first("safetrain_core"))

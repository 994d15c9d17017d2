"""Crash consistency, proved: in every state a crash could leave, the previous or the new checkpoint loads whole."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from crash import survives

from safetrain_core import CheckpointError, Checkpoints, atomic_save
from safetrain_core.checkpoint import atomic
from safetrain_core.checkpoint.single import read_checkpoint


def payload(step):
    return {"schema": "ckpt.v1", "step": step, "weight": torch.full((300,), float(step))}


def loaded(path):
    """The step of a checkpoint that verifies, loads and is whole; None for anything else."""
    try:
        read = read_checkpoint(path)
    except (CheckpointError, KeyError):
        return None
    return read["step"] if torch.equal(read["weight"], payload(read["step"])["weight"]) else None


def newest(folder):
    path = Checkpoints(folder).latest()
    return None if path is None else loaded(path)


def test_first_save(tmp_path, monkeypatch, record_property):
    folder = tmp_path / "run"
    folder.mkdir()
    tried, failed = survives(
        folder,
        monkeypatch,
        lambda _: atomic_save(payload(1), folder / "step_00000001.pt"),
        lambda d: (
            newest(d) in (None, 1) and (loaded(d / "step_00000001.pt") == 1 or not (d / "step_00000001.pt").exists())
        ),
        tmp_path / "scratch",
        ended=lambda d: newest(d) == 1,
    )
    report("first save", tried, failed)


def test_overwrite(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    atomic_save(payload(1), folder / "last.pt")
    tried, failed = survives(
        folder,
        monkeypatch,
        lambda _: atomic_save(payload(2), folder / "last.pt"),
        lambda d: loaded(d / "last.pt") in (1, 2),
        tmp_path / "scratch",
        ended=lambda d: loaded(d / "last.pt") == 2,
    )
    report("overwrite", tried, failed)


def rolling(folder, count, **options):
    kept = Checkpoints(folder, **options)
    for step in range(1, count + 1):
        kept.save(payload(step), step, val_loss=1 / step)
    return kept


def test_rolling_save_with_rotation(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    kept = rolling(folder, 3, keep_last=2, keep_best=0)
    tried, failed = survives(
        folder,
        monkeypatch,
        lambda _: kept.save(payload(4), 4),
        lambda d: newest(d) in (3, 4),
        tmp_path / "scratch",
        ended=lambda d: newest(d) == 4,
    )
    report("rolling save with rotation", tried, failed)


def test_best_update(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    kept = rolling(folder, 2, keep_last=1, keep_best=1)

    def check(d):
        best = Checkpoints(d, keep_last=1).best()
        return best is not None and loaded(best) in (2, 3) and newest(d) in (2, 3)

    tried, failed = survives(
        folder, monkeypatch, lambda _: kept.save(payload(3), 3, val_loss=0.01), check, tmp_path / "scratch"
    )
    report("best update", tried, failed)


def report(what, tried, failed):
    print(f"{what}: {tried} states tried, {tried - failed} survived")
    assert tried >= 30
    assert failed == 0


def test_a_save_that_makes_its_folder_makes_it_durably(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    tried, failed = survives(
        tmp_path / "runs",
        monkeypatch,
        lambda _: atomic_save(payload(1), tmp_path / "runs" / "a" / "b" / "last.pt"),
        lambda d: loaded(d / "a" / "b" / "last.pt") == 1 or not (d / "a" / "b" / "last.pt").exists(),
        tmp_path / "scratch",
        ended=lambda d: loaded(d / "a" / "b" / "last.pt") == 1,
    )
    report("first save into a new folder", tried, failed)


def test_the_same_test_fails_on_a_naive_save(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    atomic_save(payload(1), folder / "last.pt")

    def naive(recorder):
        with recorder.open(folder / "last.pt", "wb") as file:
            torch.save(payload(2), file)

    tried, failed = survives(
        folder, monkeypatch, naive, lambda d: loaded(d / "last.pt") in (1, 2), tmp_path / "scratch"
    )
    assert failed > tried // 2


def test_the_same_test_fails_on_a_rename_without_fsync(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    atomic_save(payload(1), folder / "last.pt")

    def unsynced(_):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda handle: None)
            atomic_save(payload(2), folder / "last.pt")

    _, failed = survives(folder, monkeypatch, unsynced, lambda d: loaded(d / "last.pt") in (1, 2), tmp_path / "scratch")
    assert failed > 0


def test_the_same_test_fails_where_the_old_file_goes_before_the_new_one_is_certain(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    kept = rolling(folder, 1, keep_last=1, keep_best=0)
    monkeypatch.setattr(atomic, "sync_folder", lambda folder: None)
    _, failed = survives(
        folder, monkeypatch, lambda _: kept.save(payload(2), 2), lambda d: newest(d) in (1, 2), tmp_path / "scratch"
    )
    assert failed > 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork, to kill a saver without importing torch each time")
def test_kills_at_random_moments_never_lose_the_previous_checkpoint(tmp_path):
    kills = int(os.environ.get("SAFETRAIN_KILLS", "20"))
    script = Path(__file__).with_name("kill_saver.py")
    done = subprocess.run(
        [sys.executable, script, str(tmp_path), str(kills)],
        capture_output=True,
        text=True,
        timeout=60 + 2 * kills,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # OpenMP's threads do not survive a fork
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    killed, whole, last = map(int, re.search(r"(\d+) kills, (\d+) times .* step (\d+)", done.stdout).groups())
    assert killed == whole == kills
    assert last > kills, "the children were killed before they could save"

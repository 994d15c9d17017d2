"""Crash consistency of verified DCP: in every state a crash could leave, the old or the new checkpoint loads whole."""

import os

import pytest
import torch
from crash import survives

from safetrain_core import CheckpointError, load_dcp, save_dcp
from safetrain_core.checkpoint import dcp
from safetrain_core.checkpoint.dcp_files import SummedFile
from safetrain_core.checkpoint.folders import TEMPORARY
from safetrain_core.checkpoint.summed import sum_of


def state(step):
    return {"model": {"w": torch.full((50,), float(step))}, "moments": {"w": torch.full((50,), step / 2)}, "lr": step}


def loaded(folder):
    """The step of a checkpoint that loads and is whole, None where there is no manifest, "broken" for anything else."""
    if not (folder / "manifest.json").exists():
        return None
    made = state(0)
    try:
        manifest, made, own = load_dcp(folder, made)
    except CheckpointError:
        return "broken"
    step = manifest.step
    whole = torch.equal(made["model"]["w"], state(step)["model"]["w"]) and made["lr"] == step and own == {"rank": step}
    return step if whole else "broken"


def save(folder, step):
    return lambda _: save_dcp(state(step), folder, step=step, own={"rank": step})


def unread(path):
    return TEMPORARY.fullmatch(path.rsplit("/", 1)[-1]) is not None or path.endswith(".metadata.tmp")


def test_a_save_into_a_new_folder_leaves_the_new_checkpoint_or_none(tmp_path, monkeypatch):
    parent = tmp_path / "run"
    parent.mkdir()
    tried, failed = survives(
        parent,
        monkeypatch,
        save(parent / "step_10", 10),
        lambda d: loaded(d / "step_10") in (None, 10),
        tmp_path / "scratch",
        unread,
        lambda d: loaded(d / "step_10") == 10,
    )
    print(f"verified DCP, new folder: {tried} states tried, {tried - failed} survived")
    assert tried >= 20
    assert failed == 0


def overwritten(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    save(folder, 10)(None)
    return survives(
        folder,
        monkeypatch,
        save(folder, 11),
        lambda d: loaded(d) in (10, 11),
        tmp_path / "scratch",
        unread,
        lambda d: loaded(d) == 11,
    )


def test_a_save_into_an_existing_folder_leaves_the_old_or_the_new_checkpoint(tmp_path, monkeypatch):
    tried, failed = overwritten(tmp_path, monkeypatch)
    print(f"verified DCP, existing folder: {tried} states tried, {tried - failed} survived")
    assert tried >= 20
    assert failed == 0


@pytest.mark.skipif(torch.__version__ >= (2, 14), reason="torch flushes the index before it syncs it from 2.14 on")
def test_the_same_test_fails_where_dcp_is_trusted_to_sync_its_own_files(tmp_path, monkeypatch):
    """torch up to 2.13 syncs the index before its buffer is flushed."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    def unsynced(part):
        made = []
        for name in sorted(os.listdir(part)):
            with open(part / name, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                made.append(SummedFile(name, sum_of(file, size), size))
        return made

    monkeypatch.setattr(dcp, "_sync_and_sum", unsynced)
    monkeypatch.setattr(dcp, "_writer", lambda part: FileSystemWriter(part, single_file_per_rank=True, sync_files=True))
    _, failed = overwritten(tmp_path, monkeypatch)
    assert failed > 0


def test_the_same_test_fails_where_the_old_files_go_before_the_manifest_has_switched(tmp_path, monkeypatch):
    real = dcp.publish

    def swept_first(told, folder):
        dcp.sweep(folder, keep={told["part"], *(entry["path"] for entry in told["ranks"])})
        real(told, folder)

    monkeypatch.setattr(dcp, "publish", swept_first)
    _, failed = overwritten(tmp_path, monkeypatch)
    assert failed > 0

"""Crash consistency of sharded checkpoints: in every state a crash could leave, the old or the new one loads whole."""

import contextlib
import json
import os
import threading
from pathlib import Path

import pytest
from crash import Tree, snapshot, states, survives
from shards import same
from shards import states as states_of

from safetrain_core import CheckpointError, load_sharded, reshard, rotate_checkpoints, save_sharded
from safetrain_core.checkpoint import atomic, folders, manifest, sharded
from safetrain_core.checkpoint.folders import TEMPORARY, all_checkpoints, remove_checkpoint
from safetrain_core.checkpoint.sharded_read import read_manifest


def given(step, ranks):
    return [{**state, "step": step} for state in states_of(ranks, 40)]


def loaded(folder):
    """The step of a checkpoint that loads and is whole, None where there is none, "broken" for anything else.

    None may be told only by the manifest not being there: what has a manifest has to load.
    """
    if not (folder / "manifest.json").exists():
        return None
    try:
        told = read_manifest(folder)
        _, found = load_sharded(folder, told.world_size)
    except CheckpointError:
        return "broken"
    return told.step if same(found, given(told.step, told.world_size)) else "broken"


def newest(parent):
    """The step of the newest checkpoint folder, if every folder that passes for a checkpoint loads."""
    steps = [loaded(folder) for folder in all_checkpoints(parent)]
    return "broken" if "broken" in steps else (steps or [None])[-1]


def unread(path):
    return TEMPORARY.fullmatch(Path(path).name) is not None


def report(what, tried, failed, least):
    print(f"{what}: {tried} states tried, {tried - failed} survived")
    assert tried >= least
    assert failed == 0


def tried(what, folder, monkeypatch, save, check, ended, tmp_path, least=8):
    report(what, *survives(folder, monkeypatch, lambda _: save(), check, tmp_path / "scratch", unread, ended), least)


@pytest.fixture
def parent(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


# --- ours ---------------------------------------------------------------------------------------------------------


def test_a_save_into_a_new_folder_leaves_the_new_checkpoint_or_none(parent, tmp_path, monkeypatch):
    dest = parent / "step_10"
    tried(
        "new folder, 4 ranks",
        parent,
        monkeypatch,
        lambda: save_sharded(given(10, 4), dest, step=10),
        lambda d: loaded(d / "step_10") in (None, 10) and newest(d) in (None, 10),
        lambda d: newest(d) == 10,
        tmp_path,
    )


def test_a_save_into_a_folder_of_a_cut_save_leaves_the_new_checkpoint_or_none(parent, tmp_path, monkeypatch):
    (parent / "rank0.bin").write_bytes(b"half")
    (parent / ".rank1.bin.0123456789ab.tmp").write_bytes(b"ha")
    tried(
        "folder of a cut save, 3 ranks",
        parent,
        monkeypatch,
        lambda: save_sharded(given(10, 3), parent, step=10),
        lambda d: loaded(d) in (None, 10),
        lambda d: loaded(d) == 10,
        tmp_path,
    )


@pytest.mark.parametrize(("before", "after"), [(2, 2), (3, 2), (1, 4)])
def test_a_save_into_an_existing_folder_leaves_the_old_or_the_new_checkpoint(
    parent, tmp_path, monkeypatch, before, after
):
    save_sharded(given(10, before), parent, step=10)
    tried(
        f"existing folder, {before} ranks, then {after}",
        parent,
        monkeypatch,
        lambda: save_sharded(given(11, after), parent, step=11),
        lambda d: loaded(d) in (10, 11),
        lambda d: loaded(d) == 11,
        tmp_path,
    )


def test_the_order_in_which_threads_write_does_not_matter(parent, tmp_path, monkeypatch):
    """One rank after the other, and the last first: two orders that threads may have."""
    for number, order in enumerate((lambda n: range(n), lambda n: reversed(range(n)))):
        folder = parent / str(number)
        save_sharded(given(10, 3), folder, step=10)

        def in_order(work, count, order=order):
            made = {rank: work(rank) for rank in order(count)}
            return [made[rank] for rank in range(count)]

        with monkeypatch.context() as patch:
            patch.setattr(sharded, "beside_one_another", in_order)
            tried(
                "existing folder, one thread",
                folder,
                patch,
                lambda folder=folder: save_sharded(given(11, 3), folder, step=11),
                lambda d: loaded(d) in (10, 11),
                lambda d: loaded(d) == 11,
                tmp_path,
            )


def test_all_threads_at_once_are_no_other_case(parent, tmp_path, monkeypatch):
    """The order that leaves most open: all files made and renamed before one of the threads syncs the folder."""
    save_sharded(given(10, 3), parent, step=10)
    together, real = threading.Barrier(3, timeout=30), atomic.sync_folder

    def sync_together(folder):
        if threading.current_thread() is not threading.main_thread():
            together.wait()
        real(folder)

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "sync_folder", sync_together)
        tried(
            "existing folder, threads in step",
            parent,
            patch,
            lambda: save_sharded(given(11, 3), parent, step=11),
            lambda d: loaded(d) in (10, 11),
            lambda d: loaded(d) == 11,
            tmp_path,
            least=30,
        )


@pytest.mark.parametrize(("cut", "made_before"), [(["step_9"], False), ([], False), ([], True)])
def test_a_save_and_a_rotation_leave_a_checkpoint_and_none_that_is_broken(
    parent, tmp_path, monkeypatch, cut, made_before
):
    save_sharded(given(10, 2), parent / "step_10", step=10)
    for name in cut:
        (parent / name).mkdir()
        (parent / name / "rank0.bin").write_bytes(b"of a save that was cut")

    def save():
        if made_before:
            (parent / "step_11").mkdir()
        save_sharded(given(11, 2), parent / "step_11", step=11)
        assert rotate_checkpoints(parent, keep_last=1) == [*cut, "step_10"]

    tried(
        "save and rotation",
        parent,
        monkeypatch,
        save,
        lambda d: newest(d) in (10, 11),
        lambda d: newest(d) == 11,
        tmp_path,
    )


def test_a_reshard_leaves_its_source_and_the_new_checkpoint_or_none(parent, tmp_path, monkeypatch):
    kept = [{key: value for key, value in state.items() if key != "rng"} for state in given(10, 4)]
    save_sharded(kept, parent / "four", step=10)
    tried(
        "reshard 4 to 2",
        parent,
        monkeypatch,
        lambda: reshard(parent / "four", parent / "two", 2),
        lambda d: same(load_sharded(d / "four", 4)[1], kept) and complete(d / "two") in (None, 10),
        lambda d: complete(d / "two") == 10,
        tmp_path,
    )


def complete(folder):
    with contextlib.suppress(CheckpointError):
        return load_sharded(folder, 2)[0].step
    return "broken" if (folder / "manifest.json").exists() else None


def test_a_removal_leaves_the_checkpoint_whole_or_none(parent, tmp_path, monkeypatch):
    save_sharded(given(10, 3), parent / "step_10", step=10)
    (parent / "step_10" / "dcp.0123456789ab").mkdir()
    (parent / "step_10" / "dcp.0123456789ab" / "__0_0.distcp").write_bytes(b"a part")
    tried(
        "removal",
        parent,
        monkeypatch,
        lambda: remove_checkpoint(parent / "step_10"),
        lambda d: newest(d) in (None, 10),
        lambda d: newest(d) is None,
        tmp_path,
    )


# --- what the same test finds in other saves ------------------------------------------------------------------------


def fails(folder, monkeypatch, save, tmp_path, wanted=(10, 11)):
    tried, failed = survives(
        folder, monkeypatch, save, lambda d: loaded(d) in wanted, tmp_path / "scratch", unread, lambda d: True
    )
    print(f"{tried} states tried, {failed} failed")
    return failed


def test_it_fails_on_files_overwritten_in_place(parent, tmp_path, monkeypatch):
    save_sharded(given(10, 2), parent, step=10)
    save_sharded(given(11, 2), tmp_path / "new", step=11)

    def in_place(recorder):
        for rank, path in enumerate(s.path for s in read_manifest(parent).shards):
            with recorder.open(parent / path, "wb") as file:
                file.write((tmp_path / "new" / f"rank{rank}.bin").read_bytes())
                file.flush()
                os.fsync(file.fileno())
        with recorder.open(parent / "manifest.json", "wb") as file:
            file.write((tmp_path / "new" / "manifest.json").read_bytes())

    assert fails(parent, monkeypatch, in_place, tmp_path) > 5


def test_it_fails_on_shards_renamed_over_those_of_the_old_manifest(parent, tmp_path, monkeypatch):
    """Each file is atomic, the two together are not: a power failure after the first of two renames."""
    save_sharded(given(10, 2), parent, step=10)

    def same_names(recorder):
        with monkeypatch.context() as patch:
            patch.setattr(sharded, "_fresh_names", lambda folder, n: [f"rank{r}.bin" for r in range(n)])
            save_sharded(given(11, 2), parent, step=11)

    assert fails(parent, monkeypatch, same_names, tmp_path) > 0


def test_it_fails_where_the_manifest_comes_before_the_shards_are_certain(parent, tmp_path, monkeypatch):
    save_sharded(given(10, 2), parent, step=10)

    def unsynced(recorder):
        with monkeypatch.context() as patch:
            patch.setattr(atomic, "sync_folder", lambda folder: None)
            save_sharded(given(11, 2), parent, step=11)

    assert fails(parent, monkeypatch, unsynced, tmp_path) > 0


def test_it_fails_where_the_old_shards_go_before_the_new_manifest_is_there(parent, tmp_path, monkeypatch):
    save_sharded(given(10, 2), parent, step=10)

    def swept_first(recorder):
        real = manifest.publish

        def publish(told, folder):
            folders.sweep(folder, keep={shard["path"] for shard in told["shards"]})
            real(told, folder)

        with monkeypatch.context() as patch:
            patch.setattr(sharded, "publish", publish)
            save_sharded(given(11, 2), parent, step=11)

    assert fails(parent, monkeypatch, swept_first, tmp_path) > 0


# --- the layer itself -----------------------------------------------------------------------------------------------


def test_the_layer_follows_folders_and_what_pathlib_opens(parent, monkeypatch):
    """A folder that is not certain takes what is in it along; what Python still buffers is not certain at an fsync."""
    from crash import Recorder

    with monkeypatch.context() as patch:
        recorder = Recorder(parent, patch)
        (parent / "dcp").mkdir()
        with (parent / "dcp" / "a").open("wb") as file:
            file.write(b"data")
            os.fsync(file.fileno())  # without a flush
        (parent / "dcp" / "a").rename(parent / "dcp" / "b")
        atomic.sync_folder(parent / "dcp")
        atomic.sync_folder(parent)
    assert recorder.ops == [
        ("mkdir", "dcp"),
        ("create", "dcp/a"),
        ("write", "dcp/a", b"data"),
        ("fsync", "dcp/a", 0),
        ("rename", "dcp/a", "dcp/b"),
        ("fsync folder", "dcp"),
        ("fsync folder", ""),
    ]
    assert snapshot(parent) == {"dcp": None, "dcp/b": b"data"}
    seen = list(states({}, recorder.ops))
    assert {} in seen
    assert {"dcp": None, "dcp/a": b"da"} in seen
    at_the_end = Tree({})
    for op in recorder.ops:
        at_the_end.replay(op)
    assert list(at_the_end.crashed(lambda path: False)) == [
        {"dcp": None, "dcp/b": data} for data in (b"data", b"", b"da")
    ]


def test_the_layer_follows_a_tree_that_is_removed_and_one_that_is_renamed(parent, monkeypatch):
    import shutil

    from crash import Recorder

    (parent / "old" / "deep").mkdir(parents=True)
    (parent / "old" / "deep" / "a").write_bytes(b"1")
    (parent / "aside").mkdir()
    (parent / "aside" / "b").write_bytes(b"2")
    before = snapshot(parent)
    with monkeypatch.context() as patch:
        recorder = Recorder(parent, patch)
        shutil.rmtree(parent / "old")
        os.rename(parent / "aside", parent / "new")
        atomic.sync_folder(parent)
    assert json.dumps(recorder.ops) == json.dumps(
        [
            ("remove", "old/deep/a"),
            ("remove", "old/deep"),
            ("remove", "old"),
            ("rename", "aside", "new"),
            ("fsync folder", ""),
        ]
    )
    seen = list(states(before, recorder.ops))
    assert {**before} in seen
    assert {"new": None, "new/b": b"2"} in seen
    assert {"old": None, "aside": None, "aside/b": b"2"} in seen
    assert all(("aside" in state) != ("new" in state) for state in seen)

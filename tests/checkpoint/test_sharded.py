"""Sharded checkpoints: byte-equal reloads, the load failures, overwriting, failed saves, several ranks, rotation."""

import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import rank_workers
import torch
from rank_workers import shard_of
from shards import edit, names, rewrite, same, states

from safetrain_core import CheckpointError, launch, load_sharded, reshard, rotate_checkpoints, save_sharded
from safetrain_core.checkpoint import atomic, manifest, sharded, summed
from safetrain_core.checkpoint.checks import LARGEST_NUMBER
from safetrain_core.checkpoint.folders import all_checkpoints
from safetrain_core.checkpoint.sharded import save_shard
from safetrain_core.checkpoint.sharded_read import load_shard, read_manifest


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of 4 ranks."""
    save_sharded(states(4), tmp_path / "step_00000010", step=10)
    return tmp_path / "step_00000010"


# --- save and load ------------------------------------------------------------------------------------------------


def test_what_is_loaded_equals_what_was_saved_to_the_bit_and_the_manifest_describes_the_files(saved):
    manifest, loaded = load_sharded(saved, 4)
    assert same(loaded, states(4))
    assert names(saved) == ["manifest.json", "rank0.bin", "rank1.bin", "rank2.bin", "rank3.bin"]
    assert (manifest.schema, manifest.world_size, manifest.step) == ("ckpt.shards.v1", 4, 10)
    for rank, shard in enumerate(manifest.shards):
        data = (saved / shard.path).read_bytes()
        assert shard.rank == rank
        assert (shard.sha256, shard.size_bytes) == (hashlib.sha256(data).hexdigest(), len(data))
        assert (shard.param_shard_offset, shard.param_shard_numel) == (5 * rank, 5)
        assert same(load_shard(saved, rank, 4)[1], shard_of(rank))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool])
def test_special_values_of_every_kind_of_number_keep_their_bits(tmp_path, dtype):
    bits = torch.randint(0, 256, (64,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    flat = bits % 2 == 1 if dtype is torch.bool else bits.view(dtype)  # NaN with payloads, -0.0, subnormal numbers
    save_sharded([{"param_shard": flat}], tmp_path / "a", step=0)
    again = load_sharded(tmp_path / "a", 1)[1][0]["param_shard"]
    assert again.dtype is dtype
    assert torch.equal(again.view(torch.uint8), flat.view(torch.uint8))


def test_states_of_a_dict_and_without_a_flat_parameter_and_uneven_or_empty_pieces_are_saved(tmp_path):
    given = {1: {"param_shard": torch.ones(0)}, 0: {"param_shard": torch.ones(3)}, 2: {"note": "no shard here"}}
    manifest = save_sharded(given, tmp_path, step=1)
    assert [(s.param_shard_offset, s.param_shard_numel) for s in manifest.shards] == [(0, 3), (3, 0), (3, 0)]
    assert same(load_sharded(tmp_path, 3)[1], [given[0], given[1], given[2]])


def test_a_piece_of_a_flat_tensor_is_saved_without_the_rest_of_it(tmp_path):
    flat = torch.arange(400_000.0)
    moments = flat.to(torch.bfloat16)
    pieces = [{"param_shard": a, "m": [b]} for a, b in zip(flat.chunk(4), moments.chunk(4), strict=True)]
    manifest = save_sharded(pieces, tmp_path, step=1)
    assert all(s.size_bytes < 610_000 for s in manifest.shards), "each holds 400,000 + 200,000 bytes"
    assert same(load_sharded(tmp_path, 4)[1], pieces)


def test_tensors_that_share_memory_share_it_after_the_load(tmp_path):
    whole = torch.arange(6.0)
    save_sharded([{"param_shard": whole, "tied": whole, "strided": torch.ones(4, 4).t()[1:]}], tmp_path, step=1)
    (again,) = load_sharded(tmp_path, 1)[1]
    assert again["param_shard"].data_ptr() == again["tied"].data_ptr()
    assert again["strided"].shape == (3, 4)


@pytest.mark.parametrize(
    ("given", "step", "told"),
    [
        ([], 1, "per_rank_state is empty"),
        ({0: {}, 2: {}}, 1, r"ranks \[0, 2\], expected 0 to 1"),
        ({"0": {}}, 1, "expected 0 to 0"),
        ([{}, 3], 1, "the state of rank 1 is an int, expected a dict"),
        ([{}], -1, "step=-1 must be an integer"),
        ([{}], 2.0, "step=2.0 must be an integer"),
        ([{}], True, "step=True must be an integer"),
        ([{}], LARGEST_NUMBER + 1, "step=4611686018427387905 must be an integer"),
        ([{}, {"param_shard": torch.ones(2, 2)}], 1, "param_shard of rank 1 must be a 1-D tensor"),
        ([{}, {"param_shard": [1.0]}], 1, "param_shard of rank 1 must be a 1-D tensor"),
        ([{}, {"hook": print}], 1, r"state of rank 1\['hook'\] is a builtin_function"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path, given, step, told):
    with pytest.raises(ValueError, match=told):
        save_sharded(given, tmp_path / "new", step)
    assert names(tmp_path) == []


# --- the six load failures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(2, 1), (1, 2), (2, 3)])
def test_another_world_size_is_refused_by_name_and_a_reshard_loads(tmp_path, saved_on, loaded_on):
    save_sharded([{"param_shard": torch.ones(6)} for _ in range(saved_on)], tmp_path / "a", step=1)
    told = f"world_size mismatch: .* was saved on {saved_on} ranks, {loaded_on} are to load it"
    for load in (lambda: load_sharded(tmp_path / "a", loaded_on), lambda: load_shard(tmp_path / "a", 0, loaded_on)):
        with pytest.raises(CheckpointError, match=told):
            load()
    reshard(tmp_path / "a", tmp_path / "b", loaded_on)
    assert load_sharded(tmp_path / "b", loaded_on)[0].world_size == loaded_on


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_flipped_byte_of_a_shard_is_a_mismatch_on_its_rank(tmp_path):
    save_sharded([{"param_shard": torch.ones(1)} for _ in range(2)], tmp_path, step=1)
    path = tmp_path / "rank1.bin"
    whole = bytearray(path.read_bytes())
    for i in range(0, len(whole), 9):
        whole[i] ^= 0x10
        path.write_bytes(whole)
        with pytest.raises(CheckpointError, match="sha256 mismatch on rank 1"):
            load_sharded(tmp_path, 2)
        whole[i] ^= 0x10
    path.write_bytes(whole)
    load_sharded(tmp_path, 2)


def test_a_shard_that_is_shorter_or_longer_is_a_mismatch_on_its_rank(saved):
    whole = (saved / "rank2.bin").read_bytes()
    for data in (b"", whole[:-1], whole[: len(whole) // 2], whole + b"\0"):
        (saved / "rank2.bin").write_bytes(data)
        with pytest.raises(CheckpointError, match=f"sha256 mismatch on rank 2: .* has {len(data)} bytes of"):
            load_sharded(saved, 4)


def test_shards_of_two_ranks_swapped_are_mismatches(saved):
    os.rename(saved / "rank0.bin", saved / "x")
    os.rename(saved / "rank1.bin", saved / "rank0.bin")
    os.rename(saved / "x", saved / "rank1.bin")
    with pytest.raises(CheckpointError, match="sha256 mismatch on rank 0"):
        load_sharded(saved, 4)


def test_a_missing_shard_is_told_and_not_one_of_the_others_is_read(saved, monkeypatch):
    os.unlink(saved / "rank3.bin")
    opened = []
    monkeypatch.setattr(torch, "load", lambda *args, **options: opened.append(args))
    with pytest.raises(CheckpointError, match=r"shard file missing: .*rank3\.bin of rank 3"):
        load_sharded(saved, 4)
    assert opened == []


def test_a_folder_without_a_manifest_is_no_checkpoint_however_many_shards_it_has(saved):
    os.unlink(saved / "manifest.json")
    with pytest.raises(CheckpointError, match=r"has no manifest.json: no checkpoint, or one that was never finished"):
        load_sharded(saved, 4)


@pytest.mark.parametrize("schema", ["ckpt.shards.v0", "ckpt.v1", "ckpt.dcp.v1", "pickle", "", None, 1, ["ckpt"]])
def test_an_unknown_schema_is_refused(saved, schema):
    edit(saved, lambda told: told.update(schema=schema))
    with pytest.raises(CheckpointError, match="unknown schema"):
        load_sharded(saved, 4)


@pytest.mark.parametrize(
    ("payload", "told"),
    [
        ({"schema": "ckpt.shards.v9"}, "unknown schema 'ckpt.shards.v9' in .* of rank 1"),
        ([1, 2], "unknown schema None"),
        (torch.ones(3), "unknown schema None"),
        ({"schema": torch.ones(2)}, "unknown schema"),
        ({"rank": 0}, "is the shard of rank 0 at step 10, expected rank 1 at step 10"),
        ({"rank": torch.ones(2)}, "expected rank 1 at step 10"),
        ({"rank": True}, "expected rank 1 at step 10"),
        ({"step": 9}, "of rank 1 at step 9, expected rank 1 at step 10"),
        ({"step": torch.ones(2)}, "expected rank 1 at step 10"),
        ({"state": torch.ones(2)}, "expected rank 1 at step 10"),
        ({"state": {"param_shard": torch.ones(4)}}, "param_shard has 4 elements, the manifest says 5"),
        ({"state": {"param_shard": [1.0] * 5}}, "param_shard is .*expected a 1-D tensor"),
        ({"state": {"param_shard": torch.ones(5, 1)}}, "param_shard is .*expected a 1-D tensor"),
        ({"state": {}}, "param_shard has 0 elements, the manifest says 5"),
    ],
)
def test_a_whole_shard_with_the_right_sum_that_holds_something_else_is_refused(saved, payload, told):
    if isinstance(payload, dict):
        payload = {"schema": "ckpt.shards.v1", "rank": 1, "step": 10, "state": shard_of(1), **payload}
    rewrite(saved, 1, payload)
    with pytest.raises(CheckpointError, match=told):
        load_sharded(saved, 4)


class Bomb:
    def __reduce__(self):
        return (open, ("bomb went off", "w"))


def test_nothing_in_a_shard_is_executed(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rewrite(saved, 0, Bomb())
    with pytest.raises(CheckpointError, match="refused, nothing was executed"):
        load_sharded(saved, 4)
    assert not Path("bomb went off").exists()


def test_a_key_twice_and_a_rank_twice_or_missing_are_errors_and_not_the_last_one_wins(saved):
    text = (saved / "manifest.json").read_text()
    (saved / "manifest.json").write_text(text.replace('"step": 10', '"step": 10, "step": 11'))
    with pytest.raises(CheckpointError, match="a key is there twice"):
        load_sharded(saved, 4)
    (saved / "manifest.json").write_text(text)
    edit(saved, lambda told: told["shards"].insert(1, told["shards"].pop(0)))
    with pytest.raises(CheckpointError, match="rank 0 is missing or rank 1 is there twice"):
        load_sharded(saved, 4)
    (saved / "manifest.json").write_text(text)
    edit(saved, lambda told: told["shards"].pop())
    with pytest.raises(CheckpointError, match="names 3 shards for world_size=4"):
        load_sharded(saved, 4)


@pytest.mark.parametrize(
    "path", ["../x", "/etc/passwd", "a/rank0.bin", "rank0.bin/", "..", "", "rank1.bin", "rank٠.bin"]
)
def test_a_path_that_is_no_bare_name_of_its_rank_is_refused_unopened(saved, path):
    edit(saved, lambda told: told["shards"][0].update(path=path))
    with pytest.raises(CheckpointError, match="is not a file name of this kind"):
        load_sharded(saved, 4)


@pytest.mark.parametrize("name", ["rank0.bin", "manifest.json"])
def test_a_link_a_folder_or_a_pipe_in_the_place_of_a_file_is_refused_unopened(saved, tmp_path, name):
    kept = tmp_path / "elsewhere"
    os.rename(saved / name, kept)
    for put in (lambda p: os.symlink(kept, p), os.mkdir, os.mkfifo):
        put(saved / name)
        with pytest.raises(CheckpointError, match="is no regular file"):
            load_sharded(saved, 4)
        (os.rmdir if (saved / name).is_dir() else os.unlink)(saved / name)
    shutil.copy(kept, saved / name)
    load_sharded(saved, 4)


def test_a_rank_that_is_not_there_is_the_callers_mistake(saved):
    for rank in (-1, 4):
        with pytest.raises(ValueError, match=f"rank={rank} must be from 0 to 3"):
            load_shard(saved, rank, 4)


# --- overwriting, and saves that fail -------------------------------------------------------------------------------


def test_a_save_of_4_then_of_2_into_one_folder_leaves_2_whole_and_nothing_of_the_4(saved):
    for name in (".rank0.bin.0123456789ab.tmp", "rank9.0123456789ab.bin", "rank7.bin"):  # of a save that was cut
        (saved / name).write_bytes(b"left over")
    (saved / "notes.txt").write_text("not ours")
    save_sharded(states(2, 3), saved, step=11)
    assert same(load_sharded(saved, 2)[1], states(2, 3))
    told = names(saved)
    assert len(told) == 4
    assert told[:2] == ["manifest.json", "notes.txt"]
    assert [re.sub(r"\.[0-9a-f]{12}\.", ".<nonce>.", name) for name in told[2:]] == [
        "rank0.<nonce>.bin",
        "rank1.<nonce>.bin",
    ]
    with pytest.raises(CheckpointError, match="world_size mismatch"):
        load_sharded(saved, 4)


def no_space(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("existing", [True, False])
@pytest.mark.parametrize(
    ("breaks", "error"),
    [
        ((os, "fsync", no_space), OSError),
        ((os, "replace", no_space), OSError),
        ((summed.FollowingSum, "write", no_space), OSError),
        ((sharded, "publish", no_space), OSError),
        ((manifest, "atomic_write_bytes", no_space), OSError),
        ((atomic, "sync_folder", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)), KeyboardInterrupt),
    ],
)
def test_a_save_that_fails_leaves_the_old_checkpoint_whole_and_nothing_of_its_own(
    tmp_path, monkeypatch, existing, breaks, error
):
    if existing:
        save_sharded(states(4), tmp_path, step=10)
    before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
    with monkeypatch.context() as patch:
        patch.setattr(*breaks)
        with pytest.raises(error):
            save_sharded(states(3, 100), tmp_path, step=11)
    assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path)} == before
    if existing:
        assert same(load_sharded(tmp_path, 4)[1], states(4))
    save_sharded(states(3, 100), tmp_path, step=11)
    assert same(load_sharded(tmp_path, 3)[1], states(3, 100))


def test_a_file_that_may_not_grow_so_large_fails_the_save_and_the_old_checkpoint_loads(saved):
    code = f"""
import resource, signal, torch
from safetrain_core import save_sharded
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    save_sharded([{{"param_shard": torch.zeros(size)}} for size in (10, 100_000)], {str(saved)!r}, step=11)
except OSError as error:
    print(error.strerror)
"""
    before = names(saved)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=True)
    assert done.stdout == "File too large\n"
    assert names(saved) == before
    assert same(load_sharded(saved, 4)[1], states(4))


# --- several ranks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 4])
def test_each_rank_writes_its_own_shard_and_all_are_told_the_same_manifest(tmp_path, count):
    for step in (10, 11):  # a new folder, then the same one again
        got = launch(rank_workers.saves_its_shard, count, str(tmp_path), step, timeout_s=60)
        manifest = read_manifest(tmp_path, count)
        assert got == [(manifest, True)] * count
        assert manifest.step == step
        assert same(load_sharded(tmp_path, count)[1], [shard_of(r, 3 + r) for r in range(count)])
        assert len(names(tmp_path)) == count + 1


@pytest.mark.parametrize(
    ("trouble", "told"),
    [
        ("no such folder", "rank 2 could not write its shard into .*NotADirectoryError"),
        ("a function in the state", "rank 2 could not write its shard into .*ValueError: state of rank 2"),
        ("a list that holds itself", "rank 2 could not write its shard into .*or holds itself"),
        ("another step", "rank 2 saves step 12.*rank 0 step 11"),
    ],
)
def test_a_rank_that_cannot_write_fails_the_save_on_every_rank_and_the_old_checkpoint_loads(tmp_path, trouble, told):
    folder = tmp_path / "step_1"
    save_sharded(states(3), folder, step=10)
    (folder / "a file").touch()
    before = names(folder)
    got = launch(rank_workers.saves_its_shard, 3, str(folder), 11, trouble, timeout_s=60)
    assert all(re.search(told, str(text)) for text in got), got
    assert names(folder) == before
    assert same(load_sharded(folder, 3)[1], states(3))


def test_a_rank_that_the_process_group_does_not_know_is_refused(tmp_path):
    with pytest.raises(ValueError, match="rank=1 of world_size=2, but this process is rank 0 of 1"):
        save_shard({}, tmp_path, rank=1, world_size=2, step=1)
    got = launch(rank_workers.claims_another_rank, 2, str(tmp_path), timeout_s=60)
    assert [re.search(r"this process is rank \d of 2", text)[0] for text in got] == [
        f"this process is rank {r} of 2" for r in range(2)
    ]
    assert names(tmp_path) == []


# --- reshard --------------------------------------------------------------------------------------------------------


def adam(pieces):
    """States whose flat entries are cut as ``pieces`` are."""
    return [
        {
            "param_shard": p.clone(),
            "optimizer": {"exp_avg": p / 2, "exp_avg_sq": p**2, "step": torch.tensor(7.0)},
            "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}],
            "nothing": float("nan"),
        }
        for p in pieces
    ]


@pytest.mark.parametrize("length", [12, 13, 3, 1])
def test_4_ranks_to_2_and_back_to_4_gives_the_same_bits(tmp_path, length):
    flat = torch.randn(length, generator=torch.Generator().manual_seed(0))
    four = adam(torch.tensor_split(flat, 4))
    save_sharded(four, tmp_path / "four", step=10)
    two = reshard(tmp_path / "four", tmp_path / "two", 2)
    assert [s.param_shard_numel for s in two.shards] == [length - length // 2, length // 2]
    assert two.step == 10
    assert same(load_sharded(tmp_path / "two", 2)[1], adam(torch.tensor_split(flat, 2)))
    reshard(tmp_path / "two", tmp_path / "back", 4)
    assert same(load_sharded(tmp_path / "back", 4)[1], four)


def test_uneven_pieces_are_joined_in_order_of_rank_and_the_source_is_left_as_it_is(tmp_path):
    flat = torch.arange(11.0)
    save_sharded(adam(flat.split([1, 7, 0, 3])), tmp_path / "a", step=3)
    before = {name: (tmp_path / "a" / name).read_bytes() for name in names(tmp_path / "a")}
    reshard(tmp_path / "a", tmp_path / "b", 3)
    _, again = load_sharded(tmp_path / "b", 3)
    assert [s["param_shard"].tolist() for s in again] == [x.tolist() for x in flat.split([4, 4, 3])]
    assert torch.equal(torch.cat([s["optimizer"]["exp_avg_sq"] for s in again]), flat**2)
    assert {name: (tmp_path / "a" / name).read_bytes() for name in names(tmp_path / "a")} == before


def test_pieces_of_one_element_beside_a_scalar_of_one_element_are_not_taken_for_each_other(tmp_path):
    save_sharded([{"param_shard": torch.ones(1), "count": torch.tensor(5.0)} for _ in range(2)], tmp_path / "a", step=1)
    reshard(tmp_path / "a", tmp_path / "b", 1)
    (state,) = load_sharded(tmp_path / "b", 1)[1]
    assert (state["param_shard"].tolist(), state["count"].tolist()) == ([1.0, 1.0], 5.0)


def test_what_differs_between_ranks_and_is_no_shard_is_refused_by_name_or_left_out_on_request(saved, tmp_path):
    with pytest.raises(CheckpointError, match=r"state\['rng'\] differs between rank 0 and rank 1 and is no flat shard"):
        reshard(saved, tmp_path / "new", 2)
    assert not (tmp_path / "new").exists()
    reshard(saved, tmp_path / "new", 2, drop=("rng",))
    _, again = load_sharded(tmp_path / "new", 2)
    assert all("rng" not in state for state in again)
    assert torch.equal(again[1]["param_shard"], torch.cat([shard_of(2)["param_shard"], shard_of(3)["param_shard"]]))
    assert all(same(s["steps"], shard_of(0)["steps"]) for s in again)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda s: s["steps"][1].update(lr=0.2), r"state\['steps'\]\[1\]\['lr'\]"),
        (lambda s: s["steps"][1].pop("lr"), r"state\['steps'\]\[1\]"),
        (lambda s: s["steps"].append(1), r"state\['steps'\]"),
        (lambda s: s.update(more=1), "state differs"),
        (lambda s: s.update(equal=torch.ones(4)), r"state\['equal'\]"),
        (lambda s: s["steps"].__setitem__(0, torch.tensor(7)), r"state\['steps'\]\[0\]"),
    ],
)
def test_the_place_of_the_difference_is_named(tmp_path, change, where):
    given = [{**s, "rng": 0, "equal": torch.zeros(4)} for s in states(3)]
    change(given[2])
    save_sharded(given, tmp_path / "a", step=1)
    with pytest.raises(CheckpointError, match=f"{where}.* between rank 0 and rank 2"):
        reshard(tmp_path / "a", tmp_path / "b", 2)


def test_a_reshard_onto_itself_of_nothing_or_to_no_rank_is_refused(saved, tmp_path):
    os.symlink(saved, tmp_path / "link")
    for dest in (saved, tmp_path / "link"):
        with pytest.raises(ValueError, match="dest_dir is src_dir"):
            reshard(saved, dest, 2)
    with pytest.raises(ValueError, match="new_world_size=0 must be a whole number, at least 1"):
        reshard(saved, tmp_path / "b", 0)
    save_sharded([{"a": 1}], tmp_path / "flatless", step=1)
    with pytest.raises(CheckpointError, match="holds no param_shard"):
        reshard(tmp_path / "flatless", tmp_path / "b", 2)
    (saved / "rank1.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="sha256 mismatch on rank 1"):
        reshard(saved, tmp_path / "b", 2)
    assert not (tmp_path / "b").exists()


# --- rotation -------------------------------------------------------------------------------------------------------


def checkpoints(parent, *steps, name="step_{}"):
    for step in steps:
        save_sharded([{"step": step}], parent / name.format(step), step=step)


def test_rotation_keeps_the_newest_by_number_and_not_by_name(tmp_path):
    checkpoints(tmp_path, 9, 10, 100, 2)
    checkpoints(tmp_path, 5, name="step_{:08d}")
    assert [f.name for f in all_checkpoints(tmp_path)] == ["step_2", "step_00000005", "step_9", "step_10", "step_100"]
    assert rotate_checkpoints(tmp_path, keep_last=2) == ["step_2", "step_00000005", "step_9"]
    assert names(tmp_path) == ["step_10", "step_100"]
    assert rotate_checkpoints(tmp_path) == []


def test_keep_last_0_removes_all_and_below_0_is_refused_with_nothing_removed(tmp_path):
    checkpoints(tmp_path, 1, 2)
    with pytest.raises(ValueError, match="keep_last=-1 must be a whole number, at least 0"):
        rotate_checkpoints(tmp_path, keep_last=-1)
    assert names(tmp_path) == ["step_1", "step_2"]
    assert rotate_checkpoints(tmp_path, keep_last=0) == ["step_1", "step_2"]
    assert names(tmp_path) == []
    assert rotate_checkpoints(tmp_path / "no such folder") == []


def test_what_is_no_checkpoint_stays_and_links_are_not_followed(tmp_path):
    parent, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    checkpoints(parent, 5, 6, 7)
    checkpoints(elsewhere, 1)
    os.symlink(elsewhere / "step_1", parent / "step_1")  # an older one, but not in here
    os.symlink(elsewhere / "step_1", parent / "step_5" / "rank3.bin")
    for name in ("step_x", "step_", "Step_3", "step_3.bak", "step_-4", "step_٣", "step_4"):
        (parent / name).mkdir()
        (parent / name / "thesis.tex").write_text("not ours")
    (parent / "step_2").write_text("a file")
    (parent / "step_00000003").mkdir()
    (parent / "step_00000003" / "manifest.json").write_text('{"schema": "another program\'s"}')
    before = set(names(parent))
    assert rotate_checkpoints(parent, keep_last=1) == ["step_5", "step_6"]
    assert set(names(parent)) == before - {"step_5", "step_6"}
    assert load_sharded(elsewhere / "step_1", 1)[0].step == 1


def test_something_of_somebody_elses_in_a_checkpoint_folder_stays_there(tmp_path):
    checkpoints(tmp_path, 1, 2)
    (tmp_path / "step_1" / "notes.txt").write_text("keep me")
    rotate_checkpoints(tmp_path, keep_last=1)
    assert names(tmp_path / "step_1") == ["notes.txt"]
    assert all_checkpoints(tmp_path) == [tmp_path / "step_2"]


def test_an_unfinished_newer_folder_is_left_alone_and_an_older_one_is_removed(tmp_path):
    checkpoints(tmp_path, 3, 4)
    for step in (2, 9):
        (tmp_path / f"step_{step}").mkdir()
        (tmp_path / f"step_{step}" / "rank0.bin").write_bytes(b"half")
        (tmp_path / f"step_{step}" / ".rank1.bin.0123456789ab.tmp").write_bytes(b"ha")
        (tmp_path / f"step_{step}" / "dcp.0123456789ab").mkdir()
    assert rotate_checkpoints(tmp_path, keep_last=5) == ["step_2"]
    assert names(tmp_path) == ["step_3", "step_4", "step_9"]
    assert len(names(tmp_path / "step_9")) == 3


def test_a_checkpoint_that_is_being_removed_is_at_no_moment_one_with_shards_missing(tmp_path, monkeypatch):
    checkpoints(tmp_path, 1, 2)
    real, seen = os.unlink, []

    def unlink(path, *args, **options):
        real(path, *args, **options)
        seen.append([f.name for f in all_checkpoints(tmp_path)])

    monkeypatch.setattr(os, "unlink", unlink)
    rotate_checkpoints(tmp_path, keep_last=1)
    assert seen == [["step_2"]] * len(seen)
    assert len(seen) == 2


def test_a_slice_that_reads_its_memory_conjugated_and_a_sparse_tensor_come_back(tmp_path):
    whole = torch.randn(9, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    given = [{"v": whole.conj()[2:5]}, {"v": torch.eye(3).to_sparse()}, {"v": whole.clone().conj().imag[2:5]}]
    save_sharded(given, tmp_path / "a", step=0)
    for state, loaded in zip(given, load_sharded(tmp_path / "a", 3)[1], strict=True):
        assert torch.equal(loaded["v"].to_dense(), state["v"].to_dense())


def test_two_processes_that_save_into_one_folder_wait_for_each_other(tmp_path):
    """Each would sweep away what the other has just written."""
    code = """
import pathlib, sys, time, torch
from safetrain_core import save_sharded
folder, me = pathlib.Path(sys.argv[1]), sys.argv[2]
(folder / me).touch()
while len(list(folder.glob("ready*"))) < 2:
    time.sleep(0.01)
for step in range(40):
    save_sharded([{"param_shard": torch.full((2000,), float(step))}] * 2, folder / "saved", step)
"""
    saving = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), f"ready{n}"], stderr=subprocess.PIPE, text=True)
        for n in range(2)
    ]
    assert [process.communicate(timeout=100)[1] for process in saving] == ["", ""]
    loaded = load_sharded(tmp_path / "saved", 2)[1]
    assert loaded[0]["param_shard"].eq(39).all()
    assert len(os.listdir(tmp_path / "saved")) == 3

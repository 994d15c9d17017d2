"""Verified DCP: saved on N ranks, loaded on M; every file verified before anything changes; a hostile index refused."""

import collections
import hashlib
import json
import os
import pickle
import shutil

import dcp_workers as work
import needs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from safetrain_core import CheckpointError, launch, load_dcp, load_sharded, save_dcp, save_sharded
from safetrain_core.checkpoint import inspection
from safetrain_core.checkpoint.dcp import DcpReader
from safetrain_core.checkpoint.dcp_files import DcpManifest, verify_dcp

pytestmark = needs.fsdp2


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dcp") / "step_00000010"
    return folder, launch(work.save, 2, folder)[0]


@pytest.fixture
def copy(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "step_00000010")
    return tmp_path / "step_00000010"


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_two_ranks_saved_loads_on_any_number_bit_for_bit(saved, ranks):
    folder, values = saved
    for number, (again, note, own, step) in enumerate(launch(work.load, ranks, folder)):
        assert again == values
        assert (note, step) == ("first", 10)
        assert own == ({"rank": number, "noise": torch.tensor([number])} if ranks == 2 else None)


def test_one_process_saves_for_several(tmp_path):
    values = launch(work.save, 1, tmp_path)[0]
    assert [told[0] for told in launch(work.load, 3, tmp_path)] == [values] * 3


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json")


@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_each_file_is_verified_before_anything_is_loaded(saved, tmp_path, harm):
    words = {"flip": "sha256 mismatch", "cut": "sha256 mismatch", "remove": "shard file missing"}[harm]
    count = len(files_of(saved[0]))
    assert count == 5, "two ranks' tensors, the index, two ranks' own"
    for number in range(count):
        folder = tmp_path / str(number)
        shutil.copytree(saved[0], folder)
        path = files_of(folder)[number]
        whole = bytearray(path.read_bytes())
        whole[len(whole) // 2] ^= 1
        if harm == "remove":
            path.unlink()
        else:
            path.write_bytes(whole if harm == "flip" else whole[:-1])
        with pytest.raises(CheckpointError, match=words):
            verify_dcp(folder)
        told, sound = inspection.inspect(folder)
        assert words in told
        assert not sound
    assert all(words in error and same for error, same in launch(work.load, 2, tmp_path / "0"))


def test_other_names_or_shapes_are_refused_on_every_rank_and_nothing_is_half_loaded(saved):
    for error, same in launch(work.load, 2, saved[0], 9):
        assert "does not fit: model/0.weight is torch.float32 of shape (7, 5) there" in error
        assert same
    linear = torch.nn.Linear(5, 7)
    with pytest.raises(CheckpointError, match=r"does not fit: it lacks model/bias"):
        load_dcp(saved[0], {"model": linear.state_dict()})


def test_an_overwritten_folder_holds_the_new_checkpoint_and_nothing_of_the_old(copy):
    old = {path.name for path in copy.iterdir()}
    values = launch(work.save, 3, copy, 4, "again", 30)[0]
    assert {path.name for path in copy.iterdir()} & old == {"manifest.json"}
    assert len(files_of(copy)) == 3 + 1 + 3
    again, note, _, step = launch(work.load, 2, copy)[1]
    assert (again, note, step) == (values, "again", 30)


@pytest.mark.parametrize("which", [0, 1])
def test_a_rank_that_cannot_write_is_told_on_every_rank_and_the_old_checkpoint_still_loads(copy, saved, which):
    errors = launch(work.save_where_one_cannot_write, 2, copy, which)
    assert errors[0] == errors[1]
    assert f"No space left on device (on rank {which})" in errors[0]
    assert launch(work.load, 2, copy)[0][:2] == (saved[1], "first")


def test_what_could_not_be_read_back_is_refused_on_every_rank_before_anything_is_written(tmp_path):
    errors = launch(work.save_what_cannot_be_read_back, 2, tmp_path / "new", 1)
    assert (
        errors[0]
        == errors[1]
        == "own['x'] is an object, which weights_only=True cannot read back; save plain " + ("types and tensors")
    )
    assert not (tmp_path / "new").exists()


def resum(folder, path):
    """Make the manifest vouch for ``path`` as it is now, as one who forges a checkpoint would."""
    told = json.loads((folder / "manifest.json").read_text())
    for entry in (*told["files"], *told["ranks"]):
        if entry["path"] == path.name:
            entry.update(sha256=hashlib.sha256(path.read_bytes()).hexdigest(), size_bytes=path.stat().st_size)
    (folder / "manifest.json").write_text(json.dumps(told))


class Evil:
    def __reduce__(self):
        return os.mkdir, (os.environ["SAFETRAIN_TEST_TRAP"],)


def test_an_index_that_runs_code_is_refused_and_nothing_runs(copy, tmp_path, monkeypatch):
    monkeypatch.setenv("SAFETRAIN_TEST_TRAP", str(tmp_path / "ran"))
    index = next(copy.rglob(".metadata"))
    index.write_bytes(pickle.dumps(Evil()))
    resum(copy, index)
    with pytest.raises(CheckpointError, match=r"cannot be read without running code .*mkdir"):
        DcpReader(copy)
    assert not (tmp_path / "ran").exists()
    pickle.loads(index.read_bytes())
    assert (tmp_path / "ran").exists(), "the trap is one"


@pytest.mark.parametrize("name", ["builtins.eval", "torch.load", "torch.distributed.checkpoint.metadata.os.system"])
def test_the_index_may_name_only_what_dcp_needs(copy, name):
    module, _, attribute = name.rpartition(".")
    index = next(copy.rglob(".metadata"))
    index.write_bytes(b"\x80\x04c" + module.encode() + b"\n" + attribute.encode() + b"\n.")
    resum(copy, index)
    with pytest.raises(CheckpointError, match="cannot be read without running code"):
        DcpReader(copy)


def test_an_index_that_points_out_of_the_folder_is_refused(copy):
    index = next(copy.rglob(".metadata"))
    told = pickle.loads(index.read_bytes())
    for info in told.storage_data.values():
        info.relative_path = "../../elsewhere.distcp"
    index.write_bytes(pickle.dumps(told))
    resum(copy, index)
    with pytest.raises(CheckpointError, match=r"points at '\.\./\.\./elsewhere\.distcp'"):
        DcpReader(copy)


def test_links_are_refused_unopened(copy, tmp_path):
    path = next(copy.glob("rank0.*.bin"))
    shutil.move(path, tmp_path / "there")
    path.symlink_to(tmp_path / "there")
    with pytest.raises(CheckpointError, match="no regular file"):
        verify_dcp(copy)


def test_flat_shards_and_dcp_are_told_apart(saved, tmp_path):
    with pytest.raises(CheckpointError, match=r"unknown schema 'ckpt\.dcp\.v1'"):
        load_sharded(saved[0], 2)
    save_sharded([{"a": 1}], tmp_path, step=1)
    with pytest.raises(CheckpointError, match=r"unknown schema 'ckpt\.shards\.v1'"):
        verify_dcp(tmp_path)


def test_an_absurd_world_size_is_refused_and_nothing_of_its_size_is_made(copy):
    told = json.loads((copy / "manifest.json").read_text())
    with pytest.raises(CheckpointError, match="damaged"):
        DcpManifest.from_json({**told, "world_size": 2**60}, "manifest.json")


def test_two_tensors_of_one_name_are_refused(tmp_path):
    with pytest.raises(ValueError, match="two tensors of the state are called a/b"):
        save_dcp({"a": {"b": torch.ones(1)}, "a/b": torch.ones(1)}, tmp_path, step=1)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_manifest_with_anything_in_any_place_is_read_or_refused_by_name(saved, data):
    told = json.loads((saved[0] / "manifest.json").read_text())
    place, keys = told, []
    while isinstance(place, dict | list) and place and (not keys or data.draw(st.booleans())):
        keys.append(data.draw(st.sampled_from(list(place) if isinstance(place, dict) else list(range(len(place))))))
        parent, place = place, place[keys[-1]]
    kept = json.dumps(told)
    parent[keys[-1]] = data.draw(JSON)
    try:
        read = DcpManifest.from_json(told, "manifest.json")
    except CheckpointError:
        return
    assert read.world_size == json.loads(kept)["world_size"], "what is read is as good as what was there"


def test_an_object_in_place_of_a_state_is_refused_with_what_to_pass(tmp_path):
    with pytest.raises(ValueError, match=r"state is a Linear, expected a dict .* model\.state_dict\(\)"):
        save_dcp(torch.nn.Linear(1, 1), tmp_path, step=1)


def test_a_named_tuple_is_refused_for_what_it_is(tmp_path):
    with pytest.raises(ValueError, match=r"state\['v'\] is a Pair"):
        save_dcp({"v": collections.namedtuple("Pair", "a b")(torch.ones(1), 2)}, tmp_path, step=0)
    assert list(tmp_path.iterdir()) == []

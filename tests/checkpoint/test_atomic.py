"""Atomic writes, the sha256 behind the archive, and what may be in a payload."""

import argparse
import errno
import io
import json
import os
import pathlib
import pickle
import re
import zipfile

import numpy as np
import pytest
import torch
from torch import nn

from safetrain_core import CheckpointError, atomic_save, capture_rng_state, restore_rng_state
from safetrain_core.checkpoint import summed
from safetrain_core.checkpoint.atomic import atomic_write_bytes, atomic_write_json, atomic_write_text, verify
from safetrain_core.checkpoint.plain import plain

PAYLOAD = {"weight": torch.arange(6.0), "note": "hello", "step": 3}


def test_a_saved_file_is_read_by_torch_mmap_and_zipfile_and_holds_its_own_sum(tmp_path):
    path = tmp_path / "new" / "a.pt"
    digest = atomic_save(PAYLOAD, path)
    assert verify(path) == digest
    for options in ({}, {"mmap": True}):
        assert torch.equal(torch.load(path, weights_only=True, **options)["weight"], PAYLOAD["weight"])
    assert zipfile.ZipFile(path).testzip() is None
    assert [p.name for p in path.parent.iterdir()] == ["a.pt"]


def test_the_same_payload_gives_the_same_bytes_under_any_name(tmp_path):
    atomic_save(PAYLOAD, tmp_path / "a.pt")
    atomic_save(PAYLOAD, tmp_path / "another_name.pt")
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "another_name.pt").read_bytes()


def test_every_single_flipped_byte_is_found(tmp_path):
    path = tmp_path / "a.pt"
    atomic_save({"w": torch.ones(1)}, path)
    whole = bytearray(path.read_bytes())
    for i in range(len(whole)):
        whole[i] ^= 0x01
        path.write_bytes(whole)
        with pytest.raises(CheckpointError):
            verify(path)
        whole[i] ^= 0x01
    path.write_bytes(whole)
    verify(path)


def test_every_length_of_a_torn_file_is_found(tmp_path):
    path = tmp_path / "a.pt"
    atomic_save({"w": torch.ones(1)}, path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="torn"):
            verify(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(CheckpointError):
        verify(path)


def test_a_file_of_torch_save_is_not_ours_and_a_folder_and_nothing_are_told_apart(tmp_path):
    torch.save(PAYLOAD, tmp_path / "b.pt")
    for path, told in (
        (tmp_path / "b.pt", "was not written by safetrain"),
        (tmp_path, "cannot be read"),
        (tmp_path / "c", "is missing"),
    ):
        with pytest.raises(CheckpointError, match=told):
            verify(path)


class Unpicklable:
    def __reduce__(self):
        raise RuntimeError("no pickle of me")


def no_space(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("breaks", "error"),
    [
        ((os, "fsync", no_space), OSError),
        ((os, "replace", no_space), OSError),
        ((summed.FollowingSum, "write", no_space), OSError),
        ((os, "fsync", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)), KeyboardInterrupt),
        (None, ValueError),
    ],
)
def test_a_save_that_fails_leaves_the_old_file_whole_no_temporary_and_raises_the_first_error(
    tmp_path, monkeypatch, breaks, error
):
    path = tmp_path / "a.pt"
    atomic_save(PAYLOAD, path)
    before = path.read_bytes()
    payload = {"weight": torch.zeros(100_000), **({"bad": Unpicklable()} if breaks is None else {})}
    with monkeypatch.context() as patch:
        if breaks is not None:
            patch.setattr(*breaks)
        with pytest.raises(error):
            atomic_save(payload, path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


def test_a_sum_that_cannot_be_made_fails_the_save_and_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.pt"
    atomic_save(PAYLOAD, path)
    before = path.read_bytes()

    def fails(self):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(summed.FollowingSum, "_sum_up", fails)
    with pytest.raises(OSError, match="Input/output error"):
        atomic_save({"weight": torch.zeros(10)}, path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


def test_text_bytes_and_json_are_written_whole(tmp_path):
    atomic_write_bytes(b"abc", tmp_path / "x" / "a")
    atomic_write_text("é", tmp_path / "x" / "b")
    atomic_write_json({"a": [1, None]}, tmp_path / "x" / "c")
    assert (tmp_path / "x" / "a").read_bytes() == b"abc"
    assert (tmp_path / "x" / "b").read_text(encoding="utf-8") == "é"
    assert json.loads((tmp_path / "x" / "c").read_text()) == {"a": [1, None]}
    with pytest.raises(ValueError, match="JSON"):
        atomic_write_json({"a": float("nan")}, tmp_path / "x" / "c")
    (tmp_path / "plain").touch()
    assert os.stat(tmp_path / "x" / "a").st_mode == os.stat(tmp_path / "plain").st_mode


def test_a_numpy_scalar_and_a_path_are_saved_as_plain_values_and_the_file_loads(tmp_path):
    model = nn.BatchNorm1d(2)
    payload = {
        "loss": np.float32(0.5),
        "step": np.int64(7),
        "path": pathlib.Path("a/b"),
        "rng": capture_rng_state(),
        "model": model.state_dict(),
        "nested": [(1, {"x": np.bool_(True)})],
        "dtype": torch.float16,
    }
    atomic_save(payload, tmp_path / "a.pt")
    read = torch.load(tmp_path / "a.pt", weights_only=True)
    assert (read["loss"], read["step"], read["path"], read["nested"]) == (0.5, 7, "a/b", [(1, {"x": True})])
    restore_rng_state(read["rng"])
    assert read["model"]._metadata == model.state_dict()._metadata


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"args": argparse.Namespace(a=1)}, r"payload\['args'\] is a Namespace"),
        ({"list": [1, {2, 3}]}, r"payload\['list'\]\[1\] is a set"),
        ({"f": len}, r"payload\['f'\] is a builtin_function_or_method"),
        ({"array": np.zeros(3)}, r"payload\['array'\] is a ndarray"),
        ({(1, object()): 2}, "is an object"),
    ],
)
def test_what_could_not_be_read_back_is_refused_by_name_before_anything_is_written(tmp_path, value, where):
    with pytest.raises(ValueError, match=where):
        atomic_save(value, tmp_path / "a.pt")
    assert list(tmp_path.iterdir()) == []


def test_plain_shares_tensors_and_keeps_values():
    weight = torch.ones(2)
    assert plain({"a": weight})["a"] is weight
    assert plain([True, 2, 3.0, "x", None, b"y", 1j]) == [True, 2, 3.0, "x", None, b"y", 1j]


def test_random_states_come_back_and_weigh_little(tmp_path):
    import random

    saved = capture_rng_state()
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    assert len(buffer.getvalue()) < 50_000
    first = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()]
    restore_rng_state(saved)
    assert first == [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()]
    restore_rng_state(saved)
    for broken in ({}, {**saved, "torch": torch.zeros(3, dtype=torch.uint8)}, {**saved, "python": [3, None, None]}):
        before = pickle.dumps(random.getstate())
        with pytest.raises(ValueError, match="missing or malformed"):
            restore_rng_state(broken)
        assert pickle.dumps(random.getstate()) == before


class Tagged:
    """No plain type."""


def tagged():
    tensor = torch.ones(1)
    tensor.tag = Tagged()
    return tensor


def nest(depth, inner=None):
    for _ in range(depth):
        inner = [inner]
    return inner


def a_list_that_holds_itself():
    made = []
    made.append(made)
    return made


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.datetime64("2026-01-31"), "payload['v'] is a date"),
        (np.longdouble(1.5), "payload['v'] is a longdouble"),
        (1 << 2039, "an integer of 2040 bits"),
        (tagged(), "payload['v'].tag is a Tagged"),
        ({pathlib.Path("a"): 1, "a": 2}, "keys that are the same once saved"),
        (nest(5000), "nested too deeply"),
        (a_list_that_holds_itself(), "or holds itself"),
    ],
)
def test_what_could_not_be_read_back_is_refused_before_anything_is_written(tmp_path, value, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        atomic_save({"v": value}, tmp_path / "a.pt")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [b"", [b"", {"k": b""}], (1 << 2039) - 1, "a\udc80", np.bytes_(b"")], ids=repr)
def test_odd_plain_values_come_back(tmp_path, value):
    atomic_save({"v": value}, tmp_path / "a.pt")
    atomic_save(torch.load(tmp_path / "a.pt", weights_only=True), tmp_path / "b.pt")
    assert torch.load(tmp_path / "b.pt", weights_only=True)["v"] == value


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in the file system")
def test_a_pipe_or_a_device_is_no_place_for_a_save_and_stays_and_a_folder_is_told_before_anything_is_written(tmp_path):
    """A rename puts a file in the place of whatever is there: of /dev/null, too, for one who may."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="is a device, a pipe or a socket"):
        atomic_save(PAYLOAD, tmp_path / "pipe")
    with pytest.raises(IsADirectoryError, match="name a file in it"):
        atomic_save(PAYLOAD, tmp_path / "folder")
    assert (tmp_path / "pipe").is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "pipe"]

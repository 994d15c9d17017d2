"""A manifest from a stranger: whatever is in it, CheckpointError or the checkpoint, and no file outside is opened.

SAFETRAIN_FUZZ multiplies the examples (1 by default: the same ones each time; else random ones).
"""

import contextlib
import copy
import json
import os
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shards import rewrite, same

from safetrain_core import CheckpointError, load_sharded, reshard, rotate_checkpoints, save_sharded
from safetrain_core.checkpoint.folders import all_checkpoints
from safetrain_core.checkpoint.manifest import LARGEST_MANIFEST
from safetrain_core.checkpoint.sharded_read import load_shard

TIMES = int(os.environ.get("SAFETRAIN_FUZZ", "1"))
STATES = [{"param_shard": torch.arange(3.0) + r, "lr": 0.1} for r in range(3)]
PYTHONS_OWN = tuple(os.path.realpath(p) for p in (sys.prefix, sys.base_prefix, *filter(None, sys.path[1:])))
COUNTS: dict[str, list[int]] = {}


def fuzz(examples):
    return settings(
        max_examples=examples * TIMES,
        deadline=None,
        database=None,
        derandomize=TIMES == 1,
        suppress_health_check=list(HealthCheck),
    )


# --- what is opened -----------------------------------------------------------------------------------------------


class Opened:
    """Paths that this process opens or lists while the watch is on; an audit hook cannot be taken away again."""

    paths: list | None = None

    @classmethod
    def hook(cls, event, args):
        if cls.paths is not None and event in ("open", "os.listdir", "os.scandir"):
            cls.paths.append(args[0])


@contextlib.contextmanager
def only_inside(folder):
    """Fails where anything is opened but regular files of ``folder`` itself, and Python's own modules."""
    Opened.paths = []
    try:
        yield Opened.paths
    finally:
        paths, Opened.paths = Opened.paths, None
    for path in paths:
        if isinstance(path, int):
            continue
        real = os.path.realpath(os.fsdecode(path))
        if real.endswith((".py", ".pyc", ".so")) and real.startswith(PYTHONS_OWN):
            continue
        assert os.path.dirname(real) == os.path.realpath(folder), f"{path!r} was opened"


@pytest.fixture(scope="module", autouse=True)
def _hooked():
    sys.addaudithook(Opened.hook)
    yield
    print()
    for what, (tried, refused) in COUNTS.items():
        print(f"{what}: {tried} examples tried, {refused} refused, {tried - refused} the checkpoint as it was saved")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of 3 ranks; beside it, a file that nobody may open, and links to it inside."""
    parent = tmp_path_factory.mktemp("fuzz")
    save_sharded(STATES, parent / "step_1", step=1)
    (parent / "rank0.bin").write_bytes((parent / "step_1" / "rank0.bin").read_bytes())
    os.symlink(parent / "rank0.bin", parent / "step_1" / "rank0.0123456789ab.bin")
    (parent / "step_1" / "rank1.0123456789ab.bin").mkdir()
    os.mkfifo(parent / "step_1" / "rank2.0123456789ab.bin")
    with contextlib.suppress(CheckpointError):  # so that what is imported on the way is
        load_sharded(parent / "step_1", 4)
    (parent / "as it was saved").write_bytes((parent / "step_1" / "manifest.json").read_bytes())
    return parent / "step_1"


@pytest.fixture(scope="module")
def valid(folder):
    return (folder.parent / "as it was saved").read_bytes()


def tried(what, folder, data):
    """Load with ``data`` as the manifest: an error of ours, or the checkpoint as it was saved."""
    (folder / "manifest.json").write_bytes(data)
    count = COUNTS.setdefault(what, [0, 0])
    count[0] += 1
    error = None
    with only_inside(folder):
        try:
            loaded = load_sharded(folder, 3)[1]
        except CheckpointError as refused:
            error = str(refused)
    if error is None:
        assert same(loaded, STATES)
    else:
        count[1] += 1
        assert error.isprintable(), "control characters, or half a character, in a message that is to be printed"
    assert [f.name for f in all_checkpoints(folder.parent)] in ([], ["step_1"])


# --- bytes --------------------------------------------------------------------------------------------------------


@fuzz(150)
@given(data=st.binary(max_size=200) | st.text(max_size=100).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_bytes(folder, data):
    tried("bytes", folder, data)


@fuzz(200)
@given(
    cuts=st.lists(st.tuples(st.integers(0, 1200), st.integers(0, 40), st.binary(max_size=12)), min_size=1, max_size=3)
)
def test_pieces_of_the_bytes_replaced(folder, valid, cuts):
    data = valid
    for at, length, put in cuts:
        data = data[:at] + put + data[at + length :]
    tried("bytes replaced", folder, data)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "utf-8-sig", "cp037"])
def test_other_encodings(folder, valid, encoding):
    tried("encodings", folder, valid.decode().encode(encoding))
    assert COUNTS["encodings"][0] == COUNTS["encodings"][1]


# --- JSON ---------------------------------------------------------------------------------------------------------

NUMBERS = [0, -1, 1, 2**31, 2**53 + 1, 2**62, 2**62 + 1, 2**63, 2**64, 10**400, -(10**400), 0.5, 3.0, -0.0, 1e308]
NUMBERS += [float("nan"), float("inf"), float("-inf"), True, False, None]
PATHS = ["../rank0.bin", "../../etc/passwd", "/etc/passwd", "rank0.bin/../../rank0.bin", "./rank0.bin", "..", ".", ""]
PATHS += ["rank0.bin\0", "rank0.bin\n", "\nrank0.bin", " rank0.bin", "RANK0.BIN", "rank00.bin", "rank٠.bin"]
PATHS += ["a\\rank0.bin", "C:rank0.bin", "C:\\rank0.bin", "//host/rank0.bin", "file:///etc/passwd", "rank0.bin:stream"]
PATHS += ["rank0.0123456789ab.bin", "rank1.0123456789ab.bin", "rank2.0123456789ab.bin", "manifest.json", "rank1.bin"]
PATHS += [
    "rank0.0123456789AB.bin",
    "rank0.０１２３４５６７８９ab.bin",
    "\ud800",
    "rank0.bin\ud800",
    "\x1b[2J",
    "x" * 5000,
]
PATHS += ["rank0.bin", "rank99999999.bin", "rank9999999.bin", "~/rank0.bin", "$HOME", "%00", "con", "\u202egnp.nib"]
numbers, paths = st.sampled_from(NUMBERS), st.sampled_from(PATHS)
leaves = numbers | paths | st.integers() | st.floats() | st.text(max_size=20)
anything = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)


@fuzz(150)
@given(value=anything)
def test_any_json(folder, value):
    tried("any JSON", folder, json.dumps(value).encode("utf-8", "surrogatepass"))


@st.composite
def changed(draw):
    """A change or a few to a manifest: another value in a place, a place gone, a new one, an entry twice or moved."""

    def change(told):
        told = copy.deepcopy(told)
        for _ in range(draw(st.integers(1, 3))):
            where = told
            if draw(st.integers(0, 3)) and isinstance(told.get("shards"), list) and told["shards"]:
                where = told["shards"]
                if draw(st.integers(0, 4)) and isinstance(where[0], dict):
                    where = draw(st.sampled_from([e for e in where if isinstance(e, dict)]))
            keys = list(where) if isinstance(where, dict) else list(range(len(where)))
            what = draw(st.sampled_from(["set", "set", "set", "remove", "add", "twice", "move"]))
            if not keys:
                continue
            key = draw(st.sampled_from(keys))
            if what == "set":
                kind = {"path": paths}.get(key, anything) if isinstance(key, str) else anything
                where[key] = draw(kind | anything)
            elif what == "remove":
                del where[key]
            elif what == "add" and isinstance(where, dict):
                where[draw(st.text(max_size=8) | paths)] = draw(anything)
            elif isinstance(where, list):
                entry = where[key] if what == "twice" else where.pop(key)
                where.insert(draw(st.integers(0, 3)), entry)
        return told

    return change


@fuzz(400)
@given(change=st.data())
def test_a_manifest_with_changes_in_some_places(folder, valid, change):
    told = change.draw(changed())(json.loads(valid))
    tried("JSON changed", folder, json.dumps(told, ensure_ascii=False).encode("utf-8", "surrogatepass"))


@fuzz(150)
@given(path=paths, rank=st.integers(0, 2))
def test_only_a_bare_name_of_its_rank_is_opened(folder, valid, path, rank):
    told = json.loads(valid)
    told["shards"][rank]["path"] = path
    tried("paths", folder, json.dumps(told).encode())


@fuzz(100)
@given(
    at=st.integers(0, 30),
    key=st.sampled_from(["schema", "step", "rank", "path", "shards", "sha256", "x"]),
    value=leaves,
)
def test_a_key_put_in_a_second_time(folder, valid, at, key, value):
    text = valid.decode()
    places = [m.start() + 1 for m in re.finditer(r"[{]", text)]
    place = places[at % len(places)]
    put = f"{json.dumps(key)}: {json.dumps(value)}, "
    tried("key twice", folder, (text[:place] + put + text[place:]).encode())
    assert COUNTS["key twice"][0] == COUNTS["key twice"][1]


@pytest.mark.parametrize("field", ["world_size", "step", "size_bytes", "param_shard_numel", "wall_clock_seconds"])
def test_numbers_that_json_or_python_take_in_another_way(folder, valid, field):
    for number in ("1" + "0" * 5000, "-" + "9" * 4000, "9" * 4299, "1e400", "1e999999999", "0x10", "1_0", "01", "١"):
        text = re.sub(rf'"{field}": [\d.e+]+', f'"{field}": {number}', valid.decode(), count=1)
        assert number in text
        tried("numbers", folder, text.encode())
    assert COUNTS["numbers"][0] == COUNTS["numbers"][1]


@pytest.mark.parametrize("pair", ["[]", "{}"])
@pytest.mark.parametrize("field", [None, "step", "schema", "path", "rank"])
def test_deep_nesting(folder, valid, pair, field):
    for depth in [10, 700, *range(900, 1000, 4), 1100, 200_000]:  # around where Python's stack ends
        deep = "[" * depth + "]" * depth if pair == "[]" else '{"a":' * depth + "1" + "}" * depth
        text = (
            deep
            if field is None
            else re.sub(rf'"{field}": ("[^"]*"|\d+)', f'"{field}": {deep}', valid.decode(), count=1)
        )
        tried("nesting", folder, text.encode())
    assert COUNTS["nesting"][0] == COUNTS["nesting"][1]


# --- what is no file, or too large ----------------------------------------------------------------------------------


def test_a_manifest_of_a_gigabyte_is_refused_by_its_size_unopened(folder, valid):
    (folder / "manifest.json").write_bytes(valid)
    os.truncate(folder / "manifest.json", 10**9)  # no block of the disk is used for the rest
    start = time.perf_counter()
    with only_inside(folder) as opened, pytest.raises(CheckpointError, match="has 1000000000 bytes, at most"):
        load_sharded(folder, 3)
    assert opened == []
    assert time.perf_counter() - start < 1
    os.truncate(folder / "manifest.json", LARGEST_MANIFEST + 1)
    with pytest.raises(CheckpointError, match="it is no manifest"):
        load_sharded(folder, 3)
    assert all_checkpoints(folder.parent) == []
    (folder / "manifest.json").write_bytes(valid)


@pytest.mark.parametrize("put", ["link", "link to nothing", "folder", "pipe", "nothing", "link to itself"])
def test_a_manifest_that_is_no_file_is_refused_unopened(folder, valid, put):
    path, outside = folder / "manifest.json", folder.parent / "outside.json"
    path.unlink(missing_ok=True)
    outside.write_bytes(valid)
    match put:
        case "link":
            path.symlink_to(outside)
        case "link to nothing":
            path.symlink_to(folder.parent / "nothing")
        case "link to itself":
            path.symlink_to(path)
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
    try:
        with only_inside(folder) as opened:
            for load in (lambda: load_sharded(folder, 3), lambda: load_shard(folder, 0, 3)):
                with pytest.raises(CheckpointError, match=r"manifest\.json"):
                    load()
            with pytest.raises(CheckpointError, match=r"manifest\.json"):
                reshard(folder, folder.parent / "new", 2)
        assert opened == []
        assert all_checkpoints(folder.parent) == []
        assert rotate_checkpoints(folder.parent, keep_last=0) == []
    finally:
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        path.write_bytes(valid)


def test_a_folder_that_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a file").write_text("{}")
    for where in ("a file", "nothing", "a\0b", "x" * 300, "\ud800", ""):
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            load_sharded(where, 1)
    assert all_checkpoints("a file") == all_checkpoints("nothing") == []


# --- a shard that fits its sum --------------------------------------------------------------------------------------

tensors = st.sampled_from(
    [torch.ones(3), torch.ones(0), torch.ones(()), torch.ones(3, 1), torch.ones(3).to_sparse(), torch.ones(3).int()]
)
saveable = st.recursive(
    tensors | st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=2).map(tuple)
        | st.dictionaries(st.sampled_from(["schema", "rank", "step", "state", "param_shard", "x"]), inner, max_size=5)
    ),
)


@fuzz(150)
@given(
    value=saveable, keys=st.sets(st.sampled_from(["schema", "rank", "step", "state", "param_shard", "all"]), min_size=1)
)
def test_any_payload_of_a_shard(tmp_path_factory, value, keys):
    folder = shards_folder(tmp_path_factory)
    state = {"param_shard": value} if "param_shard" in keys else STATES[1]
    payload = {"schema": "ckpt.shards.v1", "rank": 1, "step": 1, "state": state}
    payload.update(dict.fromkeys(keys & payload.keys(), value))
    rewrite(folder, 1, value if "all" in keys else payload)
    count = COUNTS.setdefault("payloads", [0, 0])
    count[0] += 1
    with only_inside(folder):
        try:
            load_sharded(folder, 3)
        except CheckpointError:
            count[1] += 1


MADE: list[Path] = []


def shards_folder(factory):
    if not MADE:
        MADE.append(factory.mktemp("payloads") / "step_1")
        save_sharded(STATES, MADE[0], step=1)
    return MADE[0]

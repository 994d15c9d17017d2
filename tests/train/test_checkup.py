"""What ``safetrain verify`` says of folders that are whole, and of each way in which one can be broken."""

import csv
import json
import os
import shutil

import pytest
import torch
from shards import edit, rewrite, states

from safetrain_core import (
    TrainConfig,
    TrainState,
    atomic_save,
    load_sharded,
    save_checkpoint,
    save_dcp,
    save_sharded,
    verify_checkpoints,
)
from safetrain_core.cli import main
from safetrain_core.records import BASE_COLUMNS
from safetrain_core.train.verify import report

RANKS = (1, 2, 3, 4, 7)


def rules(told):
    return [finding.rule for finding in told.findings]


def errors(told):
    return [finding.rule for finding in told.findings if finding.severity == "error"]


def one_file(folder, step, schema="ckpt.v1"):
    path = folder / f"step_{step:08d}.pt"
    if schema == "ckpt.v1":
        net = torch.nn.Linear(4, 2)
        save_checkpoint(net, torch.optim.AdamW(net.parameters()), None, TrainState(step=step, updates=step), path)
    else:
        atomic_save({"schema": schema, "state": {"step": step}}, path)
    return path


def shards(folder, step, ranks):
    path = folder / f"step_{step:08d}"
    save_sharded(states(ranks, 40), path, step)
    return path


def dcp(folder, step):
    path = folder / f"step_{step:08d}"
    save_dcp({"model": torch.nn.Linear(9, 9).state_dict()}, path, step=step)
    return path


def shard_files(folder):
    return sorted(folder.glob("rank*.bin"))


def log(folder, steps, ms=1500.0, skipped=()):
    with open(folder / "metrics.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, BASE_COLUMNS)
        writer.writeheader()
        for step in range(1, steps + 1):
            updates = step - sum(s <= step for s in skipped)
            writer.writerow({"step": step, "updates": updates, "loss": 1.0, "step_time_ms": ms})


# --- the six failures of a load -------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("other", [1, 5, 8])
def test_another_world_size_is_named_for_shards(tmp_path, ranks, other):
    folder = shards(tmp_path, 10, ranks)
    told = verify_checkpoints(folder, other)
    if ranks == other:
        assert told.findings == ()
        return
    assert errors(told) == ["world_size_mismatch"]
    assert "world_size mismatch" in told.findings[0].symptom
    assert told.findings[0].evidence[0].values == {"saved on ranks": ranks, "to load on": other}
    with pytest.raises(Exception, match="world_size mismatch"):
        load_sharded(folder, other)
    assert verify_checkpoints(folder).status == 0, "not judged where it is not asked"


def test_what_resumes_on_any_number_of_ranks_is_no_error(tmp_path):
    dcp(tmp_path, 10), one_file(tmp_path, 20)
    told = verify_checkpoints(tmp_path, 4)
    assert rules(told) == ["resumes_elsewhere"] * 2
    assert told.status == 0


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", ["shards", "dcp"])
def test_an_altered_shard_is_named_with_its_rank(tmp_path, ranks, kind):
    folder = shards(tmp_path, 10, ranks) if kind == "shards" else dcp(tmp_path, ranks)
    path = shard_files(folder)[-1]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1 << (ranks % 8)
    path.write_bytes(data)
    told = verify_checkpoints(tmp_path)
    assert errors(told) == ["sha256_mismatch", "nothing_to_resume"]
    rank = ranks - 1 if kind == "shards" else 0
    assert f"sha256 mismatch on rank {rank}" in told.findings[0].symptom
    assert told.findings[0].evidence[0].values["rank"] == rank
    assert told.findings[0].lesson == "04_sharded_resume"


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("gone", ["first", "last", "all"])
def test_missing_shards_are_named_all_of_them(tmp_path, ranks, gone):
    folder = shards(tmp_path, 10, ranks)
    files = shard_files(folder)
    victims = {"first": files[:1], "last": files[-1:], "all": files}[gone]
    for path in victims:
        path.unlink()
    told = verify_checkpoints(folder)
    assert errors(told) == ["shard_file_missing", "nothing_to_resume"]
    assert "shard file missing" in told.findings[0].symptom
    assert len(told.findings[0].evidence) == len(victims)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("how", ["cut", "empty", "rest is zeros"])
@pytest.mark.parametrize("kind", ["shards", "dcp"])
def test_a_partial_shard_behind_a_present_manifest_is_named(tmp_path, ranks, how, kind):
    folder = shards(tmp_path, 10, ranks) if kind == "shards" else dcp(tmp_path, ranks)
    path = shard_files(folder)[0]
    data = path.read_bytes()
    half = data[: len(data) // 2]
    path.write_bytes({"cut": half, "empty": b"", "rest is zeros": half + bytes(len(data) - len(half))}[how])
    told = verify_checkpoints(tmp_path)
    assert errors(told) == ["partial_shard", "nothing_to_resume"]
    values = told.findings[0].evidence[0].values
    assert (values["rank"], values["expected"]) == (0, len(data))
    assert "the loss goes to NaN" in told.findings[0].cause


@pytest.mark.parametrize("schema", ["zip.v1", "", "CKPT.v1", "ckpt.v99", 7])
@pytest.mark.parametrize("where", ["file", "manifest", "shard"])
def test_an_unknown_schema_is_named(tmp_path, schema, where):
    if where == "file":
        one_file(tmp_path, 10, schema)
    else:
        folder = shards(tmp_path, 10, 2)
        if where == "manifest":
            edit(folder, lambda told: told.update(schema=schema))
        else:
            rewrite(folder, 1, {"schema": schema, "rank": 1, "step": 10, "state": states(2, 40)[1]})
    told = verify_checkpoints(tmp_path)
    assert errors(told) == ["unknown_schema", "nothing_to_resume"]
    assert "unknown schema" in told.findings[0].symptom


@pytest.mark.parametrize("count", [21, 30])
def test_many_checkpoints_that_nothing_rotates_are_named(tmp_path, count):
    for step in range(count):
        atomic_save({"schema": "ckpt.v1", "state": {"step": step, "updates": step}}, tmp_path / f"step_{step:08d}.pt")
    told = verify_checkpoints(tmp_path)
    assert rules(told) == ["no_rotation"]
    assert told.status == 0


@pytest.mark.parametrize(("rolling", "best"), [(1, 0), (2, 1), (3, 0)])
def test_more_than_the_runs_own_config_keeps_are_named(tmp_path, rolling, best):
    (tmp_path / "config.yaml").write_text(f"max_rolling_checkpoints: {rolling}\nnum_best_checkpoints: {best}\n")
    for step in range(rolling + best):
        one_file(tmp_path, step)
    assert rules(verify_checkpoints(tmp_path)) == []
    one_file(tmp_path, 99)
    told = verify_checkpoints(tmp_path)
    assert rules(told) == ["no_rotation"]
    assert f"its config keeps {rolling + best}" in told.findings[0].symptom


def test_few_checkpoints_on_a_disk_that_is_filling_are_named(tmp_path):
    for step in range(6):
        one_file(tmp_path, step)
    size = verify_checkpoints(tmp_path).next_save_bytes
    assert size == (tmp_path / "step_00000000.pt").stat().st_size
    assert rules(verify_checkpoints(tmp_path, free_bytes=4 * size)) == ["no_rotation"]
    assert rules(verify_checkpoints(tmp_path, free_bytes=5 * size)) == []
    full = verify_checkpoints(tmp_path, free_bytes=size - 1)
    assert rules(full) == ["disk_full", "no_rotation"]
    assert full.status == 0, "nothing is broken yet"


# --- files, cut saves, what is left ---------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 1, 100, -100, -1])
def test_a_torn_file_is_named_and_latest_falls_back(tmp_path, cut):
    one_file(tmp_path, 10)
    path = one_file(tmp_path, 20)
    path.write_bytes(path.read_bytes()[:cut])
    told = verify_checkpoints(tmp_path)
    assert errors(told) == ["torn_file"]
    assert told.latest.path.name == "step_00000010.pt"
    assert told.lost.steps == 10


@pytest.mark.parametrize("at", [0, 64, 300, 900, 1500])
def test_an_altered_file_is_named(tmp_path, at):
    path = one_file(tmp_path, 20)
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    assert errors(verify_checkpoints(path)) == ["altered_file", "nothing_to_resume"]


def test_a_file_of_torch_save_itself_is_told_from_a_torn_one(tmp_path):
    torch.save({"weight": torch.ones(3)}, tmp_path / "step_00000001.pt")
    assert errors(verify_checkpoints(tmp_path)) == ["not_ours", "nothing_to_resume"]


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        (lambda folder: (folder / "manifest.json").write_text("{"), "damaged_manifest"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "damaged_manifest"),
        (lambda folder: edit(folder, lambda told: told.update(step=-1)), "damaged_manifest"),
        (lambda folder: edit(folder, lambda told: told["shards"][0].update(path="../x")), "damaged_manifest"),
        (lambda folder: edit(folder, lambda told: told["shards"].pop()), "damaged_manifest"),
        (lambda folder: link(shard_files(folder)[0]), "refused_file"),
    ],
)
def test_what_a_stranger_has_done_is_named_and_nothing_of_it_opened(tmp_path, spoil, rule):
    folder = shards(tmp_path, 10, 2)
    spoil(folder)
    assert errors(verify_checkpoints(tmp_path)) == [rule, "nothing_to_resume"]


def link(path):
    path.rename(path.with_suffix(".real"))
    os.symlink(path.with_suffix(".real"), path)


def test_a_shard_of_another_checkpoint_is_named_though_its_sum_is_right(tmp_path):
    folder = shards(tmp_path, 10, 2)
    rewrite(folder, 1, {"schema": "ckpt.shards.v1", "rank": 0, "step": 10, "state": states(2, 40)[1]})
    told = verify_checkpoints(folder)
    assert "sha256_mismatch" in errors(told)
    assert "is the shard of rank 0 at step 10" in told.findings[0].symptom


def test_cut_saves_and_leftovers_are_listed_with_their_bytes_and_are_no_error(tmp_path):
    one_file(tmp_path, 10)
    folder = shards(tmp_path, 20, 2)
    (tmp_path / "step_00000030").mkdir()
    (tmp_path / "step_00000030" / "rank0.bin").write_bytes(b"x" * 70)
    names = [tmp_path / ".step_00000030.pt.0123456789ab.tmp", folder / ".rank0.bin.0123456789ab.tmp"]
    names.append(folder / "rank1.aaaaaaaaaaaa.bin")
    for path in names:
        path.write_bytes(b"y" * 10)
    (tmp_path / "step_00000040.pt.abandoned").write_bytes(b"z" * 5)
    told = verify_checkpoints(tmp_path)
    assert rules(told) == ["stale_temporaries", "cut_save", "abandoned"]
    assert told.status == 0
    assert sorted(told.leftovers) == sorted(names)
    assert [finding.evidence[0].values["bytes"] for finding in told.findings] == [30, 70, 5]
    assert told.latest.path == folder
    assert told.lost is None


@pytest.mark.parametrize("spoilt", ['{"schema": "ckpt.sha', '{"schema": "weights-2", "shards": []}'])
def test_shards_beside_a_manifest_that_cannot_be_read_are_not_called_leftovers(tmp_path, spoilt):
    folder = shards(tmp_path, 20, 2)
    (folder / "manifest.json").write_text(spoilt)
    (folder / ".rank0.bin.0123456789ab.tmp").write_bytes(b"y" * 10)
    told = verify_checkpoints(folder)
    assert rules(told)[0] in ("damaged_manifest", "unknown_schema")
    assert [path.name for path in told.leftovers] == [".rank0.bin.0123456789ab.tmp"]


def test_a_whole_folder_of_several_kinds_has_no_finding(tmp_path):
    one_file(tmp_path, 10), shards(tmp_path, 20, 3), dcp(tmp_path, 30)
    atomic_save({"weight": torch.ones(3)}, tmp_path / "final.pt")
    told = verify_checkpoints(tmp_path)
    assert told.findings == ()
    assert [one.step for one in told.checkpoints] == [None, 10, 20, 30]
    assert told.latest.step == 30
    assert told.size_bytes == sum(one.size_bytes for one in told.checkpoints)


@pytest.mark.parametrize("seed", range(20))
def test_healthy_folders_have_no_finding(tmp_path, seed):
    made = torch.Generator().manual_seed(seed)
    ranks, count = (int(torch.randint(1, 6, (1,), generator=made)) for _ in range(2))
    for step in range(count):
        (one_file, dcp)[seed % 2](tmp_path, step) if seed % 3 else shards(tmp_path, step, ranks)
    told = verify_checkpoints(tmp_path, world_size=ranks if seed % 3 == 0 else 1)
    assert told.findings == ()


# --- what a resume would lose ---------------------------------------------------------------------------------


def test_what_is_lost_is_told_in_steps_updates_and_minutes(tmp_path):
    one_file(tmp_path, 10), one_file(tmp_path, 20)
    log(tmp_path, 36, ms=30_000.0, skipped=(5, 33))
    lost = verify_checkpoints(tmp_path).lost
    assert (lost.steps, lost.updates, lost.minutes) == (16, 15, 8.0)
    path = tmp_path / "step_00000020.pt"
    path.write_bytes(path.read_bytes()[:-9])
    lost = verify_checkpoints(tmp_path).lost
    assert (lost.steps, lost.updates, lost.minutes) == (26, 25, 13.0)
    (tmp_path / "step_00000010.pt").unlink()
    lost = verify_checkpoints(tmp_path).lost
    assert (lost.steps, lost.updates, lost.minutes) == (36, 34, 18.0)


def test_nothing_is_lost_at_the_end_of_a_run_and_without_a_log_it_is_not_claimed(tmp_path):
    one_file(tmp_path, 10)
    assert verify_checkpoints(tmp_path).lost is None
    log(tmp_path, 10)
    lost = verify_checkpoints(tmp_path).lost
    assert (lost.steps, lost.updates, lost.minutes) == (0, 0, 0.0)


@pytest.mark.parametrize("text", ["", "not,a,log\n1,2,3\n", "step\nfour\n", "\x00\x01", "step,updates\n5"])
def test_a_log_that_is_torn_or_no_log_is_passed_over(tmp_path, text):
    one_file(tmp_path, 10)
    (tmp_path / "metrics.csv").write_text(text)
    assert verify_checkpoints(tmp_path).lost is None


# --- the command ----------------------------------------------------------------------------------------------


def test_the_command_prints_lines_findings_and_what_a_resume_would_take(tmp_path, capsys):
    one_file(tmp_path, 10)
    folder = shards(tmp_path, 20, 3)
    shard_files(folder)[1].unlink()
    (tmp_path / "step_00000030").mkdir()
    log(tmp_path, 25)
    assert main(["verify", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(f"BROKEN {folder}: shard file missing")
    assert lines[0].startswith(f"whole  {tmp_path / 'step_00000010.pt'}: checkpoint ckpt.v1, step 10")
    assert lines[2].startswith(f"cut    {tmp_path / 'step_00000030'}: a save that was never finished")
    assert any(line.startswith("ERROR shard file missing") for line in lines)
    assert any("04_sharded_resume" in line for line in lines)
    assert (
        "latest step_00000010.pt: a resume goes on from step 10, and does 15 steps, 15 updates, 0.4 minutes again"
        in lines
    )
    assert lines[-1].startswith("disk   ")


def test_the_command_as_json(tmp_path, capsys):
    one_file(tmp_path, 10)
    folder = shards(tmp_path, 20, 2)
    (folder / "rank0.bin").write_bytes(b"")
    assert main(["verify", str(tmp_path), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["latest"] == str(tmp_path / "step_00000010.pt")
    assert [(one["whole"], one["step"]) for one in told["checkpoints"]] == [(True, 10), (False, 20)]
    assert told["checkpoints"][1]["faults"][0]["kind"] == told["findings"][0]["rule"] == "partial_shard"
    assert told["lost"] == {"steps": 10, "updates": None, "minutes": None}


@pytest.mark.parametrize(("ranks", "status"), [("2", 0), ("3", 1)])
def test_the_command_judges_the_world_size(tmp_path, capsys, ranks, status):
    folder = shards(tmp_path, 20, 2)
    assert main(["verify", str(folder), "--world-size", ranks]) == status
    told = capsys.readouterr().out
    assert told.startswith("whole  ")
    assert ("ERROR world_size mismatch" in told) == (status == 1)


def test_unusable_input_is_status_2_in_one_line(tmp_path, capsys):
    for argv in ([str(tmp_path / "none")], [str(tmp_path)], [str(tmp_path), "--world-size", "0"]):
        assert main(["verify", *argv]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_nothing_is_changed_by_a_look(tmp_path):
    one_file(tmp_path, 10), shards(tmp_path, 20, 2), dcp(tmp_path, 30)
    (tmp_path / ".step_00000030.pt.0123456789ab.tmp").write_bytes(b"y")

    def all_of():
        return {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in tmp_path.rglob("*") if p.is_file()}

    before = all_of()
    verify_checkpoints(tmp_path, 5)
    assert all_of() == before


def test_the_defaults_of_a_config_without_the_fields_are_the_configs_own(tmp_path):
    (tmp_path / "config.yaml").write_text("batch_size: 4\n")
    kept = TrainConfig().max_rolling_checkpoints + TrainConfig().num_best_checkpoints
    first = one_file(tmp_path, 0)
    for step in range(1, kept + 1):
        shutil.copy(first, tmp_path / f"step_{step:08d}.pt")
    assert rules(verify_checkpoints(tmp_path)) == ["no_rotation"]


def test_a_file_that_is_no_checkpoint_is_told_of_once(tmp_path):
    (tmp_path / "note.pt").write_text("hello")
    told = report(verify_checkpoints(tmp_path / "note.pt"))
    assert told.splitlines()[0] == f"BROKEN {tmp_path / 'note.pt'}: torn file"
    assert told.count("no sha256 at its end") == 1
    assert told.count("ERROR") == 1


def test_what_a_resume_would_refuse_is_said_so_and_one_cut_save_is_not_refused(tmp_path, capsys):
    for step in (1, 2):
        folder = tmp_path / f"step_{step:08d}"
        folder.mkdir()
        (folder / "rank0.bin").write_bytes(b"weights")
    assert main(["verify", str(tmp_path)]) == 1
    assert "latest -: a resume is refused until they are moved away" in capsys.readouterr().out
    assert verify_checkpoints(tmp_path).to_json()["resume_refused"]
    shutil.rmtree(folder)
    assert main(["verify", str(tmp_path)]) == 0
    assert "latest -: a resume begins anew" in capsys.readouterr().out
    (tmp_path / "step_00000001" / "manifest.json").write_text("{")
    assert main(["verify", str(tmp_path)]) == 1
    assert "a resume is refused" in capsys.readouterr().out

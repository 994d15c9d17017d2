"""What the doctor reads in the text of a crash: messages that torch, the system and our own errors really write."""

import errno
import json
import os
import traceback

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from safetrain_core import (
    CheckpointError,
    ThermalAbort,
    TrainingFailed,
    TrainState,
    diagnose,
    load_checkpoint,
    load_sharded,
    read_log,
    save_checkpoint,
    save_sharded,
)
from safetrain_core.cli import main
from safetrain_core.diagnose.crash_texts import CRASHES, CrashTextError, crash_findings


def written(work, path):
    """The traceback that ``work`` ends in, as Python prints it."""
    try:
        work()
    except BaseException:  # noqa: BLE001
        path.write_text(traceback.format_exc())
        return path
    raise AssertionError("it did not raise")


def rules(findings):
    return [finding.rule for finding in findings]


class Huge(nn.Module):
    def forward(self, x):
        return x + torch.empty(2**60).sum()


class HugeGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + torch.empty(2**60).sum()


def memory_in_forward(tmp):
    nn.Sequential(nn.Linear(2, 2), Huge())(torch.ones(1, 2))


def memory_in_backward(tmp):
    HugeGradient.apply(torch.ones(2, requires_grad=True)).sum().backward()


def memory_in_state(tmp):
    class Wide(torch.optim.SGD):
        def step(self, closure=None):
            torch.empty(2**60)

    optimizer = Wide(nn.Linear(1, 1).parameters())
    optimizer.step()


def memory_while_moved(tmp):
    nn.Linear(2, 2)._apply(lambda weight: torch.empty(2**60))


def memory_somewhere(tmp):
    torch.empty(2**60)


def unscaled_twice(tmp):
    model, scaler = nn.Linear(2, 2), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters())
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def nothing_scaled(tmp):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.step(torch.optim.SGD(nn.Linear(2, 2).parameters()))


def update_without_step(tmp):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.update()


def backward_twice(tmp):
    loss = nn.Linear(2, 2)(torch.ones(1, 2)).square().sum()
    loss.backward()
    loss.backward()


def recompute_with_a_side_effect(tmp):
    calls = []

    def layer(x):
        calls.append(x)
        return x.relu().sigmoid() if len(calls) == 1 else x.relu()

    checkpoint(layer, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()


def cut_file(tmp):
    torch.save(nn.Linear(9, 9).state_dict(), tmp / "a.pt")
    whole = (tmp / "a.pt").read_bytes()
    (tmp / "a.pt").write_bytes(whole[: len(whole) // 2])
    torch.load(tmp / "a.pt")


def cut_old_file(tmp):
    torch.save(nn.Linear(99, 9).state_dict(), tmp / "a.pt", _use_new_zipfile_serialization=False)
    whole = (tmp / "a.pt").read_bytes()
    (tmp / "a.pt").write_bytes(whole[:-10])
    torch.load(tmp / "a.pt")


def pickled_model(tmp):
    torch.save(nn.Linear(2, 2), tmp / "a.pt")
    torch.load(tmp / "a.pt")


def other_sizes(tmp):
    nn.Linear(3, 3).load_state_dict(nn.Linear(2, 2).state_dict())


def other_names(tmp):
    nn.Linear(3, 3).load_state_dict({f"module.{k}": v for k, v in nn.Linear(3, 3).state_dict().items()})


def no_room(tmp):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp / "a.pt"))


def ours(tmp, width=2):
    model = nn.Linear(width, 2)
    return model, torch.optim.AdamW(model.parameters()), None


def ours_torn(tmp):
    save_checkpoint(*ours(tmp), TrainState(), tmp / "b.pt")
    whole = (tmp / "b.pt").read_bytes()
    (tmp / "b.pt").write_bytes(whole[: len(whole) // 2])
    load_checkpoint(tmp / "b.pt", *ours(tmp))


def ours_altered(tmp):
    save_checkpoint(*ours(tmp), TrainState(), tmp / "b.pt")
    whole = bytearray((tmp / "b.pt").read_bytes())
    whole[len(whole) // 3] ^= 1
    (tmp / "b.pt").write_bytes(whole)
    load_checkpoint(tmp / "b.pt", *ours(tmp))


def ours_of_another_model(tmp):
    save_checkpoint(*ours(tmp), TrainState(), tmp / "b.pt")
    load_checkpoint(tmp / "b.pt", *ours(tmp, width=3))


def shards(tmp):
    folder = tmp / "shards"
    save_sharded({rank: {"param_shard": torch.ones(4)} for rank in range(2)}, folder, 1)
    return folder


def ours_of_other_ranks(tmp):
    load_sharded(shards(tmp), 3)


def ours_cut_shard(tmp):
    folder = shards(tmp)
    path = next(folder.glob("rank1*"))
    path.write_bytes(path.read_bytes()[:-1])
    load_sharded(folder, 2)


def ours_without_a_shard(tmp):
    folder = shards(tmp)
    next(folder.glob("rank1*")).unlink()
    load_sharded(folder, 2)


def ours_of_another_schema(tmp):
    folder = shards(tmp)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "schema": "other.v1"}))
    load_sharded(folder, 2)


def too_hot(tmp):
    raise ThermalAbort("gpu 0: 96 C is above critical 95 C; let it cool, look at fans and airflow, then resume")


def too_many_bad_steps(tmp):
    raise TrainingFailed(
        "loss=nan at step 8 (non_finite_loss), 3 of 3 retries used; resume from a.pt", step=8, reason="non_finite_loss"
    )


REAL = {
    memory_in_forward: ("does_not_fit", "memory ran out in the forward pass"),
    memory_in_backward: ("does_not_fit", "memory ran out in the backward pass"),
    memory_in_state: ("weights_do_not_fit", "memory ran out in the optimizer's step"),
    memory_while_moved: ("weights_do_not_fit", "memory ran out while the model was moved"),
    memory_somewhere: ("out_of_memory", "memory ran out"),
    unscaled_twice: ("unscale_twice", ""),
    nothing_scaled: ("no_inf_checks", ""),
    update_without_step: ("no_inf_checks", ""),
    backward_twice: ("graph_used_twice", ""),
    recompute_with_a_side_effect: ("recompute_differs", ""),
    cut_file: ("torn_file", ""),
    cut_old_file: ("torn_file", ""),
    pickled_model: ("not_readable", ""),
    other_sizes: ("other_model", ""),
    other_names: ("other_model", ""),
    no_room: ("disk_full", ""),
    ours_torn: ("torn_file", ""),
    ours_altered: ("sha256_mismatch", ""),
    ours_of_another_model: ("other_model", ""),
    ours_of_other_ranks: ("world_size_mismatch", ""),
    ours_cut_shard: ("sha256_mismatch", ""),
    ours_without_a_shard: ("shard_file_missing", ""),
    ours_of_another_schema: ("unknown_schema", ""),
    too_hot: ("thermal_abort", ""),
    too_many_bad_steps: ("retries_used", ""),
}


@pytest.mark.parametrize("work", REAL, ids=lambda work: work.__name__)
def test_an_error_that_was_really_raised_is_named(work, tmp_path):
    rule, symptom = REAL[work]
    (finding,) = diagnose(written(lambda: work(tmp_path), tmp_path / "crash.log"))
    assert (finding.rule, finding.severity) == (rule, "error")
    assert finding.symptom.startswith(symptom)
    told = finding.evidence[0].values
    assert told["text"][:30] in (tmp_path / "crash.log").read_text().splitlines()[told["line"] - 1]
    assert finding.cause
    assert finding.fix
    assert finding.lesson


#: As other machines write them; none of these can be raised here.
ELSEWHERE = {
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB "
    "of which 1.20 GiB is free.": "out_of_memory",
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 7.92 GiB total capacity)": "out_of_memory",
    "[rank3]:[E1201 10:00:00.1 ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=81, OpType=ALLREDUCE, NumelIn=1, Timeout(ms)=600000) ran for 600049 ms": "collective_timeout",
    "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to "
    "complete": "collective_timeout",
    "safetrain_core.errors.RankFailed: rank 2 had not ended after timeout_s=20 (1 of 4 ranks); all were ended. Look "
    "for a rank that waits for another, or give it more time": "collective_timeout",
    "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:5512": "rank_fell",
    "  exitcode  : -9 (pid: 4711)": "rank_fell",
}


@pytest.mark.parametrize("line", ELSEWHERE, ids=lambda line: line[:40])
def test_messages_of_other_machines_are_named(line, tmp_path):
    path = tmp_path / "stderr.txt"
    path.write_text(f"epoch 3, step 200\n{line}\n")
    (finding,) = diagnose(path)
    assert (finding.rule, finding.evidence[0].values["line"]) == (ELSEWHERE[line], 2)


def test_every_message_of_the_table_has_a_test():
    tested = {rule for rule, _ in REAL.values()} | set(ELSEWHERE.values())
    assert {crash.rule for crash in CRASHES} <= tested


def test_a_ranks_own_error_is_told_and_what_it_did_to_the_others_is_not(tmp_path):
    path = tmp_path / "ranks.log"
    path.write_text(
        "[rank0]: RuntimeError: Timed out waiting 1800000ms for recv operation to complete\n"
        "[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "/a/torch/nn/modules/linear.py", line 134, in forward\n'
        "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
        "[rank2]: RuntimeError: Connection closed by peer [127.0.0.1]:5512\n"
    )
    assert rules(diagnose(path)) == ["does_not_fit"]


def test_the_same_message_of_many_ranks_is_one_finding(tmp_path):
    path = tmp_path / "ranks.log"
    path.write_text("".join(f"[rank{r}]: OSError: [Errno 28] No space left on device: 'a'\n" for r in range(8)))
    (finding,) = diagnose(path)
    assert [evidence.values["line"] for evidence in finding.evidence] == [1, 2, 3]


def test_colours_and_powershells_encoding_are_read(tmp_path):
    path = tmp_path / "crash.log"
    path.write_text("\x1b[31mRuntimeError: size \x1b[0mmismatch for 0.weight: copying a param\n", encoding="utf-16")
    (finding,) = diagnose(path)
    assert finding.rule == "other_model"
    assert "\x1b" not in finding.evidence[0].values["text"]


@pytest.mark.parametrize(
    "text", ["Traceback (most recent call last):\nKeyError: 'x'\n", "all is well\n", "", "[1, 2\n"]
)
def test_a_text_without_a_known_message_is_refused_as_ever(text, tmp_path):
    path = tmp_path / "crash.log"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"crash\.log") as refused:
        diagnose(path)
    assert not isinstance(refused.value, CrashTextError)


def test_a_file_of_bytes_is_not_searched(tmp_path):
    path = tmp_path / "a.pt"
    path.write_bytes(b"PK\0\0No space left on device")
    assert crash_findings(path) == []
    with pytest.raises(ValueError, match="holds bytes"):
        diagnose(path)


def test_who_wants_a_log_is_told_what_it_is_instead(tmp_path):
    path = written(lambda: no_room(tmp_path), tmp_path / "crash.log")
    with pytest.raises(ValueError, match=r"no log but the text of a crash \(the disk is full\); diagnose"):
        read_log(path)
    with pytest.raises(ValueError, match="no log but the text of a crash"):
        diagnose([{"step": 1, "loss": 1.0}], baseline=path)


@pytest.mark.parametrize("jsonl", [True, False])
def test_a_traceback_behind_the_rows_of_a_log_is_told_too(jsonl, tmp_path):
    rows = [{"step": s, "loss": 3 - s / 20} for s in range(1, 31)]
    path = tmp_path / "log.txt"
    lines = [json.dumps(r) for r in rows] if jsonl else ["step,loss", *(f"{r['step']},{r['loss']}" for r in rows)]
    crash = written(lambda: memory_in_forward(tmp_path), tmp_path / "crash").read_text()
    path.write_text("\n".join(lines) + "\n" + crash)
    found = diagnose(path)
    assert rules(found)[0] == "does_not_fit"
    assert not {"log_ragged", "log_torn", "log_not_numbers"} & set(rules(found)), "the traceback's lines are no rows"


def test_the_command_names_it_with_status_1(tmp_path, capsys):
    path = written(lambda: ours_of_other_ranks(tmp_path), tmp_path / "crash.log")
    assert main(["diagnose", str(path)]) == 1
    told = capsys.readouterr().out
    assert "ERROR the checkpoint is of another number of ranks" in told
    assert "world_size mismatch" in told
    assert main(["diagnose", str(path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[str(path)][0]["rule"] == "world_size_mismatch"
    assert main(["diagnose", str(path), "--plot", str(tmp_path / "a.png")]) == 1
    assert "picture: none, since the text of a crash has no curves" in capsys.readouterr().out


def test_our_checkpoint_errors_are_what_they_are_taken_for(tmp_path):
    for work in (ours_torn, ours_altered, ours_of_other_ranks, ours_cut_shard):
        with pytest.raises(CheckpointError):
            work(tmp_path)

"""Whole runs of SafeTrainer on several real ranks (gloo), sharded by FSDP2, resumed on as many, fewer and more."""

import functools
import json
import math
import shutil
import time

import needs
import pytest
import run_workers as work
import torch

from safetrain_core import CheckpointError, MiniGPT, RankFailed, SafeTrainer, TrainConfig, launch
from safetrain_core.checkpoint.dcp import DcpReader

pytestmark = needs.fsdp2


def on(ranks, worker, *args, **kwargs):
    """What each rank told. Keyword arguments travel through a partial of the module's function."""
    return launch(functools.partial(worker, **kwargs), ranks, *args, timeout_s=60)


def same_on_all(reports, *names):
    for name in names:
        assert all(report[name] == reports[0][name] for report in reports), name


def folders(place):
    return sorted(path.name for path in place.iterdir() if path.name.startswith("step_"))


def norm_of(folder):
    """The L2 norm of the weights in a checkpoint, read by one process."""
    reader = DcpReader(folder)
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in reader.shapes.items()}
    reader.fill(tensors)
    names = [name for name, _ in MiniGPT(work.SIZE).named_parameters()]
    return math.sqrt(sum(tensors[f"model/{name}"].double().square().sum().item() for name in names))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run on two ranks, its folder and reports."""
    place = tmp_path_factory.mktemp("whole")
    return place, on(2, work.run, place)


def test_rows_counters_and_data_position_are_the_same_on_every_rank(whole):
    place, reports = whole
    same_on_all(reports, "rows", "updates", "retries", "position", "status")
    assert reports[0]["updates"] == 12
    assert reports[0]["digest"] != reports[1]["digest"], "each rank holds another part"
    assert folders(place) == ["step_00000004", "step_00000008", "step_00000012"]


@pytest.mark.parametrize("wrap", ["fsdp", "ddp"])
def test_a_run_resumed_on_as_many_ranks_is_bit_for_bit_the_same_run(tmp_path, wrap):
    first = on(2, work.run, tmp_path / "a", wrap=wrap)
    second = on(2, work.run, tmp_path / "b", str(tmp_path / "a" / "step_00000008"), wrap=wrap)
    for rank in range(2):
        assert second[rank]["rows"] == first[rank]["rows"][8:]
        assert second[rank]["digest"] == first[rank]["digest"]


def test_fsdp_and_ddp_make_the_same_losses(tmp_path, whole):
    ddp = on(2, work.run, tmp_path, wrap="ddp")
    for (_, loss, norm, *_), (_, loss2, norm2, *_) in zip(ddp[0]["rows"], whole[1][0]["rows"], strict=True):
        assert loss == pytest.approx(loss2, rel=1e-5)
        assert norm == pytest.approx(norm2, rel=1e-4)


@pytest.mark.parametrize(("ranks", "position"), [(1, (1, 8)), (3, (2, 4))])
def test_a_run_goes_on_with_another_number_of_ranks_from_the_same_weights_and_samples(tmp_path, whole, ranks, position):
    place = whole[0]
    shutil.copytree(place / "step_00000004", tmp_path / "step_00000004")
    told = on(ranks, work.run, tmp_path, True, wrap="fsdp" if ranks > 1 else "none")
    same_on_all(told, "rows", "updates", "position")
    assert told[0]["began"][0].endswith("step_00000004")
    assert told[0]["rows"][0][0] == 5
    # Behind were 4 updates x 2 micro-batches x 2 ranks = 16 of the epoch's 24 batches: 16 of 24 for one rank, 5 of 8
    # for each of three; then came 8 windows of 2, of which an epoch's last may be short.
    assert told[0]["position"] == position
    assert told[0]["began"][2] == pytest.approx(norm_of(place / "step_00000004"), rel=1e-12)


def test_what_one_process_has_saved_goes_on_with_several_and_back(tmp_path):
    alone = on(1, work.run, tmp_path, wrap="none")
    assert folders(tmp_path)[-1] == "step_00000012.pt"
    several = on(2, work.run, tmp_path, True, max_steps=14, scheduler_total_steps=12)
    assert several[0]["began"][0].endswith("step_00000012.pt")
    assert [row[0] for row in several[0]["rows"]] == [13, 14]
    assert folders(tmp_path)[-1] == "step_00000014"
    back = on(1, work.run, tmp_path, True, max_steps=16, scheduler_total_steps=12, wrap="none")
    assert back[0]["began"][0].endswith("step_00000014")
    assert back[0]["updates"] == 16
    assert alone[0]["status"] == "completed"


def test_nan_on_rank_1_only_skips_the_step_on_every_rank_with_its_reason(tmp_path):
    reports = on(2, work.run_with_nan, tmp_path, 1, 3)
    same_on_all(reports, "updates", "retries")
    for report in reports:
        assert [row[4] for row in report["rows"]] == [None, None, "non_finite_loss", *[None] * 10]
        assert report["retries"] == 1


def test_retries_used_up_stop_every_rank_with_the_newest_good_checkpoint(tmp_path):
    reports = on(2, work.run_until_it_fails, tmp_path)
    assert reports[0] == reports[1]
    assert reports[0][:3] == ("TrainingFailed", "non_finite_loss", 5)


def test_an_exception_on_one_rank_ends_all_at_once_with_that_error_and_whole_checkpoints(tmp_path):
    begun = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1 raised LookupError: no such sample at step 7") as fall:
        on(2, work.run_with_exception, tmp_path, 1, 7)
    assert time.monotonic() - begun < 30, "well within the bound of 60 s"
    assert fall.value.rank == 1
    assert folders(tmp_path) == ["step_00000004"]
    assert norm_of(tmp_path / "step_00000004") > 0


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_to_one_rank_ends_all_at_one_step_with_a_checkpoint(tmp_path, whole, name):
    reports = on(2, work.run_with_signal, tmp_path, 1, 6, work.SIGNALS[name])
    same_on_all(reports, "updates", "signal", "status")
    assert (reports[0]["status"], reports[0]["signal"], reports[0]["updates"]) == ("interrupted", name, 6)
    assert folders(tmp_path) == ["step_00000004", "step_00000006"]
    rest = on(2, work.run, tmp_path, True)
    for rank in range(2):
        assert rest[rank]["digest"] == whole[1][rank]["digest"], "stopped and resumed, it is the same run"


def test_sigusr1_to_one_rank_saves_on_all_and_goes_on(tmp_path):
    reports = on(2, work.run_with_signal, tmp_path, 1, 6, work.SIGNALS["SIGUSR1"])
    assert reports[0]["status"] == "completed"
    assert folders(tmp_path) == ["step_00000004", "step_00000006", "step_00000008", "step_00000012"]


def test_the_clock_of_rank_0_decides_for_all_when_a_checkpoint_is_due(tmp_path):
    reports = on(2, work.run, tmp_path, checkpoint_every_seconds=1e-6, checkpoint_every_n_steps=1000, max_steps=4)
    same_on_all(reports, "rows")
    assert len(folders(tmp_path)) == 4


def test_poisoned_weights_on_one_rank_send_every_rank_back_to_the_last_good_look(tmp_path):
    reports = on(2, work.run_with_poison, tmp_path, 1, 4, nan_check_interval=2)
    same_on_all(reports, "updates", "retries")
    reasons = [row[4] for row in reports[0]["rows"]]
    assert reasons[3] == "non_finite_state"
    assert reasons[:3] + reasons[4:] == [None] * (len(reasons) - 1)


def test_a_loss_jump_rolls_every_rank_back_and_leaves_the_window_out(tmp_path):
    reports = on(2, work.run_with_jump, tmp_path, 7)
    same_on_all(reports, "rows", "updates", "retries")
    assert [row[4] for row in reports[0]["rows"]].count("loss_jump") == 1
    lines = (tmp_path / "bad_windows.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"epoch": 1, "batch_in_epoch": 0}]
    assert reports[0]["updates"] == 12


def test_rotation_and_the_best_work_on_folders(tmp_path):
    reports = on(
        2, work.run, tmp_path, val=True, eval_every_n_steps=2, max_rolling_checkpoints=1, checkpoint_every_n_steps=2
    )
    same_on_all(reports, "val_loss")
    best = json.loads((tmp_path / "best.json").read_text())
    assert set(folders(tmp_path)) == {"step_00000012", *best}


def test_a_torn_newest_folder_is_passed_over_on_every_rank(tmp_path, whole):
    shutil.copytree(whole[0], tmp_path, dirs_exist_ok=True)
    torn = next((tmp_path / "step_00000012").glob("rank1.*.bin"))
    torn.write_bytes(torn.read_bytes()[:-1])
    reports = on(2, work.run, tmp_path, True)
    assert {report["began"][0].rsplit("/", 1)[1] for report in reports} == {"step_00000008"}
    assert [report["digest"] for report in reports] == [report["digest"] for report in whole[1]]


def test_buffers_that_differ_between_ranks_come_back_to_each(tmp_path):
    saved = launch(work.buffers_after_resume, 2, tmp_path, None)
    assert saved[0] != saved[1]
    assert launch(work.buffers_after_resume, 2, tmp_path / "b", str(tmp_path / "step_00000004")) == saved


def test_async_save_is_refused_with_several_ranks(tmp_path):
    assert all("async_save" in told for told in launch(work.refused, 2, tmp_path))


def test_a_folder_with_ranks_checkpoints_is_no_place_for_a_fresh_run_of_one_process(whole):
    made = work.trainer(whole[0], wrap="none")
    with pytest.raises(ValueError, match="holds checkpoints of a run already"):
        made.fit()


def test_a_model_that_does_not_fit_is_refused_and_nothing_is_loaded(whole, tmp_path):
    model = torch.nn.Linear(2, 1)
    before = model.weight.clone()
    made = SafeTrainer(model, TrainConfig(max_steps=1), [(torch.ones(1, 2), torch.ones(1, 1))], checkpoint_dir=tmp_path)
    with pytest.raises(CheckpointError, match="does not fit"):
        made.resume(whole[0] / "step_00000012")
    assert torch.equal(model.weight, before)

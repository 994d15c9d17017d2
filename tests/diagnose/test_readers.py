"""Whatever people have: the same run in every form gives the same findings; what is no log gets a clear answer."""

import json
import sys
from pathlib import Path

import pytest
from corpus import broken, write_csv
from loops import Setup, train

from safetrain_core import StepLog, diagnose, read_log
from safetrain_core.cli import main
from safetrain_core.diagnose.readers import find_log
from safetrain_core.diagnose.search import files_in


def rules(source, **more):
    return [finding.rule for finding in diagnose(source, **more) if finding.severity != "info"]


@pytest.fixture(scope="module")
def spiked():
    """Rows of a run with a spike, its step first."""
    return broken("spike without clipping", 0)[0]


def test_csv_jsonl_json_and_rows_of_one_run_agree(spiked, tmp_path):
    write_csv(spiked, tmp_path / "a.csv")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in spiked))
    (tmp_path / "a.json").write_text(json.dumps(spiked))
    expected = rules(spiked)
    assert expected == ["spike_stays"]
    for name in ("a.csv", "a.jsonl", "a.json"):
        assert rules(tmp_path / name) == expected
        assert rules(str(tmp_path / name)) == expected


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_separators_and_decimal_commas_are_recognised(separator, tmp_path):
    lines = [separator.join(("step", "loss", "lr"))]
    for step in range(1, 31):
        loss = f"{5 - step / 10:.2f}" if step < 20 else "nan"
        lines.append(separator.join((str(step), loss if separator != ";" else loss.replace(".", ","), "0.1")))
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    log = read_log(tmp_path / "log.csv")
    assert log.series["loss"].values[0] == 4.9
    assert rules(log) == ["nan_stays"]


def test_a_missing_value_is_not_a_nan():
    rows = [{"step": s, "loss": None if s % 3 else 4 - s / 50} for s in range(1, 61)]
    assert rules(rows) == []
    assert len(read_log(rows).series["loss"]) == 20


def test_nan_as_text_as_number_and_as_bare_word_is_a_nan(tmp_path):
    for word in ("nan", "NaN", "-nan", "inf"):
        (tmp_path / "log.csv").write_text(
            "step,loss\n" + "".join(f"{s},{word if s > 9 else 3}\n" for s in range(1, 20))
        )
        assert "nan_stays" in rules(tmp_path / "log.csv")
    (tmp_path / "log.jsonl").write_text("".join(f'{{"step": {s}, "loss": NaN}}\n' for s in range(5)))
    assert "nan_stays" in rules(tmp_path / "log.jsonl")


def test_rows_of_our_own_trainer_are_read_as_they_are():
    rows = [StepLog(s, 0.1, float("inf"), None, 2.0, 4096.0, True, "non_finite_grad") for s in range(1, 9)]
    assert "scale_never_moves" in rules(rows)


class Frame:
    """What the reader asks of a pandas frame: columns, to_dict, a column by its name, a length."""

    def __init__(self, rows):
        self.columns = list(dict.fromkeys(name for row in rows for name in row))
        self._rows = rows

    def to_dict(self):
        raise AssertionError("the reader goes by columns")

    def __getitem__(self, name):
        return [row.get(name, float("nan")) for row in self._rows]

    def __len__(self):
        return len(self._rows)


def test_a_frame_is_read_by_its_columns_and_its_gaps_stay_gaps(spiked):
    assert rules(Frame(spiked)) == ["spike_stays"]
    gaps = [{"step": s, "loss": float("nan") if s % 4 == 0 else 3 - s / 100} for s in range(1, 81)]
    assert rules(Frame(gaps)) == []
    ends = [{"step": s, "loss": float("nan") if s > 50 else 3 - s / 100} for s in range(1, 81)]
    assert rules(Frame(ends)) == ["nan_stays"]


def test_a_real_pandas_frame_reads_like_our_imitation(spiked):
    pandas = pytest.importorskip("pandas")
    assert rules(pandas.DataFrame(spiked)) == ["spike_stays"]


def test_unusual_columns_are_named_by_hand(tmp_path):
    (tmp_path / "log.csv").write_text("n,my_loss\n" + "".join(f"{s},{'nan' if s > 9 else 3}\n" for s in range(1, 20)))
    with pytest.raises(ValueError, match="--columns loss=my_loss"):
        diagnose(tmp_path / "log.csv")
    assert rules(tmp_path / "log.csv", columns={"loss": "my_loss", "step": "n"}) == ["nan_stays"]
    with pytest.raises(ValueError, match=r"no column my_los; did you mean my_loss\?"):
        diagnose(tmp_path / "log.csv", columns={"loss": "my_los"})
    with pytest.raises(ValueError, match=r"los is none of .*; did you mean loss\?"):
        diagnose(tmp_path / "log.csv", columns={"los": "my_loss"})


BAD = {
    "empty": ("", "is empty"),
    "blank lines": ("\n\n\n", "is empty"),
    "header only": ("step,loss\n", "no row"),
    "no header": ("1,2.5\n2,2.4\n", "no header"),
    "something else": ("name,city\nann,rome\n", "does not look like a training log"),
    "one sentence": ("hello there\n", "no row"),
    "broken json": ('{"step": 1, "loss": \n', "neither JSON nor JSON lines"),
    "json of something else": ('{"a": [1, 2]}', "does not look like a training log"),
    "json list of numbers": ("[1, 2, 3]", "not a dict of columns"),
    "bytes": ("\0\1\2", "holds bytes"),
    "an open quote": ('step,loss\n1,"2\n' + "3,4\n" * 40_000, "no table that can be read"),
}


@pytest.mark.parametrize("case", BAD)
def test_unusable_input_gets_a_clear_answer_and_status_2(case, tmp_path, capsys):
    text, says = BAD[case]
    path = tmp_path / "log.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=says):
        diagnose(path)
    assert main(["diagnose", str(path)]) == 2
    assert says in capsys.readouterr().err


def test_what_does_not_exist_and_what_is_ambiguous_is_named(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        diagnose(tmp_path / "none.csv")
    with pytest.raises(ValueError, match="holds no log"):
        diagnose(tmp_path)
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("step,loss\n1,2\n")
    with pytest.raises(ValueError, match=r"several logs \(a.csv, b.csv\)"):
        diagnose(tmp_path)
    with pytest.raises(ValueError, match="an int is no log"):
        diagnose(3)


def test_the_newest_checkpoint_of_hugging_face_is_the_one_that_is_read(tmp_path):
    for step in (9, 10, 2):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        history = [{"step": s, "loss": 2.0} for s in range(1, step + 1)]
        (folder / "trainer_state.json").write_text(
            json.dumps({"log_history": [*history, {"train_runtime": 3, "step": 9}]})
        )
    assert read_log(tmp_path).lines == 10


def test_few_rows_and_nothing_but_nan():
    found = diagnose([{"step": 1, "loss": 2.0}])
    assert [f.rule for f in found] == ["healthy", "not_checked"]
    assert "1 step, too few to say much" in found[0].symptom
    assert rules([{"step": s, "loss": float("nan")} for s in range(1, 8)]) == ["nan_stays"]


def test_strings_where_numbers_belong_are_named_and_left_out(tmp_path):
    rows = [f"{s},{'tensor(2.5)' if s == 7 else 3 - s / 50},0.1" for s in range(1, 40)]
    (tmp_path / "log.csv").write_text("step,loss,lr\n" + "\n".join(rows) + "\n")
    found = diagnose(tmp_path / "log.csv")
    assert [f.rule for f in found if f.severity != "info"] == ["log_not_numbers"]
    assert found[0].evidence[0].values == {"row": 7, "column": "loss", "cell": "tensor(2.5)"}


def test_torn_ragged_and_doubled_headers_are_told_and_the_rest_is_judged(tmp_path):
    path = tmp_path / "log.csv"
    whole = "".join(f"{s},{3 - s / 50},0.1\n" for s in range(1, 40))
    path.write_text("step,loss,lr\n" + whole + "40,2.")
    assert rules(path) == ["log_torn"]
    path.write_text("step,loss,lr\n" + whole + "step,loss,lr\n" + "40,2.1,0.1\n")
    assert rules(path) == ["log_header_twice"]
    path.write_text("step,loss,lr\n" + whole + "40,2.1,0.1,7\n41,2.1,0.1\n")
    assert rules(path) == ["log_ragged"]
    (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": 2}\n{"step": 2, "lo')
    assert rules(tmp_path / "log.jsonl") == ["log_torn"]


def test_shuffled_steps_are_sorted_and_told():
    rows = train(Setup(3, steps=60))
    mixed = rows[::2] + rows[1::2][::-1]
    assert rules(mixed) == ["log_backwards"]
    assert read_log(mixed).series["loss"].steps.tolist() == [row["step"] for row in rows]


def test_a_second_run_in_the_same_file_is_judged_by_itself():
    first, second = train(Setup(4, steps=60)), train(Setup(5, steps=30))
    log = read_log(first + second)
    assert log.series["loss"].values.tolist() == [row["loss"] for row in second]
    assert rules(first + second) == ["log_backwards"]


def test_lightning_writes_several_rows_for_a_step_and_that_is_no_repetition(tmp_path):
    text = "epoch,grad_norm,lr-SGD,step,train_loss,val_loss\n"
    for step in range(40):
        text += f",,0.3,{step},,\n0,0.8,,{step},{3 - step / 50},\n" + (f"0,,,{step},,2.9\n" if step % 10 == 9 else "")
    (tmp_path / "metrics.csv").write_text(text)
    assert rules(tmp_path) == []
    assert set(read_log(tmp_path).series) >= {"loss", "lr", "norm", "val_loss"}


def test_tensorboard_events_are_read_or_the_missing_package_is_named(tmp_path, monkeypatch, spiked):
    (tmp_path / "events.out.tfevents.1.x").write_bytes(b"\0" * 20)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tensorboard", None)
        patch.setitem(sys.modules, "tensorboard.backend.event_processing.event_accumulator", None)
        with pytest.raises(ValueError, match="pip install tensorboard"):
            read_log(tmp_path)
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    folder = tmp_path / "tb"
    with SummaryWriter(str(folder)) as writer:
        for row in spiked:
            for name in ("loss", "lr", "grad_norm"):
                writer.add_scalar(f"train/{name}", row[name], row["step"])
    assert rules(folder) == ["spike_stays"]


#: Runs of other trainers, made on a tiny model with the fault that their name says (transformers 5.24, lightning 2.6).
OTHERS = {
    "huggingface_healthy.json": [],
    "huggingface_nan.json": ["nan_stays"],
    "huggingface_k_times.json": ["loss_times_k"],
    "lightning_healthy.csv": [],
    "lightning_spike.csv": ["spike_stays"],
}


@pytest.mark.parametrize("name", OTHERS)
def test_logs_of_other_trainers_are_diagnosed_rightly(name):
    assert rules(Path(__file__).parent / "logs" / name) == OTHERS[name]


def test_hugging_face_logs_a_loss_of_0_for_nan_and_is_not_believed():
    history = json.loads((Path(__file__).parent / "logs" / "huggingface_nan.json").read_text())["log_history"]
    late = [row for row in history if row["step"] > 31 and "loss" in row]
    assert late
    assert all(row["loss"] == 0 and row["grad_norm"] != row["grad_norm"] for row in late)
    found = diagnose(history[:-1])[0]
    assert (found.rule, found.evidence[0].step) == ("nan_stays", 31)


def test_a_folder_is_searched_a_few_levels_deep_and_the_refusal_says_so(tmp_path):
    deep = tmp_path / "a" / "b" / "c" / "d"
    deep.mkdir(parents=True)
    (deep / "metrics.csv").write_text("step,loss\n1,2\n2,1\n")
    assert find_log(tmp_path) == deep / "metrics.csv"
    (deep / "e").mkdir()
    (deep / "metrics.csv").rename(deep / "e" / "metrics.csv")
    with pytest.raises(ValueError, match=r"holds no log .*, nor do the folders in it, 4 levels deep; name a file"):
        find_log(tmp_path)


def test_no_more_files_are_looked_at_than_a_number_the_nearest_first(tmp_path):
    for name in ("a/1", "a/2", "b/c/3", "4"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "b" / "again").symlink_to(tmp_path, target_is_directory=True)
    assert [path.name for path in files_in(tmp_path)] == ["4", "1", "2", "again", "3"]
    assert [path.name for path in files_in(tmp_path, most=2)] == ["4", "1"]


def test_printed_rows_are_a_log_with_a_crash_behind_them(tmp_path):
    path = tmp_path / "run.log"
    rows = [StepLog(step, 0.1, 2.0, 1.0, 3 - step / 40, None) for step in range(1, 31)]
    rows[11] = StepLog(12, 0.1, None, None, None, None, skipped=True, skip_reason="non_finite_loss")
    path.write_text("on cpu, 577 weights\n" + "".join(f"{row}\n" for row in rows))
    log = read_log(path)
    assert log.series["loss"].values.tolist() == [3 - step / 40 for step in range(1, 31) if step != 12]
    assert log.texts["skip_reason"] == {11: "non_finite_loss"}
    with path.open("a") as file:
        file.write("Traceback (most recent call last):\n  ...\nOSError: [Errno 28] No space left on device\n")
    assert diagnose(path)[0].rule == "disk_full"


def test_utf_16_is_read_as_powershell_writes_it_and_unwritten_blocks_at_the_end_are_a_torn_line(tmp_path):
    text = "step,loss\n" + "".join(f"{step},{9 - step / 10}\n" for step in range(1, 31))
    for name, data in {"wide.csv": text.encode("utf-16"), "cut.csv": text.encode() + b"31,5.\0\0\0\0"}.items():
        (tmp_path / name).write_bytes(data)
        assert read_log(tmp_path / name).series["loss"].values[:30].tolist() == [9 - s / 10 for s in range(1, 31)]
    (tmp_path / "wide.jsonl").write_bytes('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n'.encode("utf-16"))
    assert read_log(tmp_path / "wide.jsonl").series["loss"].values.tolist() == [2.0, 1.0]


def test_a_traceback_behind_the_rows_of_a_csv_is_no_fault_of_the_rows(tmp_path):
    path = tmp_path / "metrics.csv"
    trace = "Traceback (most recent call last):\n  File x, line 3, in y\ntorch.OutOfMemoryError: CUDA out of memory.\n"
    path.write_text("step,loss\n" + "".join(f"{step},{9 - step / 10}\n" for step in range(1, 31)) + trace)
    assert [finding.rule for finding in diagnose(path) if finding.severity != "info"] == ["out_of_memory"]


@pytest.mark.parametrize("text", ["x" * 10**6, "[" * 100_000, "step,loss\n1,2\n" + "3," + "y" * 10**6])
def test_what_breaks_a_parser_is_a_clear_answer_and_no_traceback(text, tmp_path, capsys):
    path = tmp_path / "huge.csv"
    path.write_text(text)
    assert main(["diagnose", str(path)]) == 2
    told = capsys.readouterr().err
    assert "huge.csv is no table" in told or "is neither JSON nor JSON lines" in told
    assert len(told) < 500

"""TrainConfig: strict, ranged, and explained in one line per mistake."""

import re

import pytest

from safetrain_core import TrainConfig
from safetrain_core.config import allowed, load_yaml, reference_table
from safetrain_core.optim.schedule import SCHEDULES

#: The defaults that the design fixes.
DESIGN_DEFAULTS = """
batch_size 16, gradient_accumulation_steps 1, loss_weighting equal, max_steps None, learning_rate 0.001,
scale_lr_with_batch False, weight_decay 0.01, optimizer_class adamw, scheduler_type cosine, scheduler_total_steps None,
scheduler_warmup_ratio 0.0, use_amp False, amp_dtype None, grad_clip_max_norm 1.0, inf_post_clip_threshold 10.0,
max_nan_retries 3, nan_retry_reset_updates None, nan_check_interval 1, check_loss_before_backward None,
skip_rate_alert 0.05, loss_jump_factor None, loss_jump_window 10, recompute_policy none, recompute_k 4, seed 0,
checkpoint_every_n_steps 1000, checkpoint_every_seconds None, max_rolling_checkpoints 5, num_best_checkpoints 1,
async_save False, eval_every_n_steps None, csv_log_path None, csv_rotate_on_schema_change True, gradient_log_interval 1,
telemetry_log_interval 10, enable_block_grad_norms False, gpu_metrics_backend none, nvml_device_index None,
gpu_temp_guard False, gpu_temp_pause_threshold_c 85.0, gpu_temp_resume_threshold_c 75.0,
gpu_temp_critical_threshold_c 95.0, gpu_temp_poll_interval_seconds 5.0, switch_on_thermal False, use_galore False,
galore_rank 128, galore_update_interval 200, galore_scale 0.25, galore_max_dim None
"""


def test_fields_and_defaults_are_the_designs():
    expected = dict(pair.split() for pair in DESIGN_DEFAULTS.replace("\n", " ").split(","))
    assert {name: str(value) for name, value in TrainConfig().model_dump().items()} == expected


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"batch_sise": 4}, "unknown key batch_sise; did you mean batch_size?"),
        ({"grad_clip": 1.0}, "unknown key grad_clip; did you mean grad_clip_max_norm?"),
        ({"zzz": 1}, "unknown key zzz; see `safetrain train --print-config` for all keys"),
        ({"batch_size": 0}, "batch_size=0 is out of range; allowed: whole number >= 1"),
        ({"batch_size": 10**30}, "is out of range; allowed: whole number >= 1"),
        ({"seed": 2**64}, "is out of range; allowed: whole number >= 0"),
        ({"csv_log_path": ""}, "csv_log_path='' is out of range; allowed: path or none"),
        ({"batch_size": "16"}, "batch_size='16' is of the wrong type; allowed: whole number >= 1"),
        ({"batch_size": 16.5}, "batch_size=16.5 is of the wrong type; allowed: whole number >= 1"),
        ({"batch_size": True}, "batch_size=True is of the wrong type; allowed: whole number >= 1"),
        ({"use_amp": "yes"}, "use_amp='yes' is of the wrong type; allowed: true or false"),
        ({"learning_rate": 0.0}, "learning_rate=0.0 is out of range; allowed: number > 0"),
        ({"learning_rate": float("nan")}, "learning_rate=nan is out of range; allowed: number > 0"),
        ({"learning_rate": float("inf")}, "learning_rate=inf is out of range; allowed: number > 0"),
        ({"learning_rate": None}, "learning_rate=None is of the wrong type; allowed: number > 0"),
        (
            {"scheduler_warmup_ratio": 2.0},
            "scheduler_warmup_ratio=2.0 is out of range; allowed: number >= 0 and <= 1",
        ),
        ({"loss_jump_factor": 1.0}, "loss_jump_factor=1.0 is out of range; allowed: number > 1 or none"),
        (
            {"scheduler_type": "cosin"},
            "scheduler_type='cosin' is out of range; allowed: cosine, constant, linear_warmup_then_constant",
        ),
        (
            {"gpu_temp_pause_threshold_c": 130.0},
            "gpu_temp_pause_threshold_c=130.0 is out of range; allowed: number >= 0 and <= 120",
        ),
        ({"gpu_temp_resume_threshold_c": 90.0}, "resume=90 < pause=85 < critical=95 does not hold"),
        ({"gpu_temp_critical_threshold_c": 85.0}, "resume=75 < pause=85 < critical=85 does not hold"),
        ({"amp_dtype": "float16"}, "amp_dtype=float16 has no effect without use_amp"),
        ({"switch_on_thermal": True}, "switch_on_thermal has no effect without gpu_temp_guard"),
    ],
)
def test_a_bad_value_is_refused_with_key_value_and_range(values, told):
    with pytest.raises(ValueError, match=re.escape(told)) as caught:
        TrainConfig(**values)
    assert len(str(caught.value).splitlines()) == 1


def test_all_mistakes_are_told_at_once():
    with pytest.raises(ValueError, match="batch_size") as caught:
        TrainConfig(batch_size=0, max_steps=-1, foo=1)
    assert len(str(caught.value).splitlines()) == 3


def test_a_config_never_changes():
    with pytest.raises(ValueError, match="frozen"):
        TrainConfig().batch_size = 3


def test_whole_numbers_are_accepted_where_numbers_are_asked_and_none_may_be_a_word():
    config = TrainConfig(learning_rate=1, max_steps="none", gpu_metrics_backend="none")
    assert (config.learning_rate, config.max_steps, config.gpu_metrics_backend) == (1.0, None, "none")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E3", 1e3),
        ("-2e+1", -20.0),
        ("3.5e-4", 3.5e-4),
        (".5e1", 5.0),
        ("0.1", 0.1),
        ("7", 7),
        ("1e", "1e"),
    ],
)
def test_yaml_reads_numbers_as_people_write_them(tmp_path, text, value):
    path = tmp_path / "c.yaml"
    path.write_text(f"learning_rate: {text}\n")
    read = load_yaml(path)["learning_rate"]
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"- 1\n- 2\n", "holds a list, not a mapping"),
        (b"just words\n", "holds a str, not a mapping"),
        (b"1: 2\n", "holds the key 1, not a mapping of keys"),
        (b"seed: 1\nseed: 2\n", "key seed stands twice"),
        (b"csv_log_path: 2026-13-45\n", "is not YAML: month must be in"),
        (b"[" * 3000, "nested too deeply|is not YAML"),
        (b"a: [1\n", "is not YAML"),
        (b"a: !!python/object/apply:os.system ['true']\n", "is not YAML"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path, content, told):
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=told) as caught:
        load_yaml(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_yaml_merge_keys_work(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("<<: {batch_size: 3, seed: 1}\nseed: 2\n")
    assert load_yaml(path) == {"batch_size": 3, "seed": 2}


def test_an_empty_file_is_the_defaults(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("# nothing yet\n")
    assert TrainConfig(**load_yaml(path)) == TrainConfig()


def test_every_field_says_what_it_is_and_what_it_takes():
    for name, info in TrainConfig.model_fields.items():
        assert info.description
        assert allowed(name)
    assert reference_table().count("\n") == len(TrainConfig.model_fields) + 1


def test_choices_of_the_schedule_are_the_schedules_that_exist():
    assert allowed("scheduler_type") == ", ".join(SCHEDULES)

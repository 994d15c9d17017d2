"""What the source material teaches is met in a lesson: in its words, its code, or what it prints."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
import yaml

from safetrain_core import TrainConfig

#: Lesson -> patterns, each a fact or a number of the source material.
FACTS = {
    "01_clipping_amp": (
        r"max_norm=1\.0",
        r"unscale",
        r"scaler\.update\(\)",
        r"get_scale\(\)",
        r"rolling_skip_rate",
        r"0\.05",
        r"halves",
        r"doubles",
        r"bfloat16 without",
        r"`python -O` strips",
        r"autocast on the device",
        r"inf_post_clip_threshold: 10",
    ),
    "02_accumulation": (
        r"loss_scaled_for_accum",
        r"no_sync_context",
        r"zero_grads",
        r"effective batch",
        r"train_one_optimizer_step",
        r"wall time",
    ),
    "03_checkpoint_resume": (
        r"capture_rng_state",
        r"weights_only=True",
        r"os\.replace|rename",
        r"batch_in_epoch",
        r"1e-4",
        r"unknown schema",
        r"ckpt\.v1",
        r"rotate_checkpoints|max_rolling_checkpoints",
    ),
    "04_sharded_resume": (
        r"manifest",
        r"world_size mismatch",
        r"sha256 mismatch on rank",
        r"shard file missing",
        r"unknown schema",
        r"keep_last",
        r"4 hours",
        r"12 ?P ?/ ?N",
    ),
    "05_gradient_checkpointing": (
        r"x B\*L\*d\s+12",
        r"GB per layer at 8192\s+1\.61",
        r"GB for 64 layers\s+103",
        r"full: more FLOPs at 8192\s+33\.3%",
        r"15 %",
        r"sqrt",
        r"gives 8 checkpoints of 8 layers",
        r"selective",
        r"torch\.utils\.checkpoint",
    ),
    "06_thermal_guard": (
        r"Normal|normal",
        r"[Pp]aused",
        r"[Aa]borted",
        r"switch_on_thermal",
        r"gpu_temp_guard",
        r"nvml",
    ),
    "07_low_rank_gradients": (r"SVD", r"Adafactor", r"APOLLO", r"rank=", r"update_interval", r"[Ee]mbeddings"),
    "08_distributed_run": (
        r"RESUME VERIFIED",
        r"12 ?P ?/ ?N",
        r"effective batch",
        r"20 steps|num_steps=.*20",
        r"cosine",
    ),
}


def page(lesson: str, lessons_folder: Path) -> str:
    """All that a learner reads: sources, and what the cells have printed."""
    notebook = nbformat.read(lessons_folder / f"{lesson}.ipynb", as_version=4)
    printed = [output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])]
    return "\n".join([cell.source for cell in notebook.cells] + printed)


@pytest.mark.parametrize("lesson", FACTS)
def test_the_facts_of_the_source_material_are_met(lesson: str, lessons_folder: Path) -> None:
    text = page(lesson, lessons_folder)
    assert [fact for fact in FACTS[lesson] if not re.search(fact, text)] == []


def test_the_safe_defaults_to_take_home_are_a_config_and_change_nothing_by_accident(lessons_folder: Path) -> None:
    text = page("08_distributed_run", lessons_folder)
    fields = yaml.safe_load(re.search(r"```yaml\n(.+?)```", text, re.DOTALL)[1])
    config = TrainConfig(**fields)
    for name in ("grad_clip_max_norm", "inf_post_clip_threshold", "max_nan_retries", "checkpoint_every_n_steps"):
        assert fields[name] == TrainConfig.model_fields[name].default == getattr(config, name)

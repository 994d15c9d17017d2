"""Every knob of a run: typed, ranged, strict. Nothing here imports torch, so that a mistake is answered at once.

A field is stated once, below; the command line's flags and the README's table are made from it.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import annotated_types as at
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from .errors import type_of

__all__ = ["TrainConfig", "allowed", "load_yaml", "reference_table"]

#: No whole number is larger than what a 64-bit index holds; too large to be told as a range.
LARGEST = 2**63 - 1

Count = Annotated[int, Field(ge=1, le=LARGEST)]
Whole = Annotated[int, Field(ge=0, le=LARGEST)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Celsius = Annotated[float, Field(ge=0, le=120)]

OptimizerClass = Literal["adamw", "adam", "sgd_momentum", "adafactor", "muon", "lion", "apollo"]
SchedulerType = Literal["cosine", "constant", "linear_warmup_then_constant"]
RecomputePolicy = Literal["none", "full", "every_k", "sqrt", "selective", "selective_ops", "offload"]


def _knob(default: Any, about: str) -> Any:
    return Field(default=default, description=about)


class TrainConfig(BaseModel):
    """The configuration of a run; it never changes after creation. None = off.

    Raises:
        ValueError: an unknown key (with the nearest valid one), a value of the wrong type or out of range (with the
            range), or two values that contradict each other. All mistakes are told at once, a line each.

    >>> TrainConfig(batch_size=8).batch_size
    8
    >>> TrainConfig(batchsize=8)
    Traceback (most recent call last):
    ...
    ValueError: unknown key batchsize; did you mean batch_size?
    >>> TrainConfig(learning_rate=-1.0)
    Traceback (most recent call last):
    ...
    ValueError: learning_rate=-1.0 is out of range; allowed: number > 0
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    batch_size: Count = _knob(16, "sequences per micro-batch")
    gradient_accumulation_steps: Count = _knob(1, "micro-batches K per optimizer step")
    loss_weighting: Literal["equal", "tokens"] = _knob("equal", "micro-batch losses weigh 1/K, or by valid tokens")
    max_steps: Count | None = _knob(None, "optimizer updates; None = one epoch")
    learning_rate: Positive = _knob(1e-3, "peak learning rate")
    scale_lr_with_batch: bool = _knob(False, "learning rate x K x world size")
    weight_decay: NotNegative = _knob(0.01, "weight decay, off for norms and biases")
    optimizer_class: OptimizerClass = _knob("adamw", "what moves the weights")
    scheduler_type: SchedulerType = _knob("cosine", "learning-rate schedule")
    scheduler_total_steps: Count | None = _knob(None, "length of the schedule in updates; None = max_steps")
    scheduler_warmup_ratio: Share = _knob(0.0, "share of the schedule spent warming up")
    use_amp: bool = _knob(False, "autocast in 16 bits")
    amp_dtype: Literal["float16", "bfloat16"] | None = _knob(None, "None = bfloat16 on cpu, float16 on cuda")
    grad_clip_max_norm: NotNegative = _knob(1.0, "clip threshold of the global L2 norm; 0 = none")
    inf_post_clip_threshold: NotNegative = _knob(10.0, "refuse a step whose max|g| after the clip is above; 0 = none")
    max_nan_retries: Whole = _knob(3, "bad steps survived before the run fails")
    nan_retry_reset_updates: Count | None = _knob(None, "good updates after which spent retries are forgiven")
    nan_check_interval: Count = _knob(1, "attempts between looks for NaN and Inf")
    check_loss_before_backward: bool | None = _knob(None, "None = on a CPU only")
    skip_rate_alert: Share = _knob(0.05, "warn above this share of skipped steps")
    loss_jump_factor: Annotated[float, Field(gt=1)] | None = _knob(None, "roll back above this x the median loss")
    loss_jump_window: Count = _knob(10, "accepted losses in that median")
    recompute_policy: RecomputePolicy = _knob("none", "which activations are recomputed in backward")
    recompute_k: Count = _knob(4, "layers per recomputed segment")
    seed: Whole = _knob(0, "seed of weights, data order and dropout")
    checkpoint_every_n_steps: Count = _knob(1000, "updates between rolling checkpoints")
    checkpoint_every_seconds: Positive | None = _knob(None, "seconds between rolling checkpoints")
    max_rolling_checkpoints: Count = _knob(5, "rolling checkpoints kept")
    num_best_checkpoints: Whole = _knob(1, "checkpoints of lowest validation loss kept")
    async_save: bool = _knob(False, "write checkpoints beside training")
    eval_every_n_steps: Count | None = _knob(None, "updates between validations")
    csv_log_path: Annotated[str, Field(min_length=1)] | None = _knob(None, "CSV file with a row per attempted step")
    csv_rotate_on_schema_change: bool = _knob(True, "set an old file with other columns aside")
    gradient_log_interval: Count = _knob(1, "steps between gradient statistics")
    telemetry_log_interval: Count = _knob(10, "steps between GPU readings and block norms")
    enable_block_grad_norms: bool = _knob(False, "a gradient norm per block of the model")
    gpu_metrics_backend: Literal["nvml", "none"] = _knob("none", "where GPU readings come from")
    nvml_device_index: Whole | None = _knob(None, "NVML's index of the GPU; None = by torch's device")
    gpu_temp_guard: bool = _knob(False, "pause and abort by GPU temperature")
    gpu_temp_pause_threshold_c: Celsius = _knob(85.0, "pause above, in C")
    gpu_temp_resume_threshold_c: Celsius = _knob(75.0, "resume below, in C; must be below pause")
    gpu_temp_critical_threshold_c: Celsius = _knob(95.0, "abort above, in C; must be above pause")
    gpu_temp_poll_interval_seconds: Positive = _knob(5.0, "seconds between temperature readings")
    switch_on_thermal: bool = _knob(False, "move to a cooler device instead of pausing")
    use_galore: bool = _knob(False, "project gradients to low rank")
    galore_rank: Count = _knob(128, "rank of the projection")
    galore_update_interval: Count = _knob(200, "updates between projector refreshes")
    galore_scale: Positive = _knob(0.25, "factor on the projected update")
    galore_max_dim: Count | None = _knob(None, "larger weights stay unprojected")

    if not TYPE_CHECKING:  # type checkers see the fields; people see one line per mistake

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise ValueError("\n".join(dict.fromkeys(_explain(e) for e in error.errors()))) from None

    @model_validator(mode="before")
    @classmethod
    def _none_in_words(cls, values: dict[str, Any]) -> dict[str, Any]:
        """YAML and the command line write None as the word none."""
        words = {k for k, v in values.items() if k in cls.model_fields and v in ("none", "None") and field_kind(k)[2]}
        return {k: None if k in words else v for k, v in values.items()}

    @model_validator(mode="after")
    def _no_contradictions(self) -> TrainConfig:
        pause, resume = self.gpu_temp_pause_threshold_c, self.gpu_temp_resume_threshold_c
        critical = self.gpu_temp_critical_threshold_c
        if not resume < pause < critical:
            raise ValueError(
                f"gpu_temp thresholds must rise: resume={resume:g} < pause={pause:g} < critical={critical:g} "
                "does not hold; change one of gpu_temp_resume_threshold_c, gpu_temp_pause_threshold_c, "
                "gpu_temp_critical_threshold_c"
            )
        if self.amp_dtype is not None and not self.use_amp:
            raise ValueError(f"amp_dtype={self.amp_dtype} has no effect without use_amp; set use_amp: true")
        if self.switch_on_thermal and not self.gpu_temp_guard:
            raise ValueError("switch_on_thermal has no effect without gpu_temp_guard; set gpu_temp_guard: true")
        return self


def _explain(error: Any) -> str:
    """One line for one of pydantic's errors: key, value, range."""
    key = ".".join(str(part) for part in error["loc"][:1])
    kind, value = error["type"], error["input"]
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(key, TrainConfig.model_fields, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "see `safetrain train --print-config` for all keys"
        return f"unknown key {key}; {hint}"
    if key not in TrainConfig.model_fields:
        return str(error["msg"]).removeprefix("Value error, ")
    wrong_type = kind.endswith("_type") and not kind.startswith("none")
    value = repr(value) if len(repr(value)) <= 60 else repr(value)[:60] + "..."
    return f"{key}={value} is {'of the wrong type' if wrong_type else 'out of range'}; allowed: {allowed(key)}"


def _parts(annotation: Any) -> list[Any]:
    """The members of a union, or the annotation itself."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return list(typing.get_args(annotation)) if union else [annotation]


def field_kind(name: str) -> tuple[Any, list[Any], bool]:
    """What a field takes: (bool, int, float, str or a tuple of choices; its range constraints; None allowed)."""
    info: FieldInfo = TrainConfig.model_fields[name]
    limits, optional = list(info.metadata), False
    kind: Any = info.annotation
    for part in _parts(info.annotation):
        if part is type(None):
            optional = True
        elif typing.get_origin(part) is Annotated:
            kind, field = typing.get_args(part)
            limits += field.metadata
        elif typing.get_origin(part) is Literal:
            kind = typing.get_args(part)
        else:
            kind = part
    return kind, limits, optional


def allowed(name: str) -> str:
    """The values a field takes, in words.

    >>> allowed("grad_clip_max_norm"), allowed("amp_dtype")
    ('number >= 0', 'float16, bfloat16 or none')
    """
    kind, limits, optional = field_kind(name)
    words = {bool: "true or false", int: "whole number", float: "number", str: "path"}
    text = ", ".join(kind) if isinstance(kind, tuple) else words[kind]
    signs = {at.Ge: (">=", "ge"), at.Gt: (">", "gt"), at.Le: ("<=", "le"), at.Lt: ("<", "lt")}
    ranges = [
        f"{sign} {getattr(limit, attr):g}"
        for limit in limits
        for sign, attr in [signs.get(type(limit), ("", ""))]
        if sign and getattr(limit, attr) != LARGEST
    ]
    if ranges:
        text += " " + " and ".join(ranges)
    return f"{text} or none" if optional else text


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-3 as a word, since it lacks the dot, and lets the last of two equal keys win: not this one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As SafeLoader's, but a key that stands twice is an error."""
        plain = (key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge")
        keys = [self.construct_object(key, deep=True) for key in plain]
        twice = next((key for i, key in enumerate(keys) if key in keys[:i]), None)
        if twice is not None:
            raise ValueError(f"key {twice} stands twice")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$|^[-+]?\.\d+[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def load_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping.

    Raises:
        ValueError: the file is missing, unreadable, not YAML, or not a mapping.

    >>> load_yaml("missing.yaml")
    Traceback (most recent call last):
    ...
    ValueError: config file missing.yaml cannot be read: No such file or directory
    """
    try:
        data = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"config file {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except RecursionError:
        raise ValueError(f"config file {path} is nested too deeply; it holds keys and plain values") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"config file {path} is not YAML: {' '.join(str(error).split())}") from error
    if data is None:
        return {}
    odd = data if not isinstance(data, dict) else next((key for key in data if not isinstance(key, str)), None)
    if odd is not None:
        what = f"the key {odd!r}" if isinstance(data, dict) else type_of(data)
        raise ValueError(
            f"config file {path} holds {what}, not a mapping of keys to values; write lines like `batch_size: 16`"
        )
    return data


def shown(value: Any) -> str:
    """A value as YAML writes it: true, none, 0.001.

    >>> shown(True), shown(None), shown(0.01), shown(85.0)
    ('true', 'none', '0.01', '85')
    """
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def reference_table() -> str:
    """All fields as a Markdown table: name, default, allowed values, what it is.

    >>> print(reference_table().splitlines()[2])
    | `batch_size` | 16 | whole number >= 1 | sequences per micro-batch |
    """
    rows = ["| field | default | allowed | what it is |", "|---|---|---|---|"]
    for name, info in TrainConfig.model_fields.items():
        about = str(info.description).replace("|", r"\|")
        rows.append(f"| `{name}` | {shown(info.default)} | {allowed(name)} | {about} |")
    return "\n".join(rows)

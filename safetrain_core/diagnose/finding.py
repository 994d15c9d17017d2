"""One thing found wrong with a run, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["SEVERITIES", "Evidence", "Finding"]

#: From worst to least: the run is broken; look at it; good to know.
SEVERITIES = ("error", "warning", "info")


@dataclass(frozen=True, slots=True)
class Evidence:
    """Where it shows: a step, None where there is none, and the values seen there, by name.

    >>> print(Evidence(812, {"loss": float("nan"), "scale": 65536.0, "reason": "non_finite_loss"}))
    step 812: loss nan, scale 65536, reason non_finite_loss
    """

    step: int | None = None
    values: Mapping[str, float | int | str | None] = field(default_factory=dict)

    def __str__(self) -> str:
        shown = {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in self.values.items()}
        told = ", ".join(f"{name} {value}" for name, value in shown.items())
        return told if self.step is None else f"step {self.step}: {told}"


@dataclass(frozen=True, slots=True)
class Finding:
    """A symptom with its evidence, its cause, its fix, and the lesson that breaks and fixes it.

    Args:
        symptom: what is seen, in a few words. rule: the name of the rule that found it, a stable identifier.
        severity: one of ``SEVERITIES``. evidence: what shows it, the most telling first.
        cause: why that happens. fix: what to change.
        lesson: number and name, for example ``01_clipping_amp``; "" = none.

    Raises:
        ValueError: another severity.

    >>> nan = Evidence(8, {"loss": float("nan")})
    >>> print(Finding("loss is NaN from step 8 on", "nan_stays", "error", (nan,), "a NaN reached the weights",
    ...     "skip the step: AmpTrainState does", "01_clipping_amp"))
    ERROR loss is NaN from step 8 on
      evidence  step 8: loss nan
      cause     a NaN reached the weights
      fix       skip the step: AmpTrainState does
      lesson    01_clipping_amp
    """

    symptom: str
    rule: str
    severity: str
    evidence: tuple[Evidence, ...]
    cause: str
    fix: str
    lesson: str = ""

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES:
            raise ValueError(f"severity={self.severity!r} must be one of {', '.join(SEVERITIES)}")

    def __str__(self) -> str:
        lines = [f"{self.severity.upper()} {self.symptom}"]
        lines += [f"  evidence  {evidence}" for evidence in self.evidence[:3]]
        lines += [f"  cause     {self.cause}", f"  fix       {self.fix}"]
        return "\n".join([*lines, *([f"  lesson    {self.lesson}"] if self.lesson else [])])

"""Whether a run that is saved and loaded is the same run, and if not, what was left behind."""

from __future__ import annotations

import contextlib
import hashlib
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .finding import Evidence, Finding
from .gradients import tensors_of
from .known import found
from .parts import Parts, changed, parts_of
from .watched import check_callables, kept_rng, put_rng_state, rng_state, seed_all, watched

__all__ = ["probe_resume"]

#: What of a state is restored by what; the rules are ``resume_without_...``.
KINDS = {
    "weights": "weights",
    "buffers": "weights",
    "optimizer": "optimizer",
    "schedule": "schedule",
    "scaler": "scaler",
}


def probe_resume(
    save: Callable[[Any, Path], Any],
    load: Callable[[Any, Path], Any],
    step: Callable[[Any], Any],
    make_run: Callable[[], Any],
    *,
    steps_before: int = 5,
    steps_after: int = 5,
    tolerance: float = 1e-6,
    seed: int = 0,
) -> list[Finding]:
    """Whether a run that is saved, built anew and loaded goes on as the run that was never interrupted.

    One run takes ``steps_before`` steps, saves, and goes on for ``steps_after``; another is built under another seed,
    as a new process has it, loads, and takes as many. States are compared after the load bit for bit; then losses,
    weights, learning rates and the data that the model sees. What differs is named: random states are put in for a
    third run, to see whether they are the cause.

    Args:
        save: ``save(run, path)`` writes a file or a folder at ``path``.
        load: ``load(run, path)`` loads it into a freshly made run, or returns one.
        step: ``step(run)`` takes one optimizer step on the run's own next data; its loss, if it returns one (a number,
            a tensor, or something with ``.loss``), is compared.
        make_run: builds a run from nothing: model, optimizer, schedule, scaler, loader.
        steps_before, steps_after: at least 1. Let the second pass the end of an epoch, where shuffling counts.
        tolerance: relative difference of weights and losses that is none; on a GPU give 1e-4.

    Returns:
        ``resume_without_weights``, ``_optimizer``, ``_schedule``, ``_scaler``, ``_rng``, ``resume_at_wrong_data``,
        ``resume_differs``, ``not_reproducible``; or nothing, where it is the same run.

    Raises:
        ValueError: fewer than 1 step. What save, load and step raise is passed on.

    >>> def make():
    ...     model = nn.Linear(4, 1)
    ...     return model, torch.optim.AdamW(model.parameters())
    >>> def step(run):
    ...     model, optimizer = run
    ...     optimizer.zero_grad()
    ...     model(torch.ones(2, 4)).sum().backward()
    ...     optimizer.step()
    >>> def save(run, path):
    ...     torch.save(run[0].state_dict(), path)  # the optimizer is forgotten
    >>> def load(run, path):
    ...     run[0].load_state_dict(torch.load(path, weights_only=True))
    >>> [finding.rule for finding in probe_resume(save, load, step, make)]
    ['resume_without_optimizer']
    """
    if steps_before < 1 or steps_after < 1:
        raise ValueError(f"steps_before={steps_before} and steps_after={steps_after} must be at least 1")
    check_callables(save=save, load=load, step=step, make_run=make_run)
    with kept_rng(), tempfile.TemporaryDirectory(prefix="probe_resume_") as folder:
        path = Path(folder, "checkpoint")
        seed_all(seed)
        first = make_run()
        trace = _follow(first, step, steps_before)
        save(first, path)
        saved, rng = parts_of(first).state(), rng_state()
        trace.and_then(_follow(first, step, steps_after))

        def resumed(random: tuple[Any, ...] | None) -> tuple[dict[str, dict[str, Any]], _Trace]:
            seed_all(seed + 1)
            fresh = make_run()
            given = load(fresh, path)
            run = given if parts_of(given).modules else fresh
            state = parts_of(run).state()
            if random is not None:
                put_rng_state(random)
            return state, _follow(run, step, steps_after)

        state, after = resumed(None)
        findings = _left_behind(saved, state, steps_before)
        at = trace.differs(after, steps_before, tolerance)
        if at is None:
            return findings
        seed_all(seed)
        second = make_run()
        again = _follow(second, step, steps_before)
        save(second, Path(folder, "again"))
        again.and_then(_follow(second, step, steps_after))
        if again.differs(trace, 0, tolerance) is not None:
            return [*findings, found("not_reproducible", "two fresh runs of one seed differ", Evidence(at + 1))]
        _, with_rng = resumed(rng)
        return _causes(findings, trace, after, with_rng, steps_before, at, tolerance)


def _left_behind(saved: dict[str, dict[str, Any]], loaded: dict[str, dict[str, Any]], step: int) -> list[Finding]:
    """What of the saved state the loaded run does not have."""
    names: dict[str, list[str]] = {}
    for kind, whose in KINDS.items():
        names.setdefault(whose, []).extend(changed(saved[kind], loaded[kind]))
    return [
        found(
            f"resume_without_{whose}",
            f"after the load, {len(lost)} values of {whose} are not those that were saved",
            Evidence(step, {"changed": len(lost), "first": lost[0]}),
        )
        for whose, lost in names.items()
        if lost
    ]


def _causes(
    findings: list[Finding], trace: _Trace, after: _Trace, with_rng: _Trace, start: int, at: int, tolerance: float
) -> list[Finding]:
    """Why a resumed run differs, beyond the state that was compared."""
    if with_rng.differs(after, 0, tolerance) is not None:
        told = Evidence(at + 1, trace.told(after, start, at))
        findings = [*findings, found("resume_without_rng", f"the resumed run differs from step {at + 1} on", told)]
    expected, got = trace.data[start:], with_rng.data
    if expected != got:
        step, place = _first_other(expected, got), None
        seen = [digest for step_data in trace.data for digest in step_data]
        if after.data and after.data[0] and after.data[0][0] in seen:
            place = seen.index(after.data[0][0])
        before = sum(len(step_data) for step_data in trace.data[:start])
        values: dict[str, float | int | str | None] = {"expected batch": before + 1}
        values["got batch"] = place + 1 if place is not None else "one that the run has not seen"
        symptom = f"the resumed run sees other data from step {start + step + 1} on"
        findings = [*findings, found("resume_at_wrong_data", symptom, Evidence(start + step + 1, values))]
    rates = [a != b for a, b in zip(trace.rates[start:], after.rates, strict=True)]
    known = any(finding.rule == "resume_without_schedule" for finding in findings)
    if (rates[0] or (any(rates) and not findings)) and not known:  # later ones may follow from another skip, too
        step = rates.index(True)
        values = {"learning rate": trace.rates[start + step], "resumed": after.rates[step]}
        findings = [
            *findings,
            found("resume_without_schedule", "the learning rate is another one", Evidence(start + step + 1, values)),
        ]
    if not findings:
        told = Evidence(at + 1, trace.told(after, start, at))
        findings = [found("resume_differs", f"the resumed run differs from step {at + 1} on", told)]
    return findings


def _first_other(expected: list[Any], got: list[Any]) -> int:
    return next(at for at, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b)


@dataclass
class _Trace:
    """What a run showed, step by step."""

    losses: list[float | None] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    rates: list[float | None] = field(default_factory=list)
    data: list[list[str]] = field(default_factory=list)

    def and_then(self, later: _Trace) -> None:
        self.losses += later.losses
        self.weights += later.weights
        self.rates += later.rates
        self.data += later.data

    def differs(self, other: _Trace, start: int, tolerance: float) -> int | None:
        """The first step, from 0, whose loss or weights are not those of ``other``, which begins at ``start``."""
        for at in range(len(other.losses)):
            mine, theirs = self.losses[start + at], other.losses[at]
            if not _near(mine, theirs, tolerance) or not _close(self.weights[start + at], other.weights[at], tolerance):
                return start + at
        return None

    def told(self, other: _Trace, start: int, at: int) -> dict[str, float | int | str | None]:
        return {"loss": self.losses[at], "loss resumed": other.losses[at - start]}


def _near(a: float | None, b: float | None, tolerance: float) -> bool:
    if a is None or b is None:
        return a is b
    return a == b or (math.isnan(a) and math.isnan(b)) or abs(a - b) <= tolerance * max(abs(a), abs(b))


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=tolerance, atol=tolerance * 1e-2, equal_nan=True)


def _follow(run: Any, step: Callable[[Any], Any], steps: int) -> _Trace:
    """Take ``steps`` steps of ``run``, and note what it shows."""
    trace = _Trace()
    for _ in range(steps):
        parts = parts_of(run)
        with watched(parts.weights()) as updates, _inputs_of(parts) as seen:
            told = step(run)
        weights = parts_of(run).weights()
        flat = [p.detach().to("cpu", torch.float64).reshape(-1) for p in weights]
        trace.weights.append(torch.cat(flat) if flat else torch.zeros(0))
        trace.losses.append(_loss(told))
        trace.rates.append(updates[0].lr if updates else None)
        trace.data.append(seen)
    return trace


def _loss(told: Any) -> float | None:
    value = getattr(told, "loss", told)
    if isinstance(value, Tensor):
        return float(value.detach()) if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


@contextlib.contextmanager
def _inputs_of(parts: Parts) -> Iterator[list[str]]:
    """A digest of all tensors that each forward pass of the outermost modules is given."""
    seen: list[str] = []

    def note(_module: nn.Module, args: Any, kwargs: Any) -> None:
        digest = hashlib.sha256()
        for tensor in tensors_of([args, kwargs]):
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        seen.append(digest.hexdigest())

    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in parts.modules]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()

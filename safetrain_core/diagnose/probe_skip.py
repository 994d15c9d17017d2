"""What a refused window leaves behind: the user's own step is given a bad window between good ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .finding import Evidence, Finding
from .gradients import OVERFLOWS, Bench, StepFn, cut, mapped, samples_in, tensors_of
from .known import found
from .parts import Parts, changed, parts_of
from .watched import Update, altered_gradients, build, kept_rng, seed_all, watched

__all__ = ["SKIP_FAULTS", "probe_skip_leaves_state_untouched"]

#: What is planted: a NaN in the data, so that the loss is NaN; an overflow in backward behind a finite loss.
SKIP_FAULTS = ("nan_loss", "inf_grad")
#: Good windows before the bad one, so that there are moments to move.
GOOD = 2
#: The gradient after a skip may differ by this share from that of a run without one: half-precision rounding.
SLACK = 0.02


def probe_skip_leaves_state_untouched(
    step_fn: StepFn,
    make_model: Callable[[], Any],
    batch: Any,
    *,
    accum_steps: int = 1,
    faults: tuple[str, ...] = SKIP_FAULTS,
    seed: int = 0,
) -> list[Finding]:
    """Whether a window whose loss or gradients are not finite leaves no trace but in scaler and counters.

    Two good windows, a bad one, and a good one more are stepped. Weights, buffers, moments and schedule are compared
    before and after the bad one bit for bit; the next gradient with that of a run that never met it. A step that raises
    on a bad window has refused it, too; what it has left is looked at, and no more windows are given.

    Args:
        step_fn, make_model, batch: as for ``probe_accumulation``. Schedule and scaler are looked at where they are
            attributes or entries of what ``make_model`` returns.
        accum_steps: micro-batches per window; a middle one is bad. faults: which of ``SKIP_FAULTS`` to plant.

    Returns:
        ``nan_reaches_weights``, ``nan_reaches_moments``, ``nan_reaches_buffers``, ``skip_moves_weights``,
        ``skip_moves_moments``, ``skip_moves_buffers``, ``skip_moves_schedule``, ``no_scaler_update_on_skip``,
        ``bad_gradients_stay``, ``step_after_skip_fails``; or nothing, where all holds.

    Raises:
        ValueError: an unknown fault, or a step that takes no optimizer step on good windows.

    >>> def make():
    ...     model = torch.nn.Linear(4, 1)
    ...     return model, torch.optim.AdamW(model.parameters())
    >>> def step(run, micro_batches):
    ...     model, optimizer = run
    ...     optimizer.zero_grad()
    ...     for x, y in micro_batches:
    ...         torch.nn.functional.mse_loss(model(x), y).backward()
    ...     optimizer.step()
    >>> [f.rule for f in probe_skip_leaves_state_untouched(step, make, (torch.rand(8, 4), torch.rand(8, 1)))]
    ['nan_reaches_weights']
    """
    if unknown := set(faults) - set(SKIP_FAULTS):
        raise ValueError(f"faults has {sorted(unknown)}; known are {', '.join(SKIP_FAULTS)}")
    samples = samples_in(batch)
    if not 1 <= accum_steps <= samples:
        raise ValueError(f"accum_steps={accum_steps} must be from 1 to the batch's {samples} samples")
    window = cut(batch, [samples // accum_steps] * accum_steps) if accum_steps > 1 else [batch]
    findings: dict[str, Finding] = {}
    with kept_rng():
        bench = Bench(step_fn, make_model, seed)
        for fault in faults:
            for finding in _OneRun(bench, window).judge(fault):
                findings.setdefault(finding.rule, finding)
    return sorted(findings.values(), key=lambda finding: finding.severity)  # error before warning


class _OneRun:
    """A run of the user's through good windows and a bad one."""

    def __init__(self, bench: Bench, window: list[Any]) -> None:
        self.bench, self.window = bench, window
        self.run, self.parts = build(bench.make_model, bench.seed)
        self.weights = self.parts.weights()

    def good(self, number: int) -> Update | None:
        """One good window; the optimizer step it took, None where it took none."""
        with watched(self.weights) as seen:
            for _ in range(OVERFLOWS):
                scale = self.parts.scale()
                seed_all(self.bench.seed + number)
                self.bench.step_fn(self.run, list(self.window))
                if finite := [update for update in seen if update.finite]:
                    self.look_again(finite)
                    return finite[0]
                if scale is None or not (self.parts.scale() or 0.0) < scale:
                    return None
        return None

    def look_again(self, taken: list[Update]) -> None:
        """Parts that the first steps have made, and optimizers that the run keeps where nobody finds them."""
        modules, self.parts = self.parts.modules, parts_of(self.run)
        self.parts.modules = modules
        known = {id(optimizer) for optimizer in self.parts.optimizers}
        self.parts.optimizers += [u.optimizer for u in taken if id(u.optimizer) not in known]

    def judge(self, fault: str) -> list[Finding]:
        first = None
        for number in range(GOOD):
            try:
                first = self.good(number)
            except RuntimeError as error:
                if number == 0 or not _wants_update(error):
                    raise
                return [_no_update(fault, f"the second window already fails: {str(error)[:90]}")]
        if first is None:
            raise ValueError("step_fn took no optimizer step on a good window; it must take one per call")
        before, scale = self.parts.state(), self.parts.scale()
        stopped = False
        window = [*self.window]
        middle = len(window) // 2
        window[middle] = _with_nan(window[middle]) if fault == "nan_loss" else window[middle]
        seed_all(self.bench.seed + GOOD)
        with _planted(fault, window[middle], self.parts, self.weights):
            try:
                self.bench.step_fn(self.run, window)
            except Exception as error:  # noqa: BLE001  a step may refuse a window by raising whatever it likes
                stopped = not _wants_update(error)
        findings = _moved(before, self.parts.state(), fault)
        if any(finding.rule == "nan_reaches_weights" for finding in findings) or stopped:
            return findings
        after = self.parts.scale()
        if fault == "inf_grad" and scale is not None and scale > 1 and not (after or 0.0) < scale:
            findings.append(_no_update(fault, f"the loss scaling factor stays at {scale:g} after an overflow", scale))
        return findings + self._next(fault, findings)

    def _next(self, fault: str, so_far: list[Finding]) -> list[Finding]:
        """What the good window after the bad one shows, beside a run that never met the bad one."""
        twin = _OneRun(self.bench, self.window)
        for number in range(GOOD):
            twin.good(number)
        expected = twin.good(GOOD + 1)
        try:
            update = self.good(GOOD + 1)
        except RuntimeError as error:
            words = str(error)[:110]
            if _wants_update(error):
                return [_no_update(fault, f"the window after a refused one fails: {words}")]
            told = Evidence(GOOD + 2, {"planted": fault, "raised": words})
            return [found("step_after_skip_fails", "the window after a refused one fails", told)]
        if update is None:
            told = Evidence(GOOD + 2, {"planted": fault})
            return [found("bad_gradients_stay", "the good window after a refused one takes no step", told)]
        if expected is None or any(finding.rule.endswith(("_weights", "_moments")) for finding in so_far):
            return []  # it stands elsewhere now, so its gradient is another, too
        apart = ((update.gradient - expected.gradient).norm() / expected.gradient.norm()).item()
        if apart <= SLACK:
            return []
        told = Evidence(GOOD + 2, {"planted": fault, "difference of the next gradient": apart})
        return [found("bad_gradients_stay", "the gradient after a refused window is another than without it", told)]


def _wants_update(error: Exception) -> bool:
    """Whether a GradScaler says that it was not updated since the last window."""
    return isinstance(error, RuntimeError) and any(
        words in str(error) for words in ("since the last update()", "unscale_() is being called after step()")
    )


def _no_update(fault: str, symptom: str, scale: float | None = None) -> Finding:
    values: dict[str, float | int | str | None] = {"planted": fault}
    return found("no_scaler_update_on_skip", symptom, Evidence(GOOD + 1, values | ({"scale": scale} if scale else {})))


def _moved(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]], fault: str) -> list[Finding]:
    moved = {kind: changed(before[kind], after[kind]) for kind in before}

    def told(kind: str, count: int) -> Evidence:
        return Evidence(GOOD + 1, {"planted": fault, "changed": count, "first": moved[kind][0]})

    def poisoned(kind: str) -> list[str]:
        return [name for name in moved[kind] if not _finite(after[kind].get(name)) and _finite(before[kind].get(name))]

    findings = []
    if sick := poisoned("weights"):
        findings.append(found("nan_reaches_weights", "a bad window makes weights NaN", told("weights", len(sick))))
    elif moved["weights"]:
        count = len(moved["weights"])
        findings.append(found("skip_moves_weights", "a bad window moves the weights", told("weights", count)))
    if not sick and (lost := poisoned("optimizer")):
        findings.append(found("nan_reaches_moments", "a bad window makes moments NaN", told("optimizer", len(lost))))
    elif moved["optimizer"] and not sick and not moved["weights"]:
        count = len(moved["optimizer"])
        findings.append(found("skip_moves_moments", "a refused window moves the moments", told("optimizer", count)))
    if bad := poisoned("buffers"):
        findings.append(found("nan_reaches_buffers", "a bad window makes buffers NaN", told("buffers", len(bad))))
    elif moved["buffers"]:
        count = len(moved["buffers"])
        findings.append(found("skip_moves_buffers", "a refused window moves buffers", told("buffers", count)))
    if moved["schedule"] and not sick:
        count = len(moved["schedule"])
        findings.append(found("skip_moves_schedule", "a refused window moves the schedule", told("schedule", count)))
    return findings


def _finite(value: Any) -> bool:
    return not isinstance(value, Tensor) or not value.is_floating_point() or bool(value.isfinite().all())


def _with_nan(batch: Any) -> Any:
    """``batch`` with one NaN in each of its floating-point tensors."""

    def spoilt(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.numel() == 0:
            return tensor
        copy = tensor.clone()
        copy.view(-1)[0] = float("nan")
        return copy

    return mapped(batch, spoilt)


@contextlib.contextmanager
def _planted(fault: str, bad: Any, parts: Parts, weights: list[Tensor]) -> Iterator[None]:
    """The fault inside the block. Data without floating-point numbers (tokens) cannot be NaN: the outputs are, then."""
    if fault == "inf_grad":
        with altered_gradients(weights, float("inf")):
            yield
        return
    if any(tensor.is_floating_point() for tensor in tensors_of(bad)):
        yield
        return
    handles = [
        module.register_forward_hook(
            lambda _module, _inputs, output: mapped(output, lambda t: t * torch.nan if t.is_floating_point() else t)
        )
        for module in parts.modules
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

"""Whether a step fits in memory, and what takes it: the user's own step is run, and what it holds is counted."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .finding import Finding
from .gradients import OVERFLOWS, StepFn, tensors_of
from .known import found
from .memory_failures import MEMORY_FAILURES
from .memory_watch import Counted, MemoryWatch
from .parts import Parts
from .watched import built, check_callables, kept_rng, seed_all

__all__ = ["probe_memory"]

#: Activations this many times as large as weights, gradients and optimizer state together dominate.
DOMINATE = 8.0
#: Below this they are not worth a word, where no limit is given: any small convolutional network holds a hundred times
#: its weights in activations and fills no device. A transformer of usual size with a usual batch holds up to 8 times
#: its state. What is both large and much larger than the rest is what the next larger batch fails by.
WORTH_BYTES = 256 * 2**20
#: With a limit, they are worth it above this share of the limit.
WORTH_SHARE = 0.5


def probe_memory(
    step_fn: StepFn,
    make_model: Callable[[], Any],
    micro_batches: list[Any],
    *,
    limit_bytes: float | None = None,
    seed: int = 0,
) -> list[Finding]:
    """Whether a step fits in memory, what takes most of it, and whether anything outlives it. Counted, not timed.

    Two windows are run on a fresh model, the second one watched: every tensor on the model's device, until it is freed.
    What autograd recomputes is counted, too; what a kernel uses inside is not, so the truth is a little higher.

    Args:
        step_fn: ``step_fn(run, micro_batches)``, one optimizer step. make_model: makes ``run``; it is called twice.
        micro_batches: one window, of the size that you train with, as ``step_fn`` takes it; ``[batch]`` for one.
        limit_bytes: what there is, for example ``torch.cuda.mem_get_info()[1]``; None = only what stands out is said.

    Returns:
        ``weights_do_not_fit`` (without any activation), ``does_not_fit`` (with them), ``activations_dominate`` (it
        fits, but they are more than 8 times the rest, and above 256 MiB or half of the limit),
        ``micro_batches_at_once``, ``graph_kept`` (a graph that outlives its step, and grows); or nothing. A step that
        really runs out of memory is a finding, too.

    Raises:
        ValueError: no list of micro-batches, a limit that is none, a step that takes no optimizer step.

    >>> def make():
    ...     layers = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU()) for _ in range(4)]
    ...     model = torch.nn.Sequential(*layers)
    ...     return model, torch.optim.AdamW(model.parameters())
    >>> def step(run, micro_batches):
    ...     model, optimizer = run
    ...     optimizer.zero_grad()
    ...     for x, y in micro_batches:
    ...         (torch.nn.functional.mse_loss(model(x), y) / len(micro_batches)).backward()
    ...     optimizer.step()
    >>> batch = torch.rand(512, 32), torch.rand(512, 32)
    >>> print(probe_memory(step, make, [batch], limit_bytes=600_000)[0].symptom)
    the step needs 772 kB of 600 kB: 590 kB are activations, and all the rest takes 182 kB
    >>> halves = [tuple(t[rows] for t in batch) for rows in (slice(256), slice(256, None))]
    >>> probe_memory(step, make, halves, limit_bytes=600_000)
    []
    """
    if not isinstance(micro_batches, list) or not micro_batches or not all(map(tensors_of, micro_batches)):
        raise ValueError(
            "micro_batches must be a list of batches with tensors, the window of one step: [batch] for one"
        )
    check_callables(step_fn=step_fn, make_model=make_model)
    if limit_bytes is not None and not (isinstance(limit_bytes, int | float) and 0 < limit_bytes < math.inf):
        raise ValueError(f"limit_bytes={limit_bytes!r} must be a number above 0 and finite, or None")
    with kept_rng():
        run, parts = _fresh(make_model, seed)
        nodes: list[int] = []
        for number in range(OVERFLOWS):
            seed_all(seed + number)
            watch, scale = MemoryWatch(parts, micro_batches), parts.scale()
            try:
                with watch:
                    step_fn(run, list(micro_batches))
            except RuntimeError as error:
                if not _is_out_of_memory(error):
                    raise
                return [_ran_out(watch, limit_bytes)]
            if watch.steps:
                nodes.append(_nodes(_with_graph()))
            elif scale is None or not (parts.scale() or 0.0) < scale:  # no overflow either: it never will
                break
            if len(nodes) == 2:
                return _judge(watch.counted(), limit_bytes, len(micro_batches), nodes)
    raise ValueError(
        f"step_fn took no optimizer step on a window of {len(micro_batches)}; it must take one (a "
        "torch.optim.Optimizer's) per call"
    )


def _fresh(make_model: Callable[[], Any], seed: int) -> tuple[Any, Parts]:
    """A run of its own. One model at a time is in memory.

    Raises:
        ValueError: ``make_model`` gives the same weights out twice: this would train the caller's.
    """
    first = [weakref.ref(p) for p in built(make_model, seed)[1].weights()]
    if any(ref() is not None for ref in first):  # in a cycle, or kept
        gc.collect()
    run, parts = built(make_model, seed)
    alive = {id(p) for p in parts.weights()}
    if any(id(p) in alive for p in (ref() for ref in first) if p is not None):
        raise ValueError("make_model returned the same weights twice; build or copy the model inside it")
    return run, parts


def _with_graph() -> list[Tensor]:
    """All tensors alive in this process that have a graph."""

    kinds = {Tensor}
    ahead = [Tensor]
    while ahead:
        ahead = [below for kind in ahead for below in kind.__subclasses__() if below not in kinds]
        kinds.update(ahead)

    def look() -> list[Tensor]:
        return [t for t in gc.get_objects() if type(t) in kinds and _has_graph(t)]

    if not look():
        return []
    gc.collect()  # slow, and only what is in a cycle goes by it
    return look()


def _has_graph(tensor: Tensor) -> bool:
    try:
        return tensor.grad_fn is not None
    except RuntimeError:  # the shell of a freed one, of which older versions leave some
        return False


def _nodes(tensors: Iterable[Tensor]) -> int:
    """The nodes of their graphs."""
    seen: set[Any] = set()
    ahead = [tensor.grad_fn for tensor in tensors]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            ahead += [below for below, _ in node.next_functions]
    return len(seen)


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _ran_out(watch: MemoryWatch, limit: float | None) -> Finding:
    counted = watch.counted()
    if not watch.counting:
        symptom = "memory ran out in the optimizer's step, where its state is made"
        return found("weights_do_not_fit", symptom, counted.told(limit), among=MEMORY_FAILURES)
    symptom = f"memory ran out in the step, {_size(counted.activations)} of activations into it"
    return found("does_not_fit", symptom, counted.told(limit), among=MEMORY_FAILURES)


def _judge(counted: Counted, limit: float | None, micro_batches: int, nodes: list[int]) -> list[Finding]:
    """Findings, errors first."""
    told = counted.told(limit)
    state, activations = _size(counted.state), _size(counted.activations)
    worth = WORTH_BYTES if limit is None else WORTH_SHARE * limit
    findings = []
    if limit is not None and not counted.state <= limit:
        symptom = f"weights, gradients and optimizer state alone take {state} of {_size(limit)}"
        findings.append(found("weights_do_not_fit", symptom, told, among=MEMORY_FAILURES))
    elif limit is not None and not counted.needed <= limit:
        rest = _size(counted.needed - counted.activations)
        symptom = (
            f"the step needs {_size(counted.needed)} of {_size(limit)}: {activations} are activations, and all the "
            f"rest takes {rest}"
        )
        findings.append(found("does_not_fit", symptom, told, among=MEMORY_FAILURES))
    if nodes[1] > nodes[0]:
        grown = counted.told(limit, **{"bytes left": counted.left})
        symptom = f"a graph outlives its step: {nodes[0]} nodes are alive after one, {nodes[1]} after the next"
        findings.append(found("graph_kept", symptom, grown, among=MEMORY_FAILURES))
    fits = limit is None or max(counted.state, counted.needed) <= limit
    if fits and counted.activations > max(worth, DOMINATE * counted.state):
        times = counted.activations / counted.state
        symptom = f"activations take {activations}, {times:.3g} times weights, gradients and optimizer state"
        findings.append(found("activations_dominate", symptom, told, among=MEMORY_FAILURES))
    if counted.at_once is not None and counted.at_once > 1 and nodes[1] <= nodes[0]:
        symptom = f"{counted.at_once} of {micro_batches} micro-batches keep their activations at once"
        findings.append(found("micro_batches_at_once", symptom, told, among=MEMORY_FAILURES))
    return findings


def _size(count: float) -> str:
    """Bytes in decimal units.

    >>> _size(655_360), _size(24e9), _size(12)
    ('655 kB', '24 GB', '12 B')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"

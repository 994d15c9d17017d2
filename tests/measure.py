"""How the tests and benchmarks measure: reads of the device by the host, operations, and ratios of times.

Counts repeat exactly. Times do not: they are only ever given as a ratio to a named baseline that ran interleaved
with ours, by medians.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

#: Operations that hand a value to the host: item(), bool(), float(); nonzero() and equal() wait for it too.
READING_OPS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select"}


class Watch(TorchDispatchMode):
    """Counts operations, and host reads among them, while entered; what an optimizer does inside step() is left out.

    Seen: every dispatched operation; ``tolist`` and ``numpy``, which bypass the dispatcher on a CPU; copies from an
    accelerator to the CPU. Not seen: what a fused kernel reads by itself, and reads through a raw data pointer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        self._optimizer, self._inside = optimizer, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._inside:
            name = func.overloadpacket.__name__
            self.ops[name] += 1
            leaves = name in ("_to_copy", "copy_") and any(
                isinstance(a, torch.Tensor) and a.device.type != "cpu" for a in args
            )
            if name in READING_OPS or leaves:
                self.reads[name] += 1
        return func(*args, **kwargs)

    def __enter__(self) -> Watch:
        self._handles = []
        if self._optimizer is not None:
            self._handles = [
                self._optimizer.register_step_pre_hook(lambda *_: setattr(self, "_inside", True)),
                self._optimizer.register_step_post_hook(lambda *_: setattr(self, "_inside", False)),
            ]
        self._originals = {name: getattr(torch.Tensor, name) for name in ("tolist", "numpy")}
        for name, original in self._originals.items():
            setattr(torch.Tensor, name, self._counted(name, original))
        super().__enter__()
        return self

    def _counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self._inside:
                self.reads[name] += 1
            return original(tensor, *args, **kwargs)

        return read

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for name, original in self._originals.items():
            setattr(torch.Tensor, name, original)
        for handle in self._handles:
            handle.remove()


class CountsSync(nn.Linear):
    """Stands where a data-parallel wrapper would: counts how often its gradients would be reduced."""

    def __init__(self):
        super().__init__(3, 1)
        self.synced, self.local = 0, False
        self.weight.register_hook(self.on_backward)

    def on_backward(self, grad):
        self.synced += not self.local

    @contextlib.contextmanager
    def no_sync(self):
        self.local = True
        try:
            yield
        finally:
            self.local = False


class Measured(float):
    """A median, with the quartiles of the rounds that it is the median of."""

    low: float
    high: float

    @classmethod
    def of(cls, rounds: Sequence[float]) -> Measured:
        """From the values of all rounds, four at least.

        >>> value = Measured.of([1.0, 9.0, 2.0, 3.0, 4.0])
        >>> float(value), value.low, value.high
        (3.0, 2.0, 4.0)
        """
        value = cls(statistics.median(rounds))
        value.low, _, value.high = statistics.quantiles(rounds, n=4, method="inclusive")
        return value


def seconds_of(function: Callable[[], Any], calls: int = 1) -> float:
    """Wall time of that many calls."""
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return time.perf_counter() - start


def paired_ratio(
    ours: Callable[[], Any], baseline: Callable[[], Any], *, rounds: int, warmup: int = 3, calls: int = 1
) -> Measured:
    """Median over rounds of (our time / the baseline's time), the two run in turn, first and second alternating."""
    return ratios_to({"ours": ours}, baseline, rounds=rounds, warmup=warmup, calls=calls)["ours"]


def ratios_to(
    others: Mapping[str, Callable[[], Any]],
    baseline: Callable[[], Any],
    *,
    rounds: int,
    warmup: int = 3,
    calls: int = 1,
) -> dict[str, Measured]:
    """By name, the median over rounds of (its time / the baseline's): all run in each round, its order turned round
    from one to the next, so that what stands first or last does not always stand there."""
    runs = {**others, "": baseline}
    for _ in range(warmup):
        for run in runs.values():
            run()
    ratios: dict[str, list[float]] = {name: [] for name in others}
    for i in range(rounds):
        order = list(runs) if i % 2 else list(runs)[::-1]
        took = {name: seconds_of(runs[name], calls) for name in order}
        for name in others:
            ratios[name].append(took[name] / took[""])
    return {name: Measured.of(values) for name, values in ratios.items()}

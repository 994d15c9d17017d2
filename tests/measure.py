"""How the tests and benchmarks measure: reads of the device by the host, operations, and ratios of times.

Counts repeat exactly. Times do not: they are only ever given as a ratio to a named baseline that ran interleaved
with ours, by medians.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
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


def paired_ratio(
    ours: Callable[[], Any], baseline: Callable[[], Any], *, rounds: int, warmup: int = 3, calls: int = 1
) -> float:
    """Median over rounds of (our time / the baseline's time), the two run in turn, first and second alternating."""

    def seconds(function: Callable[[], Any]) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            function()
        return time.perf_counter() - start

    for _ in range(warmup):
        ours(), baseline()
    ratios = []
    for i in range(rounds):
        if i % 2:
            b, a = seconds(baseline), seconds(ours)
        else:
            a, b = seconds(ours), seconds(baseline)
        ratios.append(a / b)
    return statistics.median(ratios)

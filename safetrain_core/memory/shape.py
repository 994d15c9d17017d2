"""What a GPT's training step takes, as closed forms: bytes of activations at their peak and FLOPs, by policy.

For a pre-norm transformer with an MLP of 4 x width, GELU, no dropout, everything in one dtype. They say what
``measure_recompute`` counts for MiniGPT: FLOPs exactly, bytes within some percent. No torch here.

::

    u = batch * seq * hidden values   a = batch * heads * seq^2 values (scores)   v = batch * seq * vocab values
    a layer keeps  16 u: input, norm, q k v, mix, residual, norm, 4 + 4 of the MLP; norm statistics; with the kernel
                   "math" the softmax's result, a; with "flash" one value per head and token
    the peak is the largest of  the MLP's backward:       what is kept + 5 u + one weight's gradient
                                the attention's backward: what is kept by then + 3 a  ("math" only)
                                the loss:                 what is kept + 2 u + 3 v
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from .rules import optimal_segment

__all__ = ["RecomputeOption", "Shape"]


@dataclass(frozen=True, slots=True)
class RecomputeOption:
    """One policy at one size: predicted bytes of activations, and FLOPs recomputed as a fraction of the plain step's.

    ``host_bytes``: what ``offload`` keeps in host memory; its cost is the way there and back, not FLOPs.

    >>> RecomputeOption("every_k", 4, activation_bytes=2_000_000, overhead=0.3).name
    'every_k, k=4'
    """

    policy: str
    k: int | None
    activation_bytes: int
    overhead: float
    host_bytes: int = 0

    @property
    def name(self) -> str:
        """As people say it: ``every_k, k=4``."""
        return self.policy if self.k is None else f"{self.policy}, k={self.k}"


@dataclass(frozen=True, slots=True)
class Shape:
    """A GPT's size; ``vocab=0`` leaves out embedding, head and loss."""

    layers: int
    hidden: int
    seq: int
    batch: int
    heads: int
    value_bytes: int
    attention: str
    vocab: int

    @property
    def u(self) -> int:
        return self.batch * self.seq * self.hidden * self.value_bytes

    @property
    def scores(self) -> int:
        """Bytes of one matrix of scores; none is ever made by the flash kernel."""
        whole = self.batch * self.heads * self.seq**2 * max(4, self.value_bytes)  # it computes them in float32
        return whole if self.attention == "math" else 0

    @property
    def statistics(self) -> int:
        """Mean and deviation of two norms, in float32."""
        return 16 * self.batch * self.seq

    @property
    def from_attention(self) -> int:
        """Kept by the attention core beside q, k, v and the mix."""
        if self.attention == "flash":
            return 4 * self.batch * self.heads * self.seq
        return self.scores + self.beside

    @property
    def beside(self) -> int:
        """What the math kernel's q, k and v take beyond the 3 u that are counted.

        It copies them: in float32, q and k scaled. At batch 1 its v is a view instead, and keeps the unscaled q and k.
        """
        if self.attention == "flash":
            return 0
        if self.value_bytes < 4:
            return 3 * self.u
        return 2 * self.u if self.batch == 1 else 0

    @property
    def layer(self) -> int:
        return 16 * self.u + self.statistics + self.from_attention

    @property
    def mlp_backward(self) -> int:
        """Beside what is kept: the gradients of output and hidden layer, and one weight's."""
        return 5 * self.u + 4 * self.hidden**2 * self.value_bytes

    def peak(self, kept: int, mlp: int, attention: int) -> int:
        """The largest of the moments told at the top of this module."""
        table = self.vocab * self.hidden * self.value_bytes
        v = self.batch * self.seq * self.vocab * self.value_bytes
        moments = [mlp + table]  # a tied head's gradient waits for the embedding's
        if self.attention == "math":
            moments.append(attention + table + 3 * self.scores)
        if self.vocab:
            moments += [kept + 2 * self.u + max(3 * v, v + table + self.u), 2 * self.u + table]
        return max(moments)

    def segments(self, size: int, kept: int | None = None) -> int:
        """Peak with segments of ``size`` layers; ``kept`` where it is not the boundaries alone."""
        sizes = [min(size, self.layers - start) for start in range(0, self.layers, size)]
        u, count = self.u, len(sizes)
        return max(
            self.peak(
                count * u if kept is None else kept,
                (i + 1) * u + own * self.layer - u + self.mlp_backward,
                (i + 1) * u + (own - 1) * self.layer + 6 * u + self.beside,
            )
            for i, own in enumerate(sizes)
        )

    def selective(self) -> int:
        """Peak where the attention cores are recomputed: then q and k scaled, and v, stand beside their originals."""
        layer = self.layer - self.from_attention
        mlp = self.layers * layer + self.mlp_backward
        return self.peak(self.layers * layer, mlp, (self.layers - 1) * layer + 10 * self.u)

    def selective_ops(self) -> int:
        """Peak where what products and fused attention return is kept: input, q k v, mix, output, MLP's 4 and 1."""
        flash = self.attention == "flash"
        layer = 11 * self.u + self.from_attention if flash else 10 * self.u
        again = (6 if flash else 10) * self.u + self.statistics + self.scores
        mlp = self.layers * layer + again + self.mlp_backward
        return self.peak(self.layers * layer, mlp, (self.layers - 1) * layer + 11 * self.u)

    def offload(self) -> tuple[int, int]:
        """Peak on the device, one layer's work; and what waits on the host, a tensor saved twice counted twice."""
        work = max(10 * self.u, 4 * self.u + self.mlp_backward)
        twice = self.u if self.attention == "flash" else self.scores
        return self.peak(self.u, work, 2 * self.u), self.layers * (self.layer + twice)

    # FLOPs: a multiply-add counts as 2; a causal kernel is counted as if it did the whole square, as torch counts it.

    @property
    def core_flops(self) -> int:
        return 4 * self.batch * self.seq**2 * self.hidden

    @property
    def layer_flops(self) -> int:
        return 24 * self.batch * self.seq * self.hidden**2 + self.core_flops

    @property
    def step_flops(self) -> float:
        """Forward and backward: products three times, fused attention 3.5 times (it recomputes its scores itself)."""
        head = 6 * self.batch * self.seq * self.hidden * self.vocab
        return self.layers * (3 * self.layer_flops + (0.5 if self.attention == "flash" else 0) * self.core_flops) + head

    def segment_flops(self, size: int) -> int:
        """Every layer again, but for the last product of each segment: torch stops when it has what it needs."""
        last = 8 * self.batch * self.seq * self.hidden**2
        return self.layers * self.layer_flops - math.ceil(self.layers / size) * last

    def options(self) -> Iterator[RecomputeOption]:
        """Every policy, the simplest first."""
        n, flash, step = self.layers, self.attention == "flash", self.step_flops
        core = n * self.core_flops
        yield RecomputeOption("none", None, self.segments(n, n * self.layer), 0.0)
        yield RecomputeOption("selective_ops", None, self.selective_ops(), 0.0 if flash else core / step)
        # A fused kernel runs again as a whole; the others stop before the mix.
        yield RecomputeOption("selective", None, self.selective(), core * (1 if flash else 0.5) / step)
        yield RecomputeOption("full", None, self.segments(1), self.segment_flops(1) / step)
        sizes = [2**power for power in range(1, max(1, n.bit_length())) if 2**power < n]
        for size in sizes:
            yield RecomputeOption("every_k", size, self.segments(size), self.segment_flops(size) / step)
        size = optimal_segment(n)
        yield RecomputeOption("sqrt", None, self.segments(size), self.segment_flops(size) / step)
        device, host = self.offload()
        yield RecomputeOption("offload", None, device, 0.0, host)

"""Rules of thumb: what activations take, and what recomputing them costs. No torch here: answers come at once.

They are rules, not counts. ``plan`` is exact for a GPT; ``measure_recompute`` counts whatever model there is.
"""

from __future__ import annotations

import math

__all__ = [
    "POLICIES",
    "activation_memory_bytes",
    "checkpoint_cost",
    "memory_after_checkpoint_bytes",
    "optimal_segment",
    "selective_checkpoint_cost",
    "transformer_activation_bytes",
]

#: What a layer keeps, in values per token and unit of width, by the rule of thumb.
VALUES_PER_LAYER = 12

POLICIES = ("none", "full", "every_k", "sqrt", "selective", "selective_ops", "offload")


def checked_count(name: str, value: int, least: int = 1) -> int:
    """``value``, or ``ValueError`` where it is no whole number of at least ``least``.

    >>> checked_count("k", 0)
    Traceback (most recent call last):
    ...
    ValueError: k=0 must be a whole number of at least 1
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
    return value


def _check(**counts: int) -> None:
    for name, value in counts.items():
        checked_count(name, value)


def activation_memory_bytes(
    n_layers: int, hidden: int = 8192, seq: int = 8192, batch: int = 1, bytes_per_value: int = 2
) -> int:
    """Activations that ``n_layers`` transformer layers keep for backward, by the rule 12 * batch * seq * hidden values.

    Args:
        hidden: model width d. seq: tokens per sequence. bytes_per_value: 2 for bfloat16, 4 for float32.

    Raises:
        ValueError: a size below 1.

    >>> round(activation_memory_bytes(1) / 1e9, 2), round(activation_memory_bytes(64) / 1e9)  # GB
    (1.61, 103)
    """
    _check(n_layers=n_layers, hidden=hidden, seq=seq, batch=batch, bytes_per_value=bytes_per_value)
    return n_layers * VALUES_PER_LAYER * batch * seq * hidden * bytes_per_value


def transformer_activation_bytes(
    n_layers: int, hidden: int, seq: int, batch: int, heads: int, *, policy: str = "none"
) -> int:
    """The finer rule, with the attention term, for 16-bit training with dropout: s b h (34 + 5 a s / h) per layer.

    Args:
        hidden, seq, batch, heads: h, s, b and a of the formula.
        policy: "none"; "selective" (34 s b h: the attention core is recomputed); "full" (2 s b h: the input is kept).

    Raises:
        ValueError: a size below 1, or another policy.

    Source: Korthikanti et al. 2022, arXiv:2205.05198, equations 1 and 2 and table 2.

    >>> transformer_activation_bytes(1, 12288, 2048, 1, 96) / (2048 * 12288)  # GPT-3: attention is most of it
    114.0
    """
    _check(n_layers=n_layers, hidden=hidden, seq=seq, batch=batch, heads=heads)
    if policy not in ("none", "selective", "full"):
        raise ValueError(f"policy={policy!r} has no formula here; use none, selective or full")
    token_values = seq * batch * hidden
    if policy == "full":
        return n_layers * 2 * token_values
    scores = 5 * heads * seq * seq * batch if policy == "none" else 0
    return n_layers * (34 * token_values + scores)


def checkpoint_cost(n_layers: int, fwd_per_layer: float = 1.0) -> dict[str, float]:
    """The cost of a step with every layer recomputed: forward 1, recompute 1, backward 2, so 4 units instead of 3.

    Args:
        fwd_per_layer: what one layer's forward costs, in any unit; the backward costs twice that.

    Returns:
        ``fwd``, ``recompute``, ``bwd``, ``total`` in that unit, and ``overhead_vs_no_ckpt`` as a fraction.

    Raises:
        ValueError: ``n_layers`` below 1, or ``fwd_per_layer`` not above 0.

    torch stops a recompute as soon as it has what it needs, which leaves out each segment's last product: counted, full
    costs about 25 %. Source of the rule: Chen et al. 2016, arXiv:1604.06174.

    >>> checkpoint_cost(64)["total"] / 64, round(checkpoint_cost(64)["overhead_vs_no_ckpt"], 3)
    (4.0, 0.333)
    """
    return _cost(n_layers, fwd_per_layer, 1.0)


def selective_checkpoint_cost(
    n_layers: int, attention_fraction: float = 0.15, fwd_per_layer: float = 1.0
) -> dict[str, float]:
    """The cost of a step that recomputes the attention only; see ``checkpoint_cost``.

    Args:
        attention_fraction: share of a layer's forward spent in what is recomputed, 0 to 1.

    Raises:
        ValueError: another share, or as ``checkpoint_cost``.

    >>> round(selective_checkpoint_cost(64)["overhead_vs_no_ckpt"], 3)
    0.05
    """
    if not 0 <= attention_fraction <= 1:
        raise ValueError(f"attention_fraction={attention_fraction} must be a share between 0 and 1")
    return _cost(n_layers, fwd_per_layer, attention_fraction)


def _cost(n_layers: int, fwd_per_layer: float, share: float) -> dict[str, float]:
    checked_count("n_layers", n_layers)
    if not 0 < fwd_per_layer < math.inf:
        raise ValueError(f"fwd_per_layer={fwd_per_layer} must be a number above 0")
    fwd = n_layers * fwd_per_layer
    recompute, bwd = share * fwd, 2 * fwd
    return {
        "fwd": fwd,
        "recompute": recompute,
        "bwd": bwd,
        "total": fwd + recompute + bwd,
        "overhead_vs_no_ckpt": recompute / (fwd + bwd),
    }


def memory_after_checkpoint_bytes(
    n_layers: int,
    segment_size: int,
    hidden: int = 8192,
    seq: int = 8192,
    batch: int = 1,
    bytes_per_value: int = 2,
    *,
    boundary_values: int = VALUES_PER_LAYER,
) -> int:
    """Activations at their peak with segments of ``segment_size`` layers: the kept boundaries and one segment's inside.

    Args:
        segment_size: layers per segment; above the depth it is the depth.
        boundary_values: values per token and unit of width that a kept boundary takes. The classical rule, the default,
            lets it take as much as a layer's inside (12), and so has its knee at sqrt(n_layers). In a transformer it is
            the layer's input alone (1), and memory grows with the segment from 2 or 3 layers on.

    Raises:
        ValueError: a size below 1.

    >>> [round(memory_after_checkpoint_bytes(64, k) / 1e9) for k in (1, 8, 64)]  # the rule: least at 8
    [105, 26, 105]
    >>> [round(memory_after_checkpoint_bytes(64, k, boundary_values=1) / 1e9) for k in (1, 8, 64)]
    [10, 14, 103]
    """
    _check(n_layers=n_layers, segment_size=segment_size, boundary_values=boundary_values)
    size = min(segment_size, n_layers)
    layer = activation_memory_bytes(1, hidden, seq, batch, bytes_per_value)
    return math.ceil(n_layers / size) * layer * boundary_values // VALUES_PER_LAYER + size * layer


def optimal_segment(n_layers: int) -> int:
    """Layers per segment that the classical rule likes best, about sqrt(n_layers): least ceil(n / k) + k.

    Raises:
        ValueError: ``n_layers`` below 1.

    >>> [optimal_segment(n) for n in (1, 2, 16, 64, 100)]
    [1, 1, 4, 8, 10]
    """
    checked_count("n_layers", n_layers)
    root = math.sqrt(n_layers)
    return min(range(1, math.isqrt(n_layers) + 2), key=lambda k: (math.ceil(n_layers / k) + k, abs(k - root)))

"""The cells of a run's log: what is known of an attempt, and the gradient norms of the model's blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..records import BLOCK_COLUMN, StepLog
from ..step.verdict import GradientDetail

__all__ = ["Attempt", "block_columns", "block_norms", "blocks_of", "gradient_cells", "row_cells"]


class Attempt(NamedTuple):
    """What the log tells of an attempt besides its row; ``start`` is its (epoch, batch_in_epoch)."""

    start: tuple[int, int]
    samples: int
    seconds: float
    cells: dict[str, Any]


def row_cells(row: StepLog, attempt: Attempt, updates: int, retries: int, val_loss: float | None) -> dict[str, Any]:
    """A row of the log by its columns.

    >>> row = StepLog(7, 0.1, 2.0, 1.0, 0.5, None)
    >>> cells = row_cells(row, Attempt((0, 6), 32, 0.25, {"gradient_rms": 0.1}), updates=7, retries=0, val_loss=None)
    >>> cells["gradient_norm"], cells["samples_per_s"], cells["gradient_rms"]
    (2.0, 128.0, 0.1)
    """
    return {
        "step": row.step,
        "updates": updates,
        "epoch": attempt.start[0],
        "loss": row.loss,
        "learning_rate": row.lr,
        "gradient_norm": row.pre_clip,
        "gradient_norm_clipped": row.post_clip,
        "scaler_scale": row.scale,
        "skipped": row.skipped,
        "skip_reason": row.skip_reason,
        "retries": retries,
        "effective_batch_size": attempt.samples,
        "step_time_ms": round(1000 * attempt.seconds, 3),
        "samples_per_s": round(attempt.samples / attempt.seconds, 3),
        "val_loss": val_loss,
        **attempt.cells,
    }


def blocks_of(model: nn.Module, given: Mapping[str, Any] | None = None) -> dict[str, list[Tensor]]:
    """Block name -> its trainable weights: the model's top-level blocks, numbered layers apart.

    A weight that several blocks share belongs to the first, so that the blocks' norms add up to the whole norm.

    Args:
        given: names -> modules or lists of parameters, instead of the model's own.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> {name: len(weights) for name, weights in blocks_of(model).items()}
    {'0': 2, '2': 2}
    """
    if given is None:
        given = dict(_top_blocks(model))
    made: dict[str, list[Tensor]] = {}
    taken: set[int] = set()
    for name, block in given.items():
        made[name] = [p for p in _parameters(block) if p.requires_grad and id(p) not in taken]
        taken |= {id(p) for p in made[name]}
    return {name: weights for name, weights in made.items() if weights}


def _top_blocks(model: nn.Module) -> Iterator[tuple[str, Any]]:
    inner = getattr(model, "module", getattr(model, "_orig_mod", None))
    if isinstance(inner, nn.Module):  # wrapped by DistributedDataParallel or torch.compile
        yield from _top_blocks(inner)
        return
    for name, weight in model.named_parameters(recurse=False):
        yield name, [weight]
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            yield from ((f"{name}.{part}", layer) for part, layer in child.named_children())
        else:
            yield name, child


def _parameters(block: nn.Module | Iterable[Tensor]) -> list[Tensor]:
    return list(block.parameters() if isinstance(block, nn.Module) else block)


def block_columns(blocks: Iterable[str]) -> list[str]:
    """The CSV columns of these blocks.

    >>> block_columns(["tokens", "blocks.0"])
    ['grad_norm_tokens', 'grad_norm_blocks.0']
    """
    return [BLOCK_COLUMN + name for name in blocks]


def block_norms(blocks: Mapping[str, list[Tensor]], norm_of: Mapping[Tensor, float]) -> dict[str, float]:
    """Column -> the block's gradient norm, out of the norms of its gradients: no second walk over them.

    >>> a, b = nn.Parameter(), nn.Parameter()
    >>> block_norms({"head": [a, b]}, {a: 3.0, b: 4.0})
    {'grad_norm_head': 5.0}
    """
    return {
        BLOCK_COLUMN + name: sum(norm_of[w] ** 2 for w in weights if w in norm_of) ** 0.5
        for name, weights in blocks.items()
    }


def gradient_cells(
    detail: GradientDetail | None, blocks: Mapping[str, list[Tensor]], *, statistics: bool
) -> dict[str, float]:
    """The cells of a row about its gradients; none for a step whose gradients were not finite.

    >>> weight = nn.Parameter()
    >>> gradient_cells(GradientDetail({weight: 3.0}, 2.5, 0.5), {"head": [weight]}, statistics=True)
    {'gradient_max_abs': 2.5, 'gradient_rms': 0.5, 'grad_norm_head': 3.0}
    """
    if detail is None:
        return {}
    cells = {"gradient_max_abs": detail.max_abs, "gradient_rms": detail.rms} if statistics else {}
    return {**cells, **block_norms(blocks, detail.norm_of)}

"""What galore-torch, by GaLore's authors, makes of small problems: kept as fixtures, so that every machine can compare.

``python tests/galore_reference.py`` writes them anew; it needs the extra ``peers``. The gradient of a problem depends
on its weight, so that a difference in one update is carried into all later ones.
"""

import itertools
import json
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

FILE = Path(__file__).parent / "optim" / "galore_reference.json"
UPDATES = 50
LR, DECAY, EPS, SCALE = 0.003, 0.01, 1e-8, 0.25


class Case(NamedTuple):
    """``side`` is galore-torch's proj_type; "std" takes a square weight from the right, we from the left."""

    shape: tuple[int, int]
    side: str
    rank: int
    interval: int
    beta1: float

    @property
    def name(self):
        return f"{self.shape[0]}x{self.shape[1]}-{self.side}-rank{self.rank}-every{self.interval}-beta{self.beta1}"


SHAPES = [((20, 12), "std"), ((12, 20), "std"), ((12, 12), "left"), ((12, 12), "std")]

#: With one basis, or without a first moment, nothing depends on the signs of singular vectors, which are LAPACK's
#: choice and may differ between machines: these cases are kept.
KEPT = [
    Case(*shape, rank, interval, beta1)
    for shape, rank, (interval, beta1) in itertools.product(SHAPES, (2, 5), [(50, 0.9), (7, 0.0)])
]

#: Where a first moment meets a second basis, signs matter: compared only on the machine that has both packages.
LIVE = [
    Case(*shape, rank, interval, 0.9) for shape, rank, interval in itertools.product(SHAPES, (2, 5, 11), (3, 10, 60))
]


class Problem:
    """Least squares: 0.5 ||A W - C||^2 has the gradient A^T (A W - C)."""

    def __init__(self, shape):
        generator = torch.Generator().manual_seed(shape[0])
        self.start = torch.randn(shape, generator=generator)
        self.a = torch.randn(shape[0], shape[0], generator=generator) / shape[0] ** 0.5
        self.c = torch.randn(shape, generator=generator)

    def gradient(self, weight):
        return self.a.T @ (self.a @ weight - self.c)


def run(problem, make, *, transposed=False):
    """The weight after UPDATES updates by the optimizer of ``make(weight)``; on the transposed problem if asked."""
    turn = (lambda t: t.T.contiguous()) if transposed else (lambda t: t)
    weight = torch.nn.Parameter(turn(problem.start).clone())
    optimizer = make(weight)
    for _ in range(UPDATES):
        weight.grad = turn(problem.gradient(turn(weight.detach())))
        optimizer.step()
    return turn(weight.detach())


def theirs(case):
    """The weight by galore-torch."""
    from galore_torch import GaLoreAdamW

    def make(weight):
        group = {"params": [weight], "rank": case.rank, "update_proj_gap": case.interval, "scale": SCALE}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return GaLoreAdamW(
                [{**group, "proj_type": case.side}], lr=LR, betas=(case.beta1, 0.999), eps=EPS, weight_decay=DECAY
            )

    return run(Problem(case.shape), make)


if __name__ == "__main__":
    kept = {case.name: theirs(case).tolist() for case in KEPT}
    text = ",\n".join(f"{json.dumps(name)}: {json.dumps(rows)}" for name, rows in kept.items())
    FILE.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")
    print(f"{FILE.name}: {len(kept)} weights, {FILE.stat().st_size} bytes")

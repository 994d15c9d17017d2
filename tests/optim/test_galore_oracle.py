"""GaLore against galore-torch, by its authors: from fixtures everywhere, live where the package is installed."""

import json

import pytest
import torch
from galore_reference import DECAY, EPS, FILE, KEPT, LIVE, LR, SCALE, Problem, run, theirs

from safetrain_core import GaLore

TOLERANCE = 1e-5


def ours(case):
    """A square weight that they take from the right is ours from the left on the transposed problem."""

    def make(weight):
        return GaLore(
            [weight],
            lambda groups: torch.optim.AdamW(groups, lr=LR, betas=(case.beta1, 0.999), eps=EPS, weight_decay=DECAY),
            rank=case.rank,
            update_interval=case.interval,
            scale=SCALE,
        )

    transposed = case.shape[0] == case.shape[1] and case.side == "std"
    return run(Problem(case.shape), make, transposed=transposed)


@pytest.mark.parametrize("case", KEPT, ids=lambda case: case.name)
def test_fifty_updates_of_adamw_end_where_the_kept_reference_ends(case):
    reference = torch.tensor(json.loads(FILE.read_text(encoding="utf-8"))[case.name])
    moved = (reference - Problem(case.shape).start).abs().max()
    assert moved > 0.02
    assert (ours(case) - reference).abs().max() <= TOLERANCE


def test_a_square_weight_is_another_where_they_take_it_from_the_right():
    kept = json.loads(FILE.read_text(encoding="utf-8"))
    left, right = (
        torch.tensor(rows)
        for name, rows in kept.items()
        if name.startswith("12x12") and name.endswith("rank5-every50-beta0.9")
    )
    assert (left - right).abs().max() > 1e-2


@pytest.mark.parametrize("case", LIVE, ids=lambda case: case.name)
def test_fifty_updates_of_adamw_end_where_galore_torch_ends(case):
    pytest.importorskip("galore_torch", reason="galore-torch is not installed (extra peers)")
    assert (ours(case) - theirs(case)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("case", KEPT, ids=lambda case: case.name)
def test_the_kept_references_are_what_galore_torch_says_today(case):
    pytest.importorskip("galore_torch", reason="galore-torch is not installed (extra peers)")
    reference = torch.tensor(json.loads(FILE.read_text(encoding="utf-8"))[case.name])
    assert (theirs(case) - reference).abs().max() <= TOLERANCE

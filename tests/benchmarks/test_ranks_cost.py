"""What several ranks send to each other for one guarded update, counted; and a NaN on one of them."""

import math

import pytest
import rank_steps
from rank_steps import batches

from safetrain_core import launch

AREA = "several ranks"


def on_ranks(count, worker, *args, **options):
    return launch(rank_steps.call, count, worker, args, options, timeout_s=300)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_messages_of_an_update(claim, kind):
    for detail in (False, True):
        ranks = on_ranks(2, "trains", kind, batches(3), detail=detail)
        most = max(count for rank in ranks for count in rank["reduced"])
        with_what = "gradient statistics" if detail else "loss, norm and verdict"
        claim(f"all-reduces per update besides the gradients', {kind}, {with_what}", most, "<=", 1)


def test_a_nan_on_one_rank_is_skipped_on_all(claim):
    windows = batches(3)
    windows[1][0][1][0] = math.nan  # of the first rank's share alone
    ranks = on_ranks(3, "trains", "ddp", windows)
    told = {tuple((row.skipped, row.skip_reason) for row in rank["rows"]) for rank in ranks}
    assert told == {((False, None), (True, "non_finite_loss"), (False, None))}
    claim("ways in which 3 ranks judge a step with a NaN on one", len(told), "<=", 1)

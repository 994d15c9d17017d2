"""Under DDP and FSDP2, in two real processes over gloo, recomputation changes no bit either."""

import needs
import pytest
import recompute_ranks as work
from recompute_cases import LAYER_POLICIES, POLICIES

from safetrain_core import launch


@pytest.mark.parametrize(
    ("kind", "policies"),
    [
        ("ddp", POLICIES),
        ("ddp norm", LAYER_POLICIES),
        pytest.param("fsdp2", POLICIES, marks=needs.fsdp2),
    ],
)
def test_gradients_on_two_ranks_are_those_of_the_plain_run_for_every_policy(kind, policies):
    nothing = [(policy, k, [], []) for policy, k in policies]
    assert launch(work.differences, 2, kind, policies, timeout_s=120) == [nothing] * 2


@needs.fsdp2
def test_segments_see_through_the_aliases_that_fsdp_hands_to_layers():
    assert launch(work.segments, 2, timeout_s=60) == [[2, 3]] * 2

"""Agreement between ranks, in two real processes over gloo."""

import rank_workers

from safetrain_core import launch
from safetrain_core.distributed import agree


def test_agree_on_one_process_is_the_identity():
    assert [agree(code) for code in (0, 1, 5)] == [0, 1, 5]


def test_a_fault_on_rank_1_only_skips_the_step_on_every_rank_with_its_reason_and_one_scale():
    ranks = launch(rank_workers.steps_with_faults_on_rank_1, 2, timeout_s=90)
    assert [main for main, _ in ranks] == [True, False]
    told = ranks[0][1]
    assert told == ranks[1][1]
    assert told["agreed"] == 3
    assert not told["looks early"], (
        "asked for, and off with several ranks: a rank without its backward hangs the others"
    )
    assert told["rows"] == [
        (False, None, 1024.0),
        (True, "non_finite_loss", 1024.0),
        (True, "non_finite_grad", 1024.0),
        (False, None, 512.0),
    ]
    assert told["scale"] == (512.0, 1)

"""Under DDP and FSDP2, in two real processes over gloo, recomputation changes no bit either."""

import subprocess
import sys
from pathlib import Path

from recompute_cases import POLICIES


def test_ddp_and_fsdp2_gradients_are_those_of_the_plain_run_for_every_policy(tmp_path):
    script = Path(__file__).with_name("recompute_ranks.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), tmp_path / "rendezvous"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        told = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], told[0][1] + told[1][1]
    layers = [case for case in POLICIES if case[0] != "selective"]
    expected = [
        f"{name} {policy} {k} [] []"
        for name, policies in (("ddp", POLICIES), ("ddp norm", layers), ("fsdp", POLICIES))
        for policy, k in policies
    ]
    for out, _ in told:
        assert out.splitlines() == [*expected, "segments [2, 3]"]

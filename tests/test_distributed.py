"""Agreement between ranks, in two real processes over gloo."""

import subprocess
import sys
from pathlib import Path

from safetrain_core.distributed import agree


def test_agree_on_one_process_is_the_identity():
    assert [agree(code) for code in (0, 1, 5)] == [0, 1, 5]


def test_a_fault_on_rank_1_only_skips_the_step_on_every_rank_with_its_reason_and_one_scale(tmp_path):
    script = Path(__file__).with_name("two_ranks.py")
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
        told = [rank.communicate(timeout=90) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], told[0][1] + told[1][1]
    lines = [out.splitlines() for out, _ in told]
    assert lines[0][0] == "agree 3 world 2 main True"
    assert lines[1][0] == "agree 3 world 2 main False"
    assert lines[0][1:] == lines[1][1:]
    assert lines[0][1:-1] == [
        "row False None 1024.0",
        "row True non_finite_loss 1024.0",
        "row True non_finite_grad 1024.0",
        "row False None 512.0",
        "scale 512.0 1",
    ]

"""A rank over nccl on a real GPU: one short script, skipped where there is none. `pytest tests/gpu -q`"""

import pytest
import ranks_worker
import torch

from safetrain_core import launch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


def test_steps_a_nan_a_verified_save_and_a_load_over_nccl(tmp_path):
    reasons, scales, same, code = launch(ranks_worker.run, 1, tmp_path, backend="nccl", timeout_s=120)[0]
    assert reasons == [None, "non_finite_loss", None]
    assert scales == [1024.0] * 3
    assert same
    assert code == 1 + 8

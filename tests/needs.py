"""What some tests need, and the oldest torch that is supported has not: they are skipped there, and say so."""

import pytest
import torch

#: Marks a test that shards a model over ranks on CPUs.
fsdp2 = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 works on CPUs from torch 2.7 on"
)

#: Marks a test that steps with Muon.
muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")

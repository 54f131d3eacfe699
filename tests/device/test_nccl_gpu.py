"""On a GPU, every collective runs over NCCL on one rank, in every dtype, as the kit for the first day checks it."""

from __future__ import annotations

import pytest
import torch

from benchmarks.first_gpu import nccl
from benchmarks.first_gpu.common import Setting

pytestmark = pytest.mark.device


def test_every_collective_runs_over_nccl_on_one_rank() -> None:
    findings = list(nccl.check(Setting(torch.device("cuda", 0), False, 60.0)))
    assert len(findings) > 20
    assert [finding for finding in findings if finding.held is False] == []

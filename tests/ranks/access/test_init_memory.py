"""Resident memory of processes that build and shard a model, where holes in the heap count as much as live tensors."""

from __future__ import annotations

import platform

import pytest

from benchmarks.building import growth

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc"),
]


# Two ranks: shards are 0.5 of the fp32 model. The layer that is being built or sharded is 0.04. In bf16 shards are
# 0.25, and ``initialize`` adds fp32 main parameters of 0.5.
@pytest.mark.parametrize(
    ("way", "precision", "building", "initialize", "dtype"),
    [
        ("zero.Init", "fp32", 0.75, 0.75, "torch.float32"),
        ("zero.Init", "bf16", 0.5, 0.95, "torch.bfloat16"),
        ("meta", "fp32", 0.25, 0.8, "torch.float32"),
    ],
)
def test_the_processes_peak_is_the_shards_and_a_layer(
    way: str, precision: str, building: float, initialize: float, dtype: str
) -> None:
    for rank in growth(way, precision, ranks=2, layers=24, hidden=1024):
        assert rank.model == 96 << 20
        assert rank.building_peak < building * rank.model
        assert rank.initialize_peak < initialize * rank.model
        assert rank.shard_dtype == dtype

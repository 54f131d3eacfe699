"""The rank-ordered sum, against the plain formula."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal.comm.sums import BLOCK_NUMEL, RankOrderedSum

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def reference(parts: list[torch.Tensor], scale: float, out: torch.Tensor, accumulate: bool) -> torch.Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    total = total * scale
    return (out.float() + total if accumulate else total).to(out.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numel", [1, 1000, 5000, BLOCK_NUMEL + 3])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
def test_the_sum_is_in_rank_order_in_fp32_and_rounded_once(
    dtype: torch.dtype, out_dtype: torch.dtype, numel: int, num_parts: int
) -> None:
    parts = [torch.randn(numel).to(dtype) for _ in range(num_parts)]
    for scale in (1.0, 0.5, 1 / 3):
        for accumulate in (False, True):
            start = torch.randn(numel).to(out_dtype)
            out = start.clone()
            RankOrderedSum()(parts, out, scale=scale, accumulate=accumulate)
            assert torch.equal(out, reference(parts, scale, start, accumulate))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_out_may_be_one_of_the_inputs(dtype: torch.dtype, position: int) -> None:
    parts = [torch.randn(5000).to(dtype) for _ in range(3)]
    expected = reference(parts, 0.3, torch.empty(5000, dtype=dtype), False)
    RankOrderedSum()(parts, parts[position], scale=0.3)
    assert torch.equal(parts[position], expected)


def test_fp64_is_summed_in_fp64() -> None:
    parts = [torch.tensor([1.0], dtype=torch.float64), torch.tensor([1e-12], dtype=torch.float64)]
    assert RankOrderedSum()(parts, torch.empty(1, dtype=torch.float64)).item() == 1.000000000001


def test_one_rounding_differs_from_rounding_at_each_step() -> None:
    parts = [torch.tensor([256.0], dtype=torch.bfloat16), *[torch.ones(1, dtype=torch.bfloat16)] * 4]
    assert RankOrderedSum()(parts, torch.empty(1, dtype=torch.bfloat16)).item() == 260.0


def test_the_sum_runs_without_values_in_a_dry_run() -> None:
    with FakeTensorMode():
        out = torch.empty(4 * BLOCK_NUMEL, dtype=torch.bfloat16)
        parts = [torch.empty(4 * BLOCK_NUMEL, dtype=torch.bfloat16) for _ in range(3)]
        assert RankOrderedSum()(parts, out, scale=0.5, accumulate=True) is out

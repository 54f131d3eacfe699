"""On a GPU, attention's kernels and torch's flex attention have the numbers of the CPU in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.parallel.sequence.attention import attention
from shoal.parallel.sequence.chunks import Documents

pytestmark = pytest.mark.device

LENGTH, SIZE = 256, 32
PACKED = Documents.of_lengths([[100, 156], [56, 200]])
CASES: dict[str, dict[str, Any]] = {
    "packed": {"is_causal": True, "documents": PACKED},
    "window": {"is_causal": True, "window": 48},
    "both ways": {"window": 48, "documents": PACKED},
    "soft cap": {"is_causal": True, "window": 48, "softcap": 2.0},
    "flex": {
        "score_mod": lambda score, row, head, query, key: score - 0.1 * (head + 1) * (query - key),
        "block_mask": lambda row, head, query, key: (query >= key) & (query - key < 100),
    },
}


def numbers(
    device: torch.device | str, dtype: torch.dtype, key_heads: int, options: dict[str, Any], value_size: int = SIZE
) -> Any:
    generator = torch.Generator().manual_seed(0)
    sizes = (SIZE, SIZE, value_size, value_size)
    shapes = [(2, *each) for each in zip((8, key_heads, key_heads, 8), [LENGTH] * 4, sizes, strict=True)]
    drawn = [torch.randn(shape, generator=generator).to(torch.bfloat16).to(device, dtype) for shape in shapes]
    *leaves, gradient = drawn
    for leaf in leaves:
        leaf.requires_grad_()
    out = attention(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


@pytest.mark.parametrize("key_heads", [8, 2])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 5e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("case", CASES)
def test_kernels_have_the_numbers_of_the_cpu(case: str, dtype: torch.dtype, bound: float, key_heads: int) -> None:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    wanted = numbers("cpu", torch.float64, key_heads, CASES[case])
    for mine, theirs in zip(numbers(found, dtype, key_heads, CASES[case]), wanted, strict=True):
        assert (mine.cpu().double() - theirs).norm() / theirs.norm() < bound


@pytest.mark.parametrize("key_heads", [8, 2])
@pytest.mark.parametrize("case", ["packed", "window"])
def test_values_of_another_size_than_keys_have_the_numbers_of_the_cpu(case: str, key_heads: int) -> None:
    """By the efficient kernel, which reads outputs in one layout only."""
    found = torch.accelerator.current_accelerator()
    assert found is not None
    wanted = numbers("cpu", torch.float64, key_heads, CASES[case], 16)
    for mine, theirs in zip(numbers(found, torch.bfloat16, key_heads, CASES[case], 16), wanted, strict=True):
        assert (mine.cpu().double() - theirs).norm() / theirs.norm() < 2e-2

"""Merging of tiles of attention in one kernel, interpreted: against exact values in fp64, and against operators."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.kernels import merge as kernels
from shoal.parallel.sequence.chunks import Tile, chunks_of
from shoal.parallel.sequence.ring import RingPlan, _MergedOutput, _restored, ring_attention

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")  # numpy, of masked elements

UNIT = 2.0**-24
B, H, L = 2, 3, 40
TILES = [
    Tile(None, 0, L, 0, L),
    Tile(None, 8, 24, 0, L, is_causal=True),
    Tile(1, 4, 40, 0, 36, is_causal=True, is_reversed=True),
    Tile(None, 0, 32, 0, 32, num_blocks=4),
    Tile(0, 8, 40, 0, 32, is_causal=True, is_reversed=True, num_blocks=2),
]


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of queries that were merged by the kernel."""
    made: list[int] = []
    kernel = kernels.merge

    def counted(total: Tensor, *args: Any) -> None:
        made.append(total.shape[2])
        kernel(total, *args)

    monkeypatch.setattr(kernels, "merge", counted)
    return made


def of_tile(tile: Tile, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As attention kernels write them: heads after positions, and room between the rows of a log-sum-exp."""
    rows = (B if tile.row is None else 1) * tile.num_blocks
    length = (tile.q1 - tile.q0) // tile.num_blocks
    lse = torch.randn(rows, H, length + 5)[..., :length] * 20
    return torch.randn(rows, length, H, size).to(dtype).transpose(1, 2), lse


@pytest.mark.parametrize("size", [16, 24])
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merged_output_is_a_few_roundings_from_the_exact_one(
    dtype: torch.dtype, tile: Tile, size: int, calls: list[int]
) -> None:
    """The first tile is of some queries: the others have none yet, and the log-sum-exp -inf."""
    torch.manual_seed(size)
    first = Tile(None, 0, 36, 0, 36)
    merged = _MergedOutput(torch.empty(B, H, L, 8), torch.empty(B, H, L, size))
    merged.add(first, *of_tile(first, size, dtype))
    before, old = merged.out.double(), merged.lse.double()
    assert old[:, :, 36:].eq(-math.inf).all() and not before[:, :, 36:].any()

    out, lse = of_tile(tile, size, dtype)
    rows = slice(None) if tile.row is None else slice(tile.row, tile.row + 1)
    span = rows, slice(None), slice(tile.q0, tile.q1)
    new, of_new = _restored(out, tile).double(), _restored(lse, tile).double()
    merged.add(tile, out, lse)

    exact_lse = torch.logaddexp(old[span], of_new)
    parts = (old[span] - exact_lse).exp()[..., None] * before[span], (of_new - exact_lse).exp()[..., None] * new
    assert ((merged.lse[span].double() - exact_lse).abs() <= 4 * UNIT * exact_lse.abs().clamp(min=1)).all()
    size_of_parts = parts[0].abs() + parts[1].abs()
    assert ((merged.out[span].double() - parts[0] - parts[1]).abs() <= 130 * UNIT * size_of_parts).all()
    merged.out[span], merged.lse[span] = before[span].float(), old[span].float()
    assert torch.equal(merged.out.double(), before) and torch.equal(merged.lse.double(), old)
    assert calls == [36, tile.q1 - tile.q0]


@pytest.mark.parametrize("options", [{"window": 5}, {"documents": ((0, 7, 21, 40), (0, 40))}])
def test_attention_and_its_gradients_are_those_of_operators(
    options: dict[str, Any], calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(2)
    values = [torch.randn(B, H, L, 8) for _ in range(4)]

    def run() -> list[Tensor]:
        query, key, value = (each.clone().requires_grad_() for each in values[:3])
        documents, window = (options.get(name) for name in ("documents", "window"))
        plan = RingPlan(None, chunks_of(L, 1, "balanced"), True, documents, 0.3, "ring", "attention", window)
        out = ring_attention(query, key, value, plan)
        return [out.detach(), *torch.autograd.grad(out, (query, key, value), values[3])]

    ours = run()
    assert calls
    monkeypatch.delenv("TRITON_INTERPRET")
    calls.clear()
    theirs = run()
    assert not calls
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=2e-6)

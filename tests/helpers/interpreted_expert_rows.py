"""Rows of experts in one kernel, interpreted: against exact values in fp64, and against torch's operators."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shoal.kernels import expert_rows
from shoal.parallel.expert.dispatch import run_experts
from shoal.parallel.expert.grouped import gather_rows, sum_rows
from shoal.parallel.expert.held import ExpertsHeld
from tests.helpers.interpreted import LOST, UNIT, counting

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")  # numpy, of masked elements


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that ran."""
    return counting(monkeypatch, expert_rows, "gather", "sum_of")


@pytest.mark.parametrize("width", [1, 300, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_and_their_products_are_a_few_roundings_from_the_exact_ones(
    dtype: torch.dtype, width: int, calls: list[str]
) -> None:
    torch.manual_seed(width)
    whole = torch.randn(4, width + 2).to(dtype)
    tokens, other, scale = whole[:, 1:-1], torch.randn(6, width).to(dtype), torch.rand(6)
    token_of = torch.tensor([2, 0, 4, 3, 3, 1])  # 4: none
    out = torch.full((6, width), 7.0, dtype=dtype)
    dots = gather_rows(tokens, token_of, scale, out, other, may_miss=True)
    exact = torch.cat((tokens.double(), torch.zeros(1, width)))[token_of]
    rows = exact * scale.double()[:, None]
    assert ((out.double() - rows).abs() <= (UNIT + LOST[dtype]) * rows.abs() + 2.0**-24).all()
    assert dots is not None and dots.dtype == torch.float32 and not out[2].any() and dots[2] == 0
    products = exact * other.double()
    assert ((dots.double() - products.sum(1)).abs() <= width * UNIT * products.abs().sum(1)).all()
    assert calls == ["gather"]


@pytest.mark.parametrize("width", [1, 300, 5000])
@pytest.mark.parametrize("has_weights", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_a_few_roundings_from_the_exact_ones(
    dtype: torch.dtype, has_weights: bool, width: int, calls: list[str]
) -> None:
    torch.manual_seed(width)
    rows, weights = torch.randn(7, width).to(dtype), torch.rand(4, 6)[:, 1:4] if has_weights else None
    row_of = torch.tensor([[0, 1, 2], [3, 7, 4], [7, 7, 7], [6, 5, 0]])  # 7: none
    whole = torch.full((6, width), 7.0, dtype=dtype)
    sum_rows(rows, row_of, weights, whole[1:5], may_miss=True)
    terms = torch.cat((rows.double(), torch.zeros(1, width)))[row_of]
    if weights is not None:
        terms = terms * weights.double()[..., None]
    exact = terms.sum(1)
    error = (whole[1:5].double() - exact).abs()
    assert (error <= 6 * UNIT * terms.abs().sum(1) + LOST[dtype] * exact.abs() + 2.0**-24).all()
    assert not whole[3].any() and (whole[[0, 5]] == 7).all()
    assert calls == ["sum_of"]


def test_sums_are_of_the_bits_that_additions_in_order_have() -> None:
    torch.manual_seed(0)
    rows, row_of = torch.randn(40, 33), torch.randint(40, (9, 8))
    out = torch.empty(9, 33)
    sum_rows(rows, row_of, None, out)
    expected = rows[row_of[:, 0]]
    for j in range(1, 8):
        expected = expected + rows[row_of[:, j]]
    assert torch.equal(out, expected)


def test_rows_that_are_only_moved_and_fp64_are_left_to_torch(calls: list[str]) -> None:
    tokens, out = torch.randn(3, 5), torch.empty(2, 5)
    gather_rows(tokens, torch.tensor([2, 0]), None, out)
    assert torch.equal(out, tokens[[2, 0]])
    wide = torch.empty(2, 5, dtype=torch.float64)
    sum_rows(tokens.double(), torch.tensor([[2, 0], [1, 1]]), None, wide)
    assert torch.equal(wide, tokens.double()[[2, 1]] + tokens.double()[[0, 1]]) and not calls


@pytest.mark.parametrize("score_before", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_and_their_gradients_are_those_of_operators(
    dtype: torch.dtype, score_before: bool, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of pairs of which some have no expert; the gradient of a sum is one number, expanded."""
    torch.manual_seed(1)
    values, scores, index = torch.randn(11, 24), torch.rand(11, 3), torch.randint(-1, 5, (11, 3))

    def run() -> list[Tensor]:
        hidden, weights = values.to(dtype).requires_grad_(), scores.clone().requires_grad_()
        out = run_experts(
            hidden, index, weights, lambda rows, counts: rows * 3, ExpertsHeld(5), score_before=score_before, overlap=2
        )
        return [out.detach(), *torch.autograd.grad(out.sum(), (hidden, weights))]

    ours = run()
    assert set(calls) == {"gather", "sum_of"}
    monkeypatch.delenv("TRITON_INTERPRET")
    calls.clear()
    theirs = run()
    assert not calls
    rtol = 4 * LOST[dtype] + 1e-5
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=rtol, atol=rtol)

"""silu(gate) * up in one kernel, interpreted: against exact values in fp64, and against torch's operators."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.kernels import swiglu as kernels
from shoal.parallel.swiglu import swiglu
from tests.helpers.interpreted import LOST, UNIT, counting

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # numpy, of sigmoid(-200)


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that ran."""
    return counting(monkeypatch, kernels, "forward", "backward")


def exact(gate_up: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    wide = gate_up.detach().double().requires_grad_()
    gate, up = wide.chunk(2, -1)
    out = F.silu(gate) * up
    return out.detach(), torch.autograd.grad(out, wide, gradient.double())[0]


@pytest.mark.parametrize("width", [1, 300, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_product_and_its_gradients_are_a_few_roundings_from_the_exact_ones(
    dtype: torch.dtype, width: int, calls: list[str]
) -> None:
    torch.manual_seed(width)
    gate_up = (torch.randn(2, 3, 2 * width) * 4).to(dtype).requires_grad_()
    gradient = torch.randn(2, 3, width).to(dtype)
    out = swiglu(gate_up)
    (of_gate_up,) = torch.autograd.grad(out, gate_up, gradient)
    expected, of_expected = exact(gate_up, gradient)
    assert out.shape == (2, 3, width) and out.dtype == of_gate_up.dtype == dtype
    assert ((out.double() - expected).abs() <= (20 * UNIT + LOST[dtype]) * expected.abs() + 2.0**-24).all()
    # 1 + gate * (1 - share) may cancel: the bound is of its terms.
    terms = of_expected.abs() + (gradient.repeat(1, 1, 2).double() * gate_up.detach().roll(width, -1).double()).abs()
    error = (of_gate_up.double() - of_expected).abs()
    assert (error <= 40 * UNIT * terms + LOST[dtype] * of_expected.abs() + 2.0**-24).all()
    assert calls == ["forward", "backward"]


def test_large_numbers_and_an_expanded_gradient_of_rows_with_gaps() -> None:
    whole = torch.tensor([[200.0, -200.0, 0.0, 7.0, 3.0, 2.0, 5.0, 7.0], [1.0, 2.0, 3.0, 7.0, 4.0, 5.0, 6.0, 7.0]])
    gate_up = whole[:, [0, 1, 2, 4, 5, 6]].t().contiguous().t().requires_grad_()
    out = swiglu(gate_up)
    gate, up = gate_up.detach().chunk(2, -1)
    torch.testing.assert_close(out.detach(), F.silu(gate) * up, rtol=1e-6, atol=1e-6)
    (found,) = torch.autograd.grad(out.sum(), gate_up)
    torch.testing.assert_close(found.double(), exact(gate_up, torch.ones(2, 3))[1], rtol=1e-6, atol=1e-6)


def test_what_stands_for_the_kernel_in_a_dry_run_gives_torchs_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    gate_up, gradient = torch.randn(5, 14, requires_grad=True), torch.randn(5, 7)
    ours = swiglu(gate_up)
    monkeypatch.setattr("shoal.parallel.swiglu.is_fake", lambda _: True)
    stands_for = swiglu(gate_up)
    assert torch.equal(ours, stands_for)
    first, second = (torch.autograd.grad(out, gate_up, gradient)[0] for out in (ours, stands_for))
    assert torch.equal(first, second)


def test_fp64_is_left_to_torch(calls: list[str]) -> None:
    assert swiglu(torch.randn(2, 4, dtype=torch.float64)).dtype == torch.float64 and not calls

"""Cross-entropy in one kernel, interpreted: against exact values in fp64, and against torch's of logits."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from shoal.kernels.cross_entropy import cross_entropy
from shoal.parallel import loss as of_shoal
from shoal.parallel.loss import linear_cross_entropy

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")  # numpy, of masked elements

IGNORED = -100
UNIT = 2.0**-24


@pytest.mark.parametrize("width", [1, 300, 4096, 9000])
@pytest.mark.parametrize(("dtype", "unit"), [(torch.float32, UNIT), (torch.bfloat16, 2.0**-7)])
def test_losses_and_gradients_are_a_few_roundings_from_the_exact_ones(
    dtype: torch.dtype, unit: float, width: int
) -> None:
    """Exponents up to 60 make 64 roundings to fp32 of a probability; then its own dtype's (cut off for bf16)."""
    torch.manual_seed(width)
    logits = (torch.randn(5, width) * 12).clamp(-30, 30).to(dtype)
    targets = torch.randint(width, (5,))
    targets[2] = IGNORED
    wide, losses = logits.double(), torch.full((5,), 7.0)
    expected = F.cross_entropy(wide, targets, reduction="none")
    exact = wide.softmax(-1) - F.one_hot(targets.clamp(min=0), width)
    cross_entropy(logits, targets, losses, IGNORED)
    assert (losses.double() - expected).abs().max() <= 8 * UNIT * 60
    counted = targets != IGNORED
    bound = 64 * UNIT * (exact.abs() + 2.0**-20) + unit * exact.abs() + 4 * UNIT
    assert ((logits.double() - exact).abs() <= bound)[counted].all()
    assert losses[2] == 0


def test_rows_of_a_wider_tensor_leave_their_neighbours_and_infinities_give_what_torch_gives() -> None:
    whole = torch.randn(4, 40)
    kept, rows = whole.clone(), whole[:, 3:35]
    rows[1, 5] = kept[1, 8] = -math.inf
    rows[2, 7] = kept[2, 10] = math.nan
    targets, losses = torch.tensor([0, 3, 1, 31]), torch.empty(4)
    expected = F.cross_entropy(kept[:, 3:35], targets, reduction="none")
    cross_entropy(rows, targets, losses, IGNORED)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert torch.equal(whole[:, :3], kept[:, :3]) and torch.equal(whole[:, 35:], kept[:, 35:])
    assert whole[1, 8] == 0 and losses[2].isnan()


def test_a_target_outside_of_the_vocabulary_has_the_loss_nan_and_nothing_else_is_read_or_written() -> None:
    logits, losses = torch.zeros(2, 8), torch.empty(2)
    cross_entropy(logits, torch.tensor([8, 1]), losses, IGNORED)
    assert losses[0].isnan() and float(losses[1]) == pytest.approx(math.log(8))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_head_gives_the_loss_and_the_gradients_of_logits_and_cross_entropy(
    reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    ours = of_shoal._in_one_kernel
    monkeypatch.setattr(of_shoal, "_in_one_kernel", lambda *args: (calls.append(1), ours(*args))[1])
    torch.manual_seed(0)
    hidden, weight = torch.randn(37, 8, requires_grad=True), torch.randn(53, 8, requires_grad=True)
    targets = torch.randint(53, (37,))
    targets[:5] = IGNORED
    loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction, chunk_tokens=10)  # type: ignore[arg-type]
    plain = F.cross_entropy(F.linear(hidden, weight), targets, reduction=reduction)
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=1e-6)
    factor = torch.linspace(0.5, 2, 37) if reduction == "none" else torch.tensor(3.0)
    mine = torch.autograd.grad(loss, (hidden, weight), factor)
    for got, expected in zip(mine, torch.autograd.grad(plain, (hidden, weight), factor), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)
    assert len(calls) == 4  # chunks


def test_a_head_takes_targets_that_are_a_column_of_another_tensor() -> None:
    hidden, weight = torch.randn(6, 1, 8, requires_grad=True), torch.randn(53, 8)
    columns = torch.randint(53, (6, 4))
    loss = linear_cross_entropy(hidden, weight, columns[:, -1:])
    plain = F.cross_entropy(F.linear(hidden[:, 0], weight), columns[:, -1])
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_stands_for_the_kernel_in_a_dry_run_gives_its_numbers(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    logits, targets = torch.randn(6, 700).to(dtype), torch.tensor([0, 699, IGNORED, 5, 5, 300])
    ours = of_shoal._in_one_kernel(logits.clone(), targets, of_shoal.CrossEntropy())
    monkeypatch.delenv("TRITON_INTERPRET")
    plain = of_shoal._in_one_kernel(logits.clone(), targets, of_shoal.CrossEntropy())
    rtol = 2e-6 if dtype == torch.float32 else 2**-7  # the interpreter cuts bf16 off, GPUs round it
    torch.testing.assert_close(ours[0], plain[0], rtol=2e-6, atol=1e-6)
    counted = targets != IGNORED
    torch.testing.assert_close(ours[1][counted], plain[1][counted], rtol=rtol, atol=1e-8)


@pytest.mark.parametrize("options", [{"label_smoothing": 0.1}, {"softcap": 2.0}, {"z_loss": 0.1}])
def test_other_formulas_are_left_to_operators(options: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_shoal, "_in_one_kernel", lambda *args: pytest.fail("it knows no such formula"))
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(53, 8, requires_grad=True)
    linear_cross_entropy(hidden, weight, torch.arange(6), **options).backward()  # type: ignore[arg-type]
    assert hidden.grad is not None

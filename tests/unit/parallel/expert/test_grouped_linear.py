"""A linear for each expert beside ``torch.nn.functional.linear`` for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from shoal.parallel.expert import grouped
from shoal.parallel.expert.grouped import GROUPS_IN_BF16, add_bias_of_experts, grouped_linear
from shoal.parallel.expert.route import RowCounts
from shoal.parallel.low_precision.products import LowPrecisionProducts
from shoal.parallel.low_precision.recipes import RECIPES
from shoal.parallel.products import LayerProducts
from tests.helpers.low_precision import skip_where_torch_refuses

COUNTS = [3, 0, 7, 1, 0]
IN, OUT = 4, 6


def leaves(
    dtype: torch.dtype = torch.float32, *, is_transposed: bool = False, widths: tuple[int, int] = (IN, OUT)
) -> tuple[Tensor, Tensor, Tensor]:
    rows, bias = torch.randn(sum(COUNTS), widths[0]), torch.randn(len(COUNTS), widths[1])
    weight = torch.randn(len(COUNTS), *(reversed(widths) if is_transposed else widths))
    rows, weight, bias = (tensor.to(dtype).requires_grad_() for tensor in (rows, weight, bias))
    return rows, weight, bias


def one_by_one(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    parts = rows.split(COUNTS)
    return torch.cat(
        [
            F.linear(part, weight[expert].t(), None if bias is None else bias[expert])
            for expert, part in enumerate(parts)
        ]
    )


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients_are_those_of_a_linear_for_each_expert(
    dtype: torch.dtype, is_transposed: bool, has_bias: bool
) -> None:
    rows, weight, bias = leaves(dtype, is_transposed=is_transposed)
    used = weight.transpose(1, 2) if is_transposed else weight
    wanted = [rows, weight, *([bias] if has_bias else [])]
    expected = one_by_one(rows, used, bias if has_bias else None)
    gradient = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, wanted, gradient)
    output = grouped_linear(rows, used, COUNTS, bias if has_bias else None)
    rtol = 1e-6 if dtype == torch.float32 else 2e-2
    assert output.dtype == dtype
    torch.testing.assert_close(output, expected, rtol=rtol, atol=rtol)
    for found, right in zip(torch.autograd.grad(output, wanted, gradient), gradients, strict=True):
        torch.testing.assert_close(found, right, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_bias_that_is_added_later_is_rounded_once_and_has_no_atomic_additions(
    dtype: torch.dtype,
) -> None:
    counts = RowCounts([1500, 0, 3, 700])
    rows = torch.randn(sum(counts), OUT).bfloat16().requires_grad_()
    bias = torch.randn(len(counts), OUT, dtype=dtype, requires_grad=True)
    gradient = (torch.rand(sum(counts), OUT) + 0.5).bfloat16()
    output = add_bias_of_experts(rows, bias, counts)
    own = torch.cat([bias[expert].expand(count, OUT) for expert, count in enumerate(counts)])
    assert torch.equal(output, rows + own.bfloat16())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        of_rows, of_bias = torch.autograd.grad(output, (rows, bias), gradient)
    exact = torch.stack([part.double().sum(0) for part in gradient.split(list(counts))])
    assert torch.equal(of_rows, gradient) and of_bias.dtype == dtype
    torch.testing.assert_close(of_bias, exact.to(dtype), rtol=2e-6 if dtype == torch.float32 else 0.0, atol=0.0)
    assert not {"aten::index_add_", "aten::index_add", "aten::scatter_add_"} & {e.key for e in profile.key_averages()}


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "nvfp4"])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_in_few_bits_each_expert_computes_as_a_linear_layer_of_its_own(recipe: str, is_transposed: bool) -> None:
    rows, weight, bias = leaves(is_transposed=is_transposed, widths=(32, 48))
    used = weight.transpose(1, 2) if is_transposed else weight
    made = LowPrecisionProducts(RECIPES[recipe])
    skip_where_torch_refuses(made)
    products = LayerProducts(made)
    products.is_on = True
    parts = [products.linear(part, used[at].t(), bias[at]) for at, part in enumerate(rows.split(COUNTS))]
    expected = torch.cat(parts)
    gradient = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, (rows, weight, bias), gradient)
    counts = RowCounts(COUNTS)
    counts.products = products
    output = grouped_linear(rows, used, counts, bias)
    assert torch.equal(output, expected)
    assert not torch.equal(output, grouped_linear(rows, used, COUNTS, bias))
    found = torch.autograd.grad(output, (rows, weight, bias), gradient)
    assert torch.equal(found[0], gradients[0]) and torch.equal(found[1], gradients[1])
    torch.testing.assert_close(found[2], gradients[2], rtol=1e-6, atol=1e-6)


def test_an_expert_without_rows_has_zero_gradients() -> None:
    rows, weight, bias = leaves()
    grouped_linear(rows, weight, COUNTS, bias).sum().backward()
    assert weight.grad is not None and bias.grad is not None
    for gradient in (weight.grad, bias.grad):
        is_zero = [not part.any() for part in gradient]
        assert is_zero == [count == 0 for count in COUNTS]


def test_no_rows_at_all_give_no_output_and_zero_gradients() -> None:
    _, weight, bias = leaves()
    rows = torch.empty(0, IN, requires_grad=True)
    output = grouped_linear(rows, weight, [0] * len(COUNTS), bias)
    assert output.shape == (0, OUT)
    output.sum().backward()
    assert weight.grad is not None and not weight.grad.any()
    assert rows.grad is not None and rows.grad.shape == rows.shape


def test_the_gradient_of_a_transposed_weight_is_laid_out_as_the_weight() -> None:
    rows, weight, _ = leaves(is_transposed=True)
    gradient = torch.autograd.grad(grouped_linear(rows, weight.transpose(1, 2), COUNTS).sum(), weight)[0]
    assert gradient.is_contiguous()


def test_what_needs_no_gradient_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weight, _ = leaves()
    output = grouped_linear(rows.detach(), weight, COUNTS)
    products: list[Any] = []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *args, **options: (products.append(args), mm(*args, **options)))
    output.sum().backward()
    assert len(products) == sum(count > 0 for count in COUNTS)


def test_under_autocast_products_are_in_its_dtype_and_gradients_in_the_parameters() -> None:
    rows, weight, bias = leaves()
    with torch.autocast("cpu", torch.bfloat16):
        output = grouped_linear(rows, weight, COUNTS, bias)
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    torch.testing.assert_close(output.float(), one_by_one(rows, weight, bias), rtol=3e-2, atol=3e-2)


def test_a_dry_run_finds_the_shapes() -> None:
    with FakeTensorMode():
        rows, weight, bias = leaves()
        output = grouped_linear(rows, weight, COUNTS, bias)
        output.sum().backward()
        assert output.shape == (sum(COUNTS), OUT)
        assert weight.grad is not None and weight.grad.shape == weight.shape


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at each input
def test_a_compiled_caller_runs_it() -> None:
    rows, weight, bias = leaves()
    compiled = torch.compile(lambda rows: grouped_linear(rows * 2, weight, COUNTS, bias) + 1, backend="eager")
    torch.testing.assert_close(compiled(rows), grouped_linear(rows * 2, weight, COUNTS, bias) + 1)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_the_grouped_kernel_gives_what_the_loop_gives(monkeypatch: pytest.MonkeyPatch, is_transposed: bool) -> None:
    if grouped._grouped_mm is None:
        pytest.skip("this torch has no grouped kernel")
    rows, weight, bias = leaves(torch.bfloat16, is_transposed=is_transposed, widths=(16, 24))
    used = weight.transpose(1, 2) if is_transposed else weight
    wanted = (rows, weight, bias)
    expected = grouped_linear(rows, used, COUNTS, bias)
    gradients = torch.autograd.grad(expected.sum(), wanted)
    monkeypatch.setattr(grouped, "capability", lambda tensor: (9, 0))
    for counts in (COUNTS, RowCounts(starts=torch.tensor([0, *torch.tensor(COUNTS).cumsum(0).tolist()]))):
        output = grouped_linear(rows, used, counts, bias)
        torch.testing.assert_close(output, expected, rtol=2e-2, atol=2e-2)
        for found, right in zip(torch.autograd.grad(output.sum(), wanted), gradients, strict=True):
            torch.testing.assert_close(found, right, rtol=2e-2, atol=2e-2)


def test_the_grouped_kernel_is_only_used_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "_grouped_mm", lambda *args, **options: None)
    rows, weight = torch.zeros(3, 16, dtype=torch.bfloat16), torch.zeros(2, 16, 8, dtype=torch.bfloat16)
    assert not GROUPS_IN_BF16.takes(rows, weight)  # on a CPU
    monkeypatch.setattr(grouped, "capability", lambda tensor: (9, 0))
    assert GROUPS_IN_BF16.takes(rows, weight)
    assert not GROUPS_IN_BF16.takes(rows.float(), weight.float())
    assert not GROUPS_IN_BF16.takes(rows[:, :12], weight[:, :12])
    assert not GROUPS_IN_BF16.takes(rows, weight[:, :, 1:])
    assert not GROUPS_IN_BF16.takes(rows[:0], weight)
    for other in ((8, 0), (12, 0)):
        monkeypatch.setattr(grouped, "capability", lambda tensor, other=other: other)
        assert not GROUPS_IN_BF16.takes(rows, weight)


def test_experts_without_rows_have_zero_gradients_where_the_kernel_leaves_them_unset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if grouped._grouped_mm is None:
        pytest.skip("this torch has no grouped kernel")
    kernel = grouped._grouped_mm

    def on_blackwell(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
        """PyTorch's issue 172439: products of groups without rows are whatever the memory held."""
        result: Tensor = kernel(left, right, offs=offs)
        if result.dim() == 3:
            result[offs.diff(prepend=offs.new_zeros(1)) == 0] = float("nan")
        return result

    monkeypatch.setattr(grouped, "_grouped_mm", on_blackwell)
    monkeypatch.setattr(grouped, "capability", lambda tensor: (10, 0))
    rows, weight, bias = leaves(torch.bfloat16, widths=(16, 24))
    grouped_linear(rows, weight, COUNTS, bias).sum().backward()
    for gradient in (weight.grad, bias.grad):
        assert gradient is not None
        assert all(bool(part.any()) == (count > 0) for part, count in zip(gradient, COUNTS, strict=True))
        assert not gradient.isnan().any()

"""The products of the recipes, against fp64 products of the rounded operands, and against exact ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from shoal.parallel.low_precision import products as low_precision
from shoal.parallel.low_precision.formats import Format, ScaledFloat4
from shoal.parallel.low_precision.products import LowPrecisionProducts
from shoal.parallel.low_precision.recipes import RECIPES, Recipe
from shoal.parallel.products import LayerProducts
from tests.helpers.low_precision import skip_where_torch_refuses

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(7, 53, 29), (64, 160, 96), (1, 3, 5)]  # tokens, in, out
BY_BLOCKS = ["blockwise", "mxfp8"]
BY_OPERATOR = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]
# Of the result, relative to the exact one, in the Frobenius norm.
LOST = dict.fromkeys(RECIPES, 0.06) | {"nvfp4": 0.25}


def operands(shape: tuple[int, int, int], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """x, weight and the output's gradient."""
    tokens, inputs, outputs = shape
    generator = torch.Generator().manual_seed(tokens)
    made = [torch.randn(size, generator=generator) for size in ((tokens, inputs), (outputs, inputs), (tokens, outputs))]
    return tuple((each * torch.logspace(-1, 0.5, each.shape[-1])).to(dtype) for each in made)


def products_of(recipe: str, *, refused: bool = False, seed: int = 0) -> LowPrecisionProducts:
    made = LowPrecisionProducts(RECIPES[recipe], torch.Generator().manual_seed(seed))
    if refused:
        made.refused = frozenset([*made.refused, *DTYPES])
    else:
        skip_where_torch_refuses(made)
    return made


def results(made: LowPrecisionProducts, shape: tuple[int, int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    x, weight, gradient = operands(shape, dtype)
    return [made.output(x, weight), made.of_input(gradient, weight), made.of_weight(gradient, x)]


def rounded(form: Format, operand: torch.Tensor) -> torch.Tensor:
    return form.values(operand, None).double()


@pytest.mark.parametrize("is_refused", [False, True], ids=["operator", "emulated"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"])
def test_a_product_is_that_of_the_rounded_operands(
    name: str, shape: tuple[int, int, int], dtype: torch.dtype, is_refused: bool
) -> None:
    x, weight, gradient = operands(shape, dtype)
    recipe: Recipe = RECIPES[name]
    pairs = [(x, weight.t()), (gradient, weight), (gradient.t(), x)]
    all_formats = [recipe.output, recipe.of_input, recipe.of_weight]
    found_all = results(products_of(name, refused=is_refused), shape, dtype)
    for (a, b), formats, found in zip(pairs, all_formats, found_all, strict=True):
        exact = a.double(), b.double()
        if formats is not None:  # the second operand's rows are what the product sums over
            exact = rounded(formats[0], a), rounded(formats[1], b.t()).t()
        bound = (exact[0].abs() @ exact[1].abs()) * 2**-20 + (exact[0] @ exact[1]).abs() * torch.finfo(dtype).eps
        assert ((found.double() - exact[0] @ exact[1]).abs() <= bound).all()
        assert found.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BY_OPERATOR)
def test_the_operator_and_the_emulation_agree_to_the_order_of_sums(name: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        ours, emulated = (results(products_of(name, refused=each), shape, dtype) for each in (False, True))
        for found, wanted in zip(ours, emulated, strict=True):
            assert (found - wanted).abs().max() <= wanted.abs().max() * max(1e-6, torch.finfo(dtype).eps)


def test_the_operator_is_used_where_it_computes_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    by_operator = low_precision._by_operator

    def count(*args: object) -> torch.Tensor:
        calls.append(1)
        result: torch.Tensor = by_operator(*args)  # type: ignore[arg-type]
        return result

    monkeypatch.setattr(low_precision, "_by_operator", count)
    for name, wanted in (("tensorwise", 3), ("rowwise", 3), ("rowwise_with_gw_hp", 2), ("mxfp8", 0)):
        products = products_of(name)
        calls.clear()
        results(products, (32, 32, 32), torch.float32)
        assert len(calls) == wanted
        assert (products.refusal(torch.float32, torch.device("cpu")) is None) == bool(wanted)
    assert "not given to torch's operator" in str(products_of("nvfp4").refusal(torch.float32, torch.device("cpu")))


def read_scales(scales: torch.Tensor, recipe: int, shape: tuple[int, int]) -> torch.Tensor:
    """The scale of each element of a matrix of ``shape``, as cuBLAS reads them."""
    row, column = torch.arange(shape[0])[:, None], torch.arange(shape[1])
    name = F.ScalingType(recipe).name
    if name == "BlockWise1x128":
        return scales[row, column // 128]
    if name == "BlockWise128x128":
        return scales[column // 128, row // 128]
    assert name == "BlockWise1x32" and scales.dim() == 1
    at = column // 32
    tile = (row // 128) * (shape[1] // 128) + at // 4
    return scales[tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + at % 4].float()


def as_on_a_gpu(calls: list[int], lost: float = 0.0) -> Callable[..., torch.Tensor]:
    """torch's operator for scales of blocks, which CPUs do not have; torch checks dtypes, shapes and strides.

    Args:
        lost: of each number.
    """

    def multiply(a: Any, b: Any, of_a: Any, recipes_a: Any, swizzles_a: Any, of_b: Any, *more: Any) -> torch.Tensor:
        (recipes_b, _, bias, dtype), arguments = more, (a, b, of_a, recipes_a, swizzles_a, of_b, *more)
        with FakeTensorMode() as mode:
            fakes = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, arguments)
            shape = torch.ops.aten._scaled_mm_v2(*fakes).shape
        assert a.is_contiguous() and b.t().is_contiguous() and bias is None
        assert all(length % 16 == 0 for length in (*a.shape, *b.shape))
        calls.append(recipes_a[0])
        whole_a = a.float() * read_scales(of_a[0], recipes_a[0], tuple(a.shape))
        whole_b = b.t().float() * read_scales(of_b[0], recipes_b[0], tuple(b.t().shape))
        result = ((whole_a @ whole_b.t()) * (1 - lost)).to(dtype)
        assert result.shape == shape
        return result

    return multiply


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BY_BLOCKS)
def test_codes_and_scales_of_blocks_are_those_that_the_operator_reads(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(torch, "_scaled_mm_v2", as_on_a_gpu(calls))
    products = LowPrecisionProducts(RECIPES[name])
    assert products.refusal(dtype, torch.device("cpu")) is None
    for shape in (*SHAPES, (300, 512, 400)):
        calls.clear()
        ours, emulated = results(products, shape, dtype), results(products_of(name, refused=True), shape, dtype)
        assert len(calls) == 3
        for found, wanted in zip(ours, emulated, strict=True):
            assert found.shape == wanted.shape
            assert (found - wanted).abs().max() <= wanted.abs().max() * max(1e-6, torch.finfo(dtype).eps)


@pytest.mark.parametrize("name", BY_BLOCKS)
def test_an_operator_with_other_numbers_is_not_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it reads the scales in another order."""
    device = torch.device("cpu")
    monkeypatch.setattr(torch, "_scaled_mm_v2", as_on_a_gpu([], lost=0.1))
    assert "off by 0.1" in str(LowPrecisionProducts(RECIPES[name]).refusal(torch.float32, device))
    right = as_on_a_gpu([])

    def reversed_(a: Any, b: Any, of_a: Any, *more: Any) -> torch.Tensor:
        scale = of_a[0]
        if scale.dim() == 1:
            turned = scale.view(torch.uint8).flip(0).view(scale.dtype)
        else:
            turned = scale.t().flip(0, 1).contiguous().t()
        return right(a, b, [turned], *more)

    monkeypatch.setattr(torch, "_scaled_mm_v2", reversed_)
    assert "off by" in str(LowPrecisionProducts(RECIPES[name]).refusal(torch.float32, device))


def test_an_operator_that_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **keys: object) -> None:
        raise RuntimeError("scales of rows are not supported here\nand more")

    products = LowPrecisionProducts(RECIPES["rowwise"])
    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    said = products.refusal(torch.bfloat16, torch.device("cpu"))
    assert said == "torch's operator says: scales of rows are not supported here"


@pytest.mark.parametrize("name", RECIPES)
def test_a_product_loses_no_more_than_the_formats(name: str) -> None:
    shape = SHAPES[1]
    x, weight, gradient = (each.double() for each in operands(shape))
    exact = [x @ weight.t(), gradient @ weight, gradient.t() @ x]
    for found, wanted in zip(results(products_of(name), shape, torch.float32), exact, strict=True):
        far = (found - wanted).norm() / wanted.norm()
        assert 0 < far < LOST[name] or name == "rowwise_with_gw_hp"


def test_gradients_in_4_bits_are_right_on_the_average() -> None:
    """The gradient of the input is exact but for the weight's rounding; that of the weight, but for that of x."""
    x, weight, gradient = operands((64, 48, 32))
    recipe = RECIPES["nvfp4"]
    assert (
        recipe.of_input is not None
        and isinstance(recipe.of_input[0], ScaledFloat4)
        and recipe.of_input[0].is_stochastic
    )
    runs = [products_of("nvfp4", seed=seed).of_input(gradient, weight) for seed in range(400)]
    wanted = gradient.double() @ rounded(recipe.of_input[1], weight.t()).t()
    single = (runs[0] - wanted).norm() / wanted.norm()
    assert (torch.stack(runs).mean(0) - wanted).norm() / wanted.norm() < single / 8
    of_weight = torch.stack([products_of("nvfp4", seed=seed).of_weight(gradient, x) for seed in range(100)])
    exact = gradient.double().t() @ x.double()
    assert (of_weight.mean(0) - exact).norm() < (of_weight[0] - exact).norm()


def test_the_rotation_changes_no_product_of_what_is_not_rounded() -> None:
    gradient, x = torch.randn(9, 50, dtype=torch.float64), torch.randn(5, 50, dtype=torch.float64)
    rotated = low_precision._rotated(gradient) @ low_precision._rotated(x).t()
    assert torch.allclose(rotated.double(), gradient @ x.t(), atol=1e-5)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_layer_computes_the_products_forward_and_backward(name: str, dtype: torch.dtype) -> None:
    x, weight, gradient = operands((12, 32, 16), dtype)
    x, bias = x.view(3, 4, 32).requires_grad_(), torch.randn(16, dtype=dtype, requires_grad=True)
    weight.requires_grad_()
    layer = LayerProducts(products_of(name))
    layer.is_on = True
    output = layer.linear(x, weight, bias)
    output.backward(gradient.view(3, 4, 16))
    wanted = results(products_of(name), (12, 32, 16), dtype)
    assert torch.equal(output, wanted[0].view(3, 4, 16) + bias)
    assert x.grad is not None and torch.equal(x.grad.view(12, 32), wanted[1])
    assert weight.grad is not None and torch.equal(weight.grad, wanted[2])
    assert bias.grad is not None and torch.allclose(bias.grad, gradient.sum(0), rtol=1e-2)
    layer.is_on = False
    assert torch.equal(layer.linear(x, weight, bias), F.linear(x, weight, bias))


@pytest.mark.parametrize("name", RECIPES)
def test_under_autocast_weights_are_quantised_as_they_are_stored(name: str) -> None:
    x, weight, gradient = operands((12, 32, 16))
    weight.requires_grad_()
    layer = LayerProducts(products_of(name))
    layer.is_on = True
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer.linear(x, weight)
    assert torch.equal(output, products_of(name).output(x.bfloat16(), weight))
    output.backward(gradient.bfloat16())
    assert weight.grad is not None and weight.grad.dtype == torch.float32


def test_frozen_weights_get_no_gradient_and_no_product() -> None:
    x, weight, _ = operands((12, 32, 16))
    layer = LayerProducts(products_of("rowwise"))
    layer.is_on = True
    layer.linear(x.requires_grad_(), weight).sum().backward()
    assert x.grad is not None and weight.grad is None


def test_a_function_transform_differentiates_the_layer() -> None:
    x, weight, _ = operands((12, 32, 16))
    layer = LayerProducts(products_of("rowwise"))
    layer.is_on = True

    def loss(weight: torch.Tensor) -> torch.Tensor:
        return layer.linear(x, weight).sum()

    apply: Callable[..., torch.Tensor] = torch.func.grad(loss)
    assert torch.equal(apply(weight), products_of("rowwise").of_weight(torch.ones(12, 16), x))


def test_flops_are_those_of_the_plain_product() -> None:
    x, weight, _ = operands((12, 32, 16))
    layer = LayerProducts(products_of("rowwise"))
    layer.is_on = True
    with FlopCounterMode(display=False) as counter:
        layer.linear(x, weight)
    assert counter.get_total_flops() == 2 * 12 * 32 * 16

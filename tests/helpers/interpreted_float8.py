"""Codes of 8 bits and their scales in kernels, interpreted: the bits of torch's operators."""

from __future__ import annotations

import pytest
import torch

from shoal.kernels import float8 as kernels
from shoal.parallel.low_precision.formats import ScaledFloat8
from tests.helpers.interpreted import counting

BLOCKS = {"rows": (1, None), "matrix": (None, None)}


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that ran."""
    return counting(monkeypatch, kernels, "encode")


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_and_scales_have_the_bits_of_operators(
    dtype: torch.dtype, codes: torch.dtype, block: str, is_transposed: bool, calls: list[str]
) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randn(70, 130, generator=generator) * 10
    matrix = (torch.randn(70, 130, generator=generator) * sizes.exp2()).clamp(-60_000, 60_000).to(dtype)
    matrix[3] = 0
    matrix[4, :2] = torch.tensor([448.0, -1.0])  # of which the first is the largest code
    if is_transposed:
        matrix = matrix.t().contiguous().t()
    form = ScaledFloat8(codes, BLOCKS[block])
    found, scales = form.encode(matrix)
    expected, of_expected = form.quantize(matrix)
    assert calls == ["encode"]
    assert found.is_contiguous() and found.dtype is codes
    assert torch.equal(scales, of_expected.flatten())
    same = found.view(torch.uint8) == expected.reshape(matrix.shape).contiguous().view(torch.uint8)
    assert (same | (found.float() == 0)).all()  # zeros have a sign
    assert torch.equal(found.float(), expected.reshape(matrix.shape).float())


@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("block", BLOCKS)
def test_what_is_not_finite_makes_its_scale_nan(block: str, value: float) -> None:
    matrix = torch.ones(5, 70)
    matrix[2, 65] = value
    _, scales = ScaledFloat8(torch.float8_e4m3fn, BLOCKS[block]).encode(matrix)
    assert scales.isnan().tolist() == ([False, False, True, False, False] if block == "rows" else [True])


@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("block", [(1, 128), (128, 128), (1, 32)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_and_scales_of_blocks_have_the_bits_of_operators(
    dtype: torch.dtype, block: tuple[int, int], is_transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = counting(monkeypatch, kernels, "encode_blocks")
    generator = torch.Generator().manual_seed(0)
    shape = (256, 384) if block[0] == 128 else (144, 256)
    sizes = torch.randn(shape, generator=generator) * 10
    matrix = (torch.randn(shape, generator=generator) * sizes.exp2()).clamp(-60_000, 60_000).to(dtype)
    matrix[:, 128:256] *= 0.0 if block[0] == 128 else 1.0
    matrix[3] = 0
    matrix[4, 5] = float("inf")
    matrix[5, 200] = float("nan")
    if is_transposed:
        matrix = matrix.t().contiguous().t()
    form = ScaledFloat8(torch.float8_e4m3fn, block)
    codes, scales = form.encode_blocks(matrix)
    monkeypatch.setattr("shoal.parallel.low_precision.formats.has_kernels", lambda *_: False)
    expected, of_expected = form.encode_blocks(matrix)
    assert ran == ["encode_blocks"]
    assert (codes.shape, scales.shape, scales.stride()) == (expected.shape, of_expected.shape, of_expected.stride())
    found, wanted = scales.float(), of_expected.float()
    is_bad = ~wanted.isfinite()
    assert is_bad.any() and torch.equal(~found.isfinite(), is_bad)
    assert torch.equal(found[~is_bad], wanted[~is_bad])
    with_bad = expected.float().isnan() | ~_of_elements(form, matrix).isfinite()
    assert torch.equal(codes.float()[~with_bad], expected.float()[~with_bad])


def _of_elements(form: ScaledFloat8, matrix: torch.Tensor) -> torch.Tensor:
    codes, scales = form.quantize(matrix)
    return scales.expand_as(codes).reshape(matrix.shape)


def test_a_part_of_a_matrix_is_read_where_it_lies() -> None:
    whole = torch.arange(200.0).view(10, 20)
    form = ScaledFloat8(torch.float8_e4m3fn, (1, None))
    for part in (whole[2:7, 3:13], whole.t()[3:13, 2:7], whole[::2, ::3]):
        found, scales = form.encode(part)
        expected, of_expected = form.encode(part.contiguous())
        assert torch.equal(found.float(), expected.float()) and torch.equal(scales, of_expected)


def test_fp64_and_nothing_are_left_to_torch(calls: list[str]) -> None:
    form = ScaledFloat8(torch.float8_e4m3fn, (1, None))
    form.encode(torch.randn(2, 3, dtype=torch.float64))
    assert form.encode(torch.empty(0, 16))[0].shape == (0, 16)
    assert not calls

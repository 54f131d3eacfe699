"""Kernels of wire formats, interpreted: against exact values in fp64, and against torch's operators."""

from __future__ import annotations

import pytest
import torch

from shoal.comm.formats import FORMATS, WireFormat, hadamard
from shoal.kernels import block_formats
from shoal.kernels.use import has_kernels

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")  # numpy, of masked elements

BLOCKED = ["int8", "int4", "int4_hadamard", "fp8", "1bit"]
SHAPES = [(96, 1000), (256, 257), (32, 31)]  # block, numel


def values_of(numel: int, *, is_finite: bool = True) -> torch.Tensor:
    """With blocks of other magnitudes, one of zeros, and others that are not finite. Shape: [3, numel]."""
    values = torch.randn(3, numel, generator=torch.Generator().manual_seed(numel)) * torch.logspace(-3, 1, numel)
    values[0, numel // 3 : numel // 2] = 0.0
    if not is_finite:
        values[1, numel // 2], values[2, 0] = torch.inf, torch.nan
    return values


def by_operators(wire: WireFormat, rows: torch.Tensor, error: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Codes, scales and decoded values."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET")
        codes, scales = wire.encode(rows, error)
        wire.decode((codes, scales), out := torch.empty_like(rows))
    return codes, scales, out


@pytest.mark.parametrize("is_finite", [True, False])
@pytest.mark.parametrize(("block", "numel"), SHAPES)
@pytest.mark.parametrize("name", BLOCKED)
def test_a_kernel_writes_what_operators_write(name: str, block: int, numel: int, is_finite: bool) -> None:
    """A value on the edge between two codes may get the other one: sums and products are rounded in another order."""
    wire, rows = FORMATS[name](block), values_of(numel, is_finite=is_finite)
    error = values_of(numel) * 0.01
    codes, scales, expected = by_operators(wire, rows, theirs := error.clone())
    assert has_kernels(rows)
    found_codes, found_scales = wire.encode(rows, error)
    torch.testing.assert_close(found_scales, scales, rtol=1e-6, atol=0.0, equal_nan=True)
    wire.decode((found_codes, found_scales), found := torch.empty_like(rows))
    is_same = torch.isclose(found, expected, rtol=1e-4, atol=1e-6, equal_nan=True)
    assert (~is_same).sum() <= 1 + 0.002 * found.numel() and torch.equal(found.isnan(), expected.isnan())
    assert torch.isclose(error, theirs, rtol=1e-3, atol=1e-5)[is_same].all()
    if name != "int4_hadamard":
        assert (found_codes == codes)[~scales.isnan().any(1)].float().mean() > 0.998


@pytest.mark.parametrize(("block", "numel"), SHAPES)
@pytest.mark.parametrize("name", BLOCKED)
def test_a_value_is_off_by_half_of_a_step(name: str, block: int, numel: int) -> None:
    rows = values_of(numel)
    codes, scales = FORMATS[name](block).encode(rows)
    FORMATS[name](block).decode((codes, scales), out := torch.empty_like(rows))
    padded = torch.nn.functional.pad(rows, (0, -numel % 32)).double()
    of_found = torch.nn.functional.pad(out, (0, -numel % 32)).double()
    if name == "int4_hadamard":
        matrix = hadamard(32, rows.device).double()
        padded = (padded.unflatten(1, (-1, 32)) @ matrix).flatten(1)
        rotated = torch.empty_like(padded, dtype=torch.float32)
        block_formats.decode("int4", block, codes, scales, rotated)  # before the rotation back
        of_found = rotated.double()
    for start in range(0, padded.shape[1], block):
        exact, near = padded[:, start : start + block], of_found[:, start : start + block]
        largest = exact.abs().amax(1, keepdim=True)
        if name == "1bit":
            mean = exact.abs().mean(1, keepdim=True)
            length = near[:, : numel - start]
            torch.testing.assert_close(length.abs(), mean.expand_as(length), rtol=1e-5, atol=0.0)
            assert ((near * exact >= 0) | (exact == 0)).all()
            continue
        step = {"int8": largest / 254, "int4": largest / 14, "int4_hadamard": largest / 14}.get(name)
        if step is None:  # 3 bits of mantissa, or half of the smallest step of the block
            step = torch.maximum(exact.abs() / 16, largest * 2 / 448 / 1024)
        assert ((near - exact).abs() <= step * 1.001 + 1e-12).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_view_and_16_bits_are_read_in_place(dtype: torch.dtype) -> None:
    whole = values_of(600).to(dtype)
    view, wire = whole[1:, 100:500], FORMATS["int8"](None)
    codes, _, expected = by_operators(wire, view)
    found = wire.encode(view)
    assert torch.equal(found[0], codes)
    wire.decode(found, whole[:2, 50:450])
    rtol = 1e-5 if dtype == torch.float32 else 2**-7  # the interpreter cuts bf16 off, GPUs round it
    torch.testing.assert_close(whole[:2, 50:450], expected, rtol=rtol, atol=0.0)


@pytest.mark.parametrize("name", BLOCKED)
def test_what_kernels_do_not_take_is_encoded_by_operators(name: str) -> None:
    spaced = values_of(512).t().contiguous().t()  # the elements of a row do not follow each other
    for wire, rows in ((FORMATS[name](None), spaced), (FORMATS[name](16_384), values_of(20_000))):
        codes, scales, expected = by_operators(wire, rows)
        found = wire.encode(rows)
        wire.decode(found, out := torch.empty_like(rows))
        assert torch.equal(found[0], codes) and torch.equal(found[1], scales) and torch.equal(out, expected)

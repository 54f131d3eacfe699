"""The formats of operands: grids, scales, and what rounding loses, against tables and fp64."""

from __future__ import annotations

import math

import pytest
import torch

from shoal.comm.formats import format_named, power_of_two
from shoal.parallel.low_precision.formats import Block, ScaledFloat4, ScaledFloat8, round_to_e2m1

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
BLOCKS: list[Block] = [(None, None), (1, None), (1, 128), (128, 128), (1, 32), (1, 16), (16, 16)]


def matrix(rows: int = 37, columns: int = 300, seed: int = 0) -> torch.Tensor:
    """With rows and columns of other magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator)
    return values * torch.logspace(-2, 1, rows)[:, None] * torch.logspace(-1, 1, columns)


def largest_of_blocks(values: torch.Tensor, block: Block) -> torch.Tensor:
    """For each element the largest magnitude of its block."""
    rows, columns = (length if size is None else size for length, size in zip(values.shape, block, strict=True))
    result = torch.empty_like(values)
    for top in range(0, values.shape[0], rows):
        for left in range(0, values.shape[1], columns):
            part = (slice(top, top + rows), slice(left, left + columns))
            result[part] = values[part].abs().max()
    return result


def test_a_scale_is_the_smallest_power_of_two_that_is_not_smaller() -> None:
    numbers = torch.tensor([1.0, 1.0000001, 0.75, 3.0, 4.0, 2.0**-126, 0.0, math.inf, math.nan])
    found = power_of_two(numbers)
    assert found[:8].tolist() == [1.0, 2.0, 1.0, 4.0, 4.0, 2.0**-126, 1.0, math.inf]
    assert found[8].isnan()


@pytest.mark.parametrize("block", BLOCKS[:5])
@pytest.mark.parametrize(("dtype", "bound"), [(E4M3, 2**-4), (E5M2, 2**-3)])
def test_a_number_of_8_bits_is_off_by_its_relative_error_or_by_half_of_the_smallest(
    dtype: torch.dtype, bound: float, block: Block
) -> None:
    values = matrix().double()
    lost = (ScaledFloat8(dtype, block).values(values).double() - values).abs()
    largest = largest_of_blocks(values, block)
    scales = torch.exp2(torch.ceil(torch.log2(largest / torch.finfo(dtype).max)))
    assert (lost <= torch.maximum(values.abs() * bound, scales * torch.finfo(dtype).smallest_normal * bound)).all()
    assert lost.max() > 0


@pytest.mark.parametrize("block", BLOCKS[5:])
def test_a_number_of_4_bits_is_the_nearest_of_the_table_times_both_scales(block: Block) -> None:
    values = matrix()
    found, (rows, columns) = ScaledFloat4(block).values(values), block
    of_matrix = values.abs().max() / (6.0 * 448.0)
    table = torch.tensor(E2M1)
    assert rows is not None and columns is not None
    for top in range(0, 37, rows):
        for left in range(0, 300, columns):
            part = values[top : top + rows, left : left + columns]
            scale = (part.abs().max() / 6.0 / of_matrix).to(E4M3).float() * of_matrix
            nearest = table[(part.abs()[..., None] / scale - table).abs().argmin(-1)] * scale
            assert torch.equal(found[top : top + rows, left : left + columns], nearest.copysign(part))


def test_the_nearest_number_of_4_bits_is_that_of_the_table_and_of_two_the_even_one() -> None:
    values = torch.arange(-6 * 64, 6 * 64 + 1, dtype=torch.float64) / 64
    table = torch.tensor([-each for each in reversed(E2M1[1:])] + E2M1, dtype=torch.float64)
    nearest = (values[:, None] - table).abs()
    even = torch.tensor([code % 2 for code in range(7, 0, -1)] + [code % 2 for code in range(8)])
    chosen = table[(nearest + even * 1e-9).argmin(1)]
    assert torch.equal(round_to_e2m1(values), chosen)


def test_stochastic_rounding_gives_both_neighbours_and_the_value_on_the_average() -> None:
    values = torch.tensor([0.1, 0.6, 1.9, 2.2, 3.5, 5.0, -4.5])
    noise = torch.rand(20_000, 7, generator=torch.Generator().manual_seed(0))
    rounded = round_to_e2m1(values.expand(20_000, -1), noise)
    assert [sorted(set(column.tolist())) for column in rounded.abs().T[:5]] == [
        [0.0, 0.5], [0.5, 1.0], [1.5, 2.0], [2.0, 3.0], [3.0, 4.0]
    ]  # fmt: skip
    assert (rounded.mean(0) - values).abs().max() < 0.03


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(
    "form", [ScaledFloat8(E4M3, (None, None)), ScaledFloat8(E5M2, (1, 32)), ScaledFloat4((1, 16))], ids=str
)
def test_what_is_not_finite_makes_its_block_nan(form: ScaledFloat8 | ScaledFloat4, bad: float) -> None:
    values = matrix(4, 64)
    values[1, 5] = bad
    found = form.values(values, None)
    assert found[1, :16].isnan().all()
    if isinstance(form, ScaledFloat8) and form.block == (1, 32):
        assert found[1, 32:].isfinite().all()
        assert found[0].isfinite().all()


@pytest.mark.parametrize(
    "form", [ScaledFloat8(E4M3, (None, None)), ScaledFloat8(E4M3, (1, 128)), ScaledFloat4((16, 16))], ids=str
)
def test_zeros_stay_zeros(form: ScaledFloat8 | ScaledFloat4) -> None:
    assert torch.equal(form.values(torch.zeros(20, 50), None), torch.zeros(20, 50))


@pytest.mark.parametrize("block", BLOCKS[:5])
def test_what_was_gathered_in_8_bits_has_the_codes_that_it_has_without(block: Block) -> None:
    """Where no number is subnormal: here all are over 2^-10 of the largest."""
    values = matrix()
    values = values.sign() * values.abs().clamp(min=values.abs().max().item() * 2**-10)
    gathered, flat = torch.empty_like(values), format_named("fp8")
    flat.decode(flat.encode(values.view(1, -1)), gathered.view(1, -1))
    assert not torch.equal(gathered, values)
    form = ScaledFloat8(E4M3, block)
    assert torch.equal(form.values(gathered), form.values(values))
    assert torch.equal(form.values(gathered.bfloat16()), form.values(values))

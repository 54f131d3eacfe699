"""Products of operands in few bits: by the operator of torch, or in fp32 of the values that the codes stand for.

The operator sums the products of codes and multiplies the sums, of a row or of a block, by both scales. Scales are
powers of two, so both ways compute the same products, and sums of them in fp32. Whether the operator computes them on a
device is found out by a small product there, whose result is compared.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn import functional as F

from shoal.comm.formats import hadamard
from shoal.device import is_fake
from shoal.parallel.low_precision.formats import Block, Format, ScaledFloat8
from shoal.parallel.low_precision.recipes import Pair, Recipe
from shoal.parallel.products import Products
from shoal.streams import simulation

_ALIGNED = 16  # elements, on GPUs
_BLOCKED = 128  # elements, where blocks have scales
REFUSALS = (RuntimeError, ValueError)  # what torch's operators raise for operands or a device that they do not take
SAME = 2.0**-6  # of the largest number of a product: rounded to 8 bits of mantissa, and another order of sums
# By the block of a scale, numbers of torch.nn.functional.ScalingType, and of SwizzleType: none, or SWIZZLE_32_4_4. Read
# here, since compiled code cannot read them.
_TYPES = getattr(F, "ScalingType", None)
_SCALING: dict[Block, tuple[int, int]] = {} if _TYPES is None else {
    (1, 128): (int(_TYPES.BlockWise1x128.value), 0),
    (128, 128): (int(_TYPES.BlockWise128x128.value), 0),
    (1, 32): (int(_TYPES.BlockWise1x32.value), 1),
}  # fmt: skip
_ROTATED = 16  # tokens that are mixed


class LowPrecisionProducts(Products):
    """The products of a recipe.

    Args:
        generator: draws what is rounded stochastically; None: torch's default generator.

    Attributes:
        refused: dtypes of results that torch's operator does not compute here; see ``refusal``.
    """

    def __init__(self, recipe: Recipe, generator: torch.Generator | None = None) -> None:
        self.recipe = recipe
        self._generator = generator
        self.refused: frozenset[torch.dtype] = frozenset([torch.float64])

    def output(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.recipe.output is None:
            return super().output(x, weight.to(x.dtype))
        return self._multiply(_tokens(x), weight, self.recipe.output).view(*x.shape[:-1], -1)

    def of_input(self, gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.recipe.of_input is None:
            return super().of_input(gradient, weight.to(gradient.dtype))
        of_tokens = self._multiply(_tokens(gradient), weight.t(), self.recipe.of_input)
        return of_tokens.view(*gradient.shape[:-1], -1)

    def of_weight(self, gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if self.recipe.of_weight is None:
            return super().of_weight(gradient, x)
        of_weight = self.recipe.of_weight
        return self._multiply(_tokens(gradient).t(), _tokens(x).t(), of_weight, is_rotated=self.recipe.is_rotated)

    def _multiply(self, a: torch.Tensor, b: torch.Tensor, formats: Pair, *, is_rotated: bool = False) -> torch.Tensor:
        """``a @ b.t()`` in the dtype of ``a``. Shapes: [M, K], [N, K] -> [M, N]."""
        if a.dtype not in self.refused and _has_operator(formats):
            return _by_operator(a, b, formats, a.dtype)
        return self._emulated(a, b, formats, is_rotated).to(a.dtype)

    def _emulated(self, a: torch.Tensor, b: torch.Tensor, formats: Pair, is_rotated: bool) -> torch.Tensor:
        with torch.autocast(a.device.type, enabled=False):
            if is_rotated:
                a, b = _rotated(a), _rotated(b)
            of_a, of_b = formats
            return of_a.values(a, self._generator) @ of_b.values(b, self._generator).t()

    def refusal(self, dtype: torch.dtype, device: torch.device) -> str | None:
        """Why torch's operator does not compute results of ``dtype`` on ``device``; None: it does."""
        recipe = self.recipe
        a, b = sample(144, device).to(dtype), sample(176, device).to(dtype)
        pairs = (recipe.output, recipe.of_input, recipe.of_weight)
        for pair in dict.fromkeys(pair for pair in pairs if pair is not None):
            if not _has_operator(pair):
                return "4 bits are not given to torch's operator"
            width, simulated = _width(pair[0]), simulation()
            if width is not None and not _SCALING:
                return "this version of torch has no products with scales of blocks"
            if width is not None and simulated is not None and not simulated.multiplies_blocks(width):
                return f"the simulated GPU has no products with a scale for each {width} elements"
            try:
                found = _by_operator(a, b, pair, dtype)
            except REFUSALS as error:
                return f"torch's operator says: {first_line(error)}"
            if is_fake(found):
                continue
            off = relative_difference(found, self._emulated(a, b, pair, is_rotated=False))
            if not off < SAME:
                return f"torch's operator is off by {off:.1g} of the largest number of a product"
        return None


def _tokens(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, as a part of the largest number that is expected."""
    return float((found.float() - expected.float()).abs().max() / expected.abs().max())


def sample(num_rows: int, device: torch.device, num_columns: int = 256) -> torch.Tensor:
    """A matrix whose blocks have scales that differ along both dims. fp32, up to 5.5."""
    row = torch.arange(num_rows, dtype=torch.int64, device=device)[:, None]
    column = torch.arange(num_columns, dtype=torch.int64, device=device)
    powers = (row // 16 + 3 * (column // 32)) % 5 + 2 * (row // 128) + 3 * (column // 128) - 9
    return ((7 * row + 3 * column) % 11 - 5.5) * powers.float().exp2()


def _width(of: Format) -> int | None:
    """Elements of a row that share a scale in a recipe of blocks; None: all of them."""
    return of.block[1] if isinstance(of, ScaledFloat8) else None


def _has_operator(formats: Pair) -> bool:
    """True if both operands have 8 bits; torch has an operator for all their blocks."""
    return all(isinstance(each, ScaledFloat8) for each in formats)


def _by_operator(a: torch.Tensor, b: torch.Tensor, formats: Pair, dtype: torch.dtype) -> torch.Tensor:
    num_rows, num_columns = len(a), len(b)
    if _width(formats[0]) is not None:
        return _by_blocks(a, b, formats, dtype).narrow(0, 0, num_rows).narrow(1, 0, num_columns)
    if a.device.type != "cpu":  # lengths of rows, and the number of columns of the result, are multiples of 16 there
        a, b = (_padded(each, (0, -each.shape[1] % _ALIGNED)) for each in (a, b))
        b = _padded(b, (0, 0, 0, -num_columns % _ALIGNED))
    by_row = any(each.block[0] == 1 for each in formats if isinstance(each, ScaledFloat8))
    codes, scales = [], []
    for matrix, each in zip((a, b), formats, strict=True):
        assert isinstance(each, ScaledFloat8)
        code, scale = each.encode(matrix)
        codes.append(code)
        scales.append(scale.reshape(-1, 1).expand(len(matrix), 1).contiguous() if by_row else scale.reshape(()))
    result: torch.Tensor = torch._scaled_mm(
        codes[0], codes[1].t(), scale_a=scales[0], scale_b=scales[1].t() if by_row else scales[1], out_dtype=dtype
    )
    return result.narrow(0, 0, num_rows).narrow(1, 0, num_columns)


def _by_blocks(a: torch.Tensor, b: torch.Tensor, formats: Pair, dtype: torch.dtype) -> torch.Tensor:
    """With zeros for rows and columns up to whole blocks. Shapes: [M, K], [N, K] -> [at least M, at least N]."""
    codes, scales, recipes, swizzles = [], [], [], []
    for matrix, each in zip((a, b), formats, strict=True):
        assert isinstance(each, ScaledFloat8)
        rows = _BLOCKED if each.block[0] == _BLOCKED else _ALIGNED
        code, scale = each.encode_blocks(_padded(matrix, (0, -matrix.shape[1] % _BLOCKED, 0, -len(matrix) % rows)))
        recipe, swizzle = _SCALING[each.block]
        codes.append(code)
        scales.append([scale])
        recipes.append([recipe])
        swizzles.append([swizzle])
    result: torch.Tensor = torch._scaled_mm_v2(
        codes[0], codes[1].t(), scales[0], recipes[0], swizzles[0], scales[1], recipes[1], swizzles[1], None, dtype
    )
    return result


def _padded(matrix: torch.Tensor, padding: tuple[int, ...]) -> torch.Tensor:
    """As ``F.pad``, which copies a matrix that needs none."""
    return F.pad(matrix, padding) if any(padding) else matrix


@cache
def _random_hadamard(device: torch.device) -> torch.Tensor:
    """An orthogonal matrix: a Hadamard matrix, each row times a random sign. Shape: [16, 16]."""
    signs = torch.tensor([1, 1, -1, 1, -1, -1, 1, 1, 1, -1, -1, -1, 1, -1, 1, -1], dtype=torch.float32, device=device)
    return hadamard(_ROTATED, device) * signs[:, None]


def _rotated(rows: torch.Tensor) -> torch.Tensor:
    """Each 16 elements of a row multiplied by the matrix; fp32. The last ones are padded with zeros."""
    rows = F.pad(rows.float(), (0, -rows.shape[1] % _ROTATED))
    matrix = rows.new_empty(_ROTATED, _ROTATED) if is_fake(rows) else _random_hadamard(rows.device)
    rotated: torch.Tensor = (rows.unflatten(1, (-1, _ROTATED)) @ matrix).flatten(1)
    return rotated

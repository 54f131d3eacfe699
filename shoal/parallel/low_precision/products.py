"""Products of operands in few bits: by the operator of torch, or in fp32 of the values that the codes stand for.

Where one scale counts for a whole row, the operator sums the products of codes and multiplies the sums by both scales.
Scales are powers of two, so both ways compute the same products, and sums of them in fp32.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn import functional as F

from shoal.comm.formats import hadamard
from shoal.device import is_fake
from shoal.parallel.low_precision.formats import ScaledFloat8
from shoal.parallel.low_precision.recipes import Pair, Recipe
from shoal.parallel.products import Products

_ALIGNED = 16  # elements, on GPUs
_ROTATED = 16  # tokens that are mixed


class LowPrecisionProducts(Products):
    """The products of a recipe.

    Args:
        generator: draws what is rounded stochastically; None: torch's default generator.

    Attributes:
        refused: dtypes of results that torch's operator does not compute here; see ``refusal``.
    """

    def __init__(self, recipe: Recipe, generator: torch.Generator | None = None) -> None:
        self._recipe = recipe
        self._generator = generator
        self.refused: frozenset[torch.dtype] = frozenset([torch.float64])

    def output(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self._recipe.output is None:
            return super().output(x, weight.to(x.dtype))
        return self._multiply(_tokens(x), weight, self._recipe.output).view(*x.shape[:-1], -1)

    def of_input(self, gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self._recipe.of_input is None:
            return super().of_input(gradient, weight.to(gradient.dtype))
        of_tokens = self._multiply(_tokens(gradient), weight.t(), self._recipe.of_input)
        return of_tokens.view(*gradient.shape[:-1], -1)

    def of_weight(self, gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if self._recipe.of_weight is None:
            return super().of_weight(gradient, x)
        of_weight = self._recipe.of_weight
        return self._multiply(_tokens(gradient).t(), _tokens(x).t(), of_weight, is_rotated=self._recipe.is_rotated)

    def _multiply(self, a: torch.Tensor, b: torch.Tensor, formats: Pair, *, is_rotated: bool = False) -> torch.Tensor:
        """``a @ b.t()`` in the dtype of ``a``. Shapes: [M, K], [N, K] -> [M, N]."""
        if a.dtype not in self.refused and _has_operator(formats):
            return _by_operator(a, b, formats, a.dtype)
        dtype = a.dtype
        with torch.autocast(a.device.type, enabled=False):
            if is_rotated:
                a, b = _rotated(a), _rotated(b)
            of_a, of_b = formats
            return (of_a.values(a, self._generator) @ of_b.values(b, self._generator).t()).to(dtype)

    def refusal(self, dtype: torch.dtype, device: torch.device) -> str | None:
        """Why torch's operator does not compute results of ``dtype`` on ``device``; None: it does."""
        recipe = self._recipe
        ones = torch.ones(_ALIGNED, _ALIGNED, dtype=dtype, device=device)
        for pair in (recipe.output, recipe.of_input, recipe.of_weight):
            if pair is None:
                continue
            if not _has_operator(pair):
                return "blocks of this recipe are not given to torch's operator"
            try:
                _by_operator(ones, ones, pair, dtype)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                return f"torch's operator says: {str(error).strip().partition(chr(10))[0]}"
        return None


def _tokens(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _has_operator(formats: Pair) -> bool:
    """True if each operand has a scale for a row, or one in all."""
    return all(isinstance(each, ScaledFloat8) and each.block in ((None, None), (1, None)) for each in formats)


def _by_operator(a: torch.Tensor, b: torch.Tensor, formats: Pair, dtype: torch.dtype) -> torch.Tensor:
    num_rows, num_columns = len(a), len(b)
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

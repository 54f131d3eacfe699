"""Products of experts' rows in 8 bits, each of all experts in one kernel: ``torch._scaled_grouped_mm``.

The kernel takes e4m3 with a scale for each row of the operands, which may be that of a whole matrix: what the recipes
``rowwise`` and ``rowwise_with_gw_hp`` need. It computes what a product for each expert does. In the product of weights
an expert's rows are columns, and begin at a multiple of 16: after the rows of each there are zeros.

    rows        0 1 2 | 3 | 4 ...             of experts 0, 2 and 3; expert 1 has none
    columns     0 1 2 - ... | - ... | 3 - ... | 4 ...

Source: PyTorch, ``aten/src/ATen/native/cuda/GroupedBlas.cpp`` and ``ScaledGroupMM.cu``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from shoal.device import is_fake, numbers_on
from shoal.kernels.use import has_kernels, one_kernel
from shoal.parallel.expert.grouped import GROUPS_IN_BF16
from shoal.parallel.low_precision.formats import Block, Format, ScaledFloat8
from shoal.parallel.low_precision.products import (
    REFUSALS,
    SAME,
    LowPrecisionProducts,
    first_line,
    relative_difference,
    sample,
)
from shoal.parallel.low_precision.recipes import Pair, Recipe

_ROWS = 16  # bytes; addresses of groups are multiples
_MOST_GROUPS = 1023
_OF_ROWS: Block = (1, None)
_SAMPLE_ENDS = (21, 21, 61, 144)  # of groups of rows, one of which has none
_scaled_grouped_mm: Any = getattr(torch, "_scaled_grouped_mm", None)


def take_groups(products: LowPrecisionProducts, device: torch.device) -> str | None:
    """Let ``products`` multiply groups by torch's product, where that computes the recipe on ``device``.

    Returns: why it does not; None: it does.
    """
    groups = ScaledGroups(products.recipe)
    reason = _refusal_of(products.recipe) or _refusal_on(device, groups, products)
    products.groups = groups if reason is None else None
    return reason


def _refusal_of(recipe: Recipe) -> str | None:
    """Why no GPU has a product of groups for a recipe; None: some have one."""
    if _scaled_grouped_mm is None:
        return "this version of torch has no product of groups in 8 bits"
    formats = [*(recipe.output or ()), *(recipe.of_input or ())]
    are_taken = all(_is_e4m3(each, _OF_ROWS, (None, None)) for each in formats)
    of_weight = all(_is_e4m3(each, _OF_ROWS) for each in recipe.of_weight or ())
    return None if are_taken and of_weight else "torch's product of groups takes e4m3 with scales of rows"


def _is_e4m3(each: Format, *blocks: Block) -> bool:
    """True if it is e4m3, with the scales of one of ``blocks``."""
    return isinstance(each, ScaledFloat8) and each.dtype is torch.float8_e4m3fn and each.block in blocks


def _refusal_on(device: torch.device, groups: ScaledGroups, products: LowPrecisionProducts) -> str | None:
    """Why a device does not compute small groups as ``products`` computes each of them; None: it does."""
    ends = numbers_on(device, _SAMPLE_ENDS, torch.int32)
    x, gradient = (sample(_SAMPLE_ENDS[-1], device, width).bfloat16() for width in (64, 48))
    weight = sample(len(_SAMPLE_ENDS) * 64, device, 48).bfloat16().unflatten(0, (-1, 64))
    if not groups.takes(x, weight):
        return "torch has no product of groups in 8 bits for this device"
    try:
        found = [groups.output(x, weight, ends), groups.of_input(gradient, weight, ends)]
        of_weight = groups.of_weight(x, gradient, ends)
    except REFUSALS as error:
        return f"torch's product of groups says: {first_line(error)}"
    if is_fake(of_weight):
        return None
    for one, other in zip([*found, of_weight], _one_by_one(products, x, gradient, weight), strict=True):
        off = relative_difference(one, other)
        if not off < SAME:  # a NaN is not
            return f"torch's product of groups is off by {off:.1g} of the largest number"
    return None


def _one_by_one(
    products: LowPrecisionProducts, x: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor
) -> list[torch.Tensor]:
    """The three products of the sample's groups, each group by itself."""
    expected: list[list[torch.Tensor]] = [[], [], []]
    for start, end, matrix in zip((0, *_SAMPLE_ENDS[:-1]), _SAMPLE_ENDS, weight, strict=True):
        own, own_gradient = x[start:end], gradient[start:end]
        expected[2].append(products.of_weight(own_gradient, own).t() if start < end else torch.zeros_like(matrix))
        if start < end:
            expected[0].append(products.output(own, matrix.t()))
            expected[1].append(products.of_input(own_gradient, matrix.t()))
    output, of_input, of_weight = expected
    return [torch.cat(output), torch.cat(of_input), torch.stack(of_weight)]


class Aligned(NamedTuple):
    """Rows in groups as columns that begin at multiples of 16.

    Args:
        source: int32, the row of each column; -1: zeros. As long as the rows and 16 for each group, rounded up: how
            many columns are used is known on the device.
        group_of: int32, the group of each 16 columns; the number of groups: of none.
        ends: int32, the column after the last one of each group.
    """

    source: torch.Tensor
    group_of: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def of(cls, ends: torch.Tensor, num_rows: int) -> Aligned:
        """
        Args:
            ends: int32, the row after the last one of each group. Shape: [groups].
        """
        num_blocks = -(-num_rows // _ROWS) + len(ends)
        aligned = cls(*(ends.new_empty(length) for length in (_ROWS * num_blocks, num_blocks, len(ends))))
        if is_fake(ends):
            with one_kernel():
                aligned.source.fill_(0)
        else:
            from shoal.kernels import float8 as kernels

            kernels.align(ends, *aligned)
        return aligned


class ScaledGroups:
    """The products of a recipe that rows have scales in, as ``GroupProducts``."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def takes(self, rows: torch.Tensor, weight: torch.Tensor) -> bool:
        if not GROUPS_IN_BF16.takes(rows, weight) or rows.shape[1] % _ROWS or weight.shape[2] % _ROWS:
            return False
        return len(weight) <= _MOST_GROUPS and (is_fake(rows) or has_kernels(rows))

    def output(self, rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        if self._recipe.output is None:
            return GROUPS_IN_BF16.output(rows, weight, ends)
        return _multiply(rows, weight.transpose(1, 2), ends, self._recipe.output)

    def of_input(self, gradient: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        if self._recipe.of_input is None:
            return GROUPS_IN_BF16.of_input(gradient, weight, ends)
        return _multiply(gradient, weight, ends, self._recipe.of_input)

    def of_weight(self, left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        if self._recipe.of_weight is None:
            return GROUPS_IN_BF16.of_weight(left, right, ends)
        aligned = Aligned.of(ends, len(left))
        (left_codes, left_scales), (right_codes, right_scales) = (_encode(rows, aligned) for rows in (left, right))
        return _scaled(left_codes, right_codes.t(), left_scales, right_scales, aligned.ends)


def _multiply(rows: torch.Tensor, stack: torch.Tensor, ends: torch.Tensor, formats: Pair) -> torch.Tensor:
    """Each group's rows times the transposed matrix of the group. Shapes: [rows, K], [groups, N, K] -> [rows, N]."""
    of_rows, of_stack = formats
    assert isinstance(of_rows, ScaledFloat8) and isinstance(of_stack, ScaledFloat8)
    codes, scales = of_rows.encode(rows)
    stack_codes, stack_scales = of_stack.encode(stack)
    stack_scales = stack_scales.reshape(len(stack), -1).expand(stack.shape[:2]).contiguous()
    return _scaled(codes, stack_codes.transpose(1, 2), scales, stack_scales, ends)


def _encode(rows: torch.Tensor, aligned: Aligned) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of the transposed rows, with a scale for each group. Shapes: [width, columns], [groups x width]."""
    num_groups, width = len(aligned.ends), rows.shape[1]
    codes = torch.empty(width, len(aligned.source), dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.empty(num_groups, width, dtype=torch.float32, device=rows.device)
    if is_fake(rows):
        with one_kernel():
            rows.abs().amax()
        with one_kernel():
            codes.view(torch.uint8)[:, : len(rows)].copy_(rows.t())
    else:
        from shoal.kernels import float8 as kernels

        kernels.encode_groups(rows, aligned.source, aligned.group_of, codes, scales)
    return codes, scales.flatten()


def _scaled(
    left: torch.Tensor, right: torch.Tensor, left_scales: torch.Tensor, right_scales: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    result: torch.Tensor = _scaled_grouped_mm(
        left, right, left_scales, right_scales, offs=ends, out_dtype=torch.bfloat16
    )
    return result

"""A matrix to codes of 8 bits with a scale for each row, block, or one in all: see ``low_precision.formats``.

    largest          reads an element
    encode           reads it again, from the cache where the matrix fits, and writes 1 byte
    encode_blocks    reads it once
    encode_groups    as encode, of rows in groups, transposed

Of 16 bits: 5 bytes an element. A program has a tile, which may lie in memory along either dim: a product of gradients
takes matrices transposed. The largest magnitude is that of the bits as integers, in which a NaN is larger than all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.block_formats import _power_of_two, _to_float8

GROUP_ROWS = 16  # a group's columns begin at a multiple of it, as torch's kernels of groups want it
_TILE = 64
_BLOCKS = 128  # rows and columns of a tile of whole blocks


def encode(matrix: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Fill ``codes`` and ``scales``.

    Args:
        matrix: [rows, columns], or several: [matrices, rows, columns].
        codes: float8_e4m3fn or float8_e5m2, shaped as ``matrix``, contiguous.
        scales: fp32, contiguous, of each row, or of each matrix: [(matrices,) rows] or [matrices or 1].
    """
    stack = matrix if matrix.dim() == 3 else matrix[None]
    by_row = scales.numel() > len(stack)
    largest = torch.zeros_like(scales, dtype=torch.int32)
    shape, strides = stack.shape[1:], stack.stride()
    grid = triton.cdiv(shape[0], _TILE), triton.cdiv(shape[1], _TILE), len(stack)
    _largest[grid](stack, largest, *shape, *strides, BY_ROW=by_row, TILE=_TILE)
    _encode[grid](
        stack, largest, codes.view(torch.uint8), scales, *shape, *strides,
        BY_ROW=by_row, IS_E5M2=codes.dtype is torch.float8_e5m2, TILE=_TILE,
    )  # fmt: skip


def align(ends: torch.Tensor, source: torch.Tensor, group_of: torch.Tensor, aligned_ends: torch.Tensor) -> None:
    """Fill ``source``, ``group_of`` and ``aligned_ends`` of ``low_precision.groups.Aligned``.

    Args:
        ends: int32, the row after the last one of each group. Shape: [groups].
    """
    _align[(len(group_of),)](
        ends, source, group_of, aligned_ends, len(ends), GROUPS=triton.next_power_of_2(len(ends)), ROWS=GROUP_ROWS
    )


def encode_groups(
    rows: torch.Tensor, source: torch.Tensor, group_of: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> None:
    """Fill ``codes`` and ``scales`` with rows that are columns there, in the order of ``source``.

    Args:
        rows: [rows, width], contiguous.
        source: int32, the row of each column; -1: zeros. Shape: [columns].
        group_of: int32, the group of each ``GROUP_ROWS`` columns, the number of groups where there is none. Shape:
            [columns / GROUP_ROWS].
        codes: float8_e4m3fn, [width, columns], contiguous.
        scales: fp32, [groups, width], contiguous.
    """
    num_groups, width = scales.shape
    columns = len(source)
    largest = torch.zeros_like(scales, dtype=torch.int32)
    grid = triton.cdiv(width, _TILE), triton.cdiv(columns, _TILE)
    sizes = num_groups, width, columns
    _largest_of_groups[grid](rows, source, group_of, largest, *sizes, TILE=_TILE, ROWS=GROUP_ROWS)
    _encode_groups[grid](
        rows, source, group_of, largest, codes.view(torch.uint8), scales, *sizes, TILE=_TILE, ROWS=GROUP_ROWS
    )


def encode_blocks(
    matrix: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, block: tuple[int | None, int | None]
) -> None:
    """Fill ``codes`` and ``scales`` of ``ScaledFloat8.encode_blocks``, of ``float8_e4m3fn``.

    Args:
        matrix: [rows, columns]; rows are multiples of the block's, columns of 128.
    """
    rows, columns = matrix.shape
    grid = triton.cdiv(rows, _BLOCKS), columns // _BLOCKS
    are_bytes = scales.dtype is torch.float8_e8m0fnu
    _encode_blocks[grid](
        matrix, codes.view(torch.uint8), scales.view(torch.uint8) if are_bytes else scales, rows, columns,
        *matrix.stride(), 0 if are_bytes else scales.stride(1),
        IS_SQUARE=block[0] != 1, WIDTH=block[1], TILE=_BLOCKS, num_warps=8,
    )  # fmt: skip


@triton.jit
def _load(matrix, rows, columns, row_stride, column_stride, TILE: tl.constexpr):
    """A tile in fp32, zeros beyond the matrix; its rows and columns."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    is_inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = matrix + row[:, None] * row_stride + column[None, :] * column_stride
    return tl.load(at, mask=is_inside, other=0.0).to(tl.float32), row, column, is_inside


@triton.jit
def _scale_of(bits, LARGEST: tl.constexpr, LEAST: tl.constexpr):
    """The scale of values whose largest magnitude has these bits, at least ``LEAST``; and their factor."""
    scale = _power_of_two(tl.div_rn(bits.to(tl.float32, bitcast=True), tl.full(bits.shape, LARGEST, tl.float32)))
    if LEAST > 0:
        scale = tl.maximum(scale, LEAST)
    return scale, tl.minimum(tl.div_rn(tl.full(bits.shape, 1.0, tl.float32), scale), 3e38)


@triton.jit
def _largest(
    stack, largest, rows, columns, stride, row_stride, column_stride, BY_ROW: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    number = tl.program_id(2).to(tl.int64)
    values, row, _, _ = _load(stack + number * stride, rows, columns, row_stride, column_stride, TILE)
    largest += number * (rows if BY_ROW else 1)
    of_row = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    if BY_ROW:
        tl.atomic_max(largest + row, of_row, mask=row < rows)
    else:
        tl.atomic_max(largest, tl.max(of_row, axis=0))


@triton.jit
def _encode(
    stack, largest, codes, scales, rows, columns, stride, row_stride, column_stride,
    BY_ROW: tl.constexpr, IS_E5M2: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(2).to(tl.int64)
    values, row, column, is_inside = _load(stack + number * stride, rows, columns, row_stride, column_stride, TILE)
    codes += number * rows * columns
    largest += number * (rows if BY_ROW else 1)
    scales += number * (rows if BY_ROW else 1)
    group = row if BY_ROW else tl.zeros_like(row)
    bits = tl.load(largest + group, mask=row < rows, other=0)
    scale, factor = _scale_of(bits, 57344.0 if IS_E5M2 else 448.0, 0.0)
    scaled = values * factor[:, None]
    code = _to_float8(scaled, 2 if IS_E5M2 else 3)
    tl.store(codes + row[:, None] * columns + column[None, :], (code & 0xFF).to(tl.uint8), mask=is_inside)
    if tl.program_id(1) == 0:
        scale = tl.where(bits < 0x7F800000, scale, float("nan"))
        tl.store(scales + group, scale, mask=row < rows)


@triton.jit
def _encode_blocks(
    matrix, codes, scales, rows, columns, row_stride, column_stride, scale_stride,
    IS_SQUARE: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    values, row, column, is_inside = _load(matrix, rows, columns, row_stride, column_stride, TILE)
    COUNT: tl.constexpr = TILE // WIDTH
    bits = tl.max(tl.reshape(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, (TILE, COUNT, WIDTH)), axis=2)
    if IS_SQUARE:
        bits = tl.zeros_like(bits) + tl.max(bits, axis=0)[None, :]
    scale, factor = _scale_of(bits, 448.0, 1.1754943508222875e-38 if WIDTH == 32 else 0.0)
    scaled = tl.reshape(tl.reshape(values, (TILE, COUNT, WIDTH)) * factor[:, :, None], (TILE, TILE))
    code = _to_float8(scaled, 3)
    tl.store(codes + row[:, None] * columns + column[None, :], (code & 0xFF).to(tl.uint8), mask=is_inside)
    scale = tl.where(bits < 0x7F800000, scale, float("nan"))
    number = tl.arange(0, TILE)
    block = tl.program_id(1).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    if WIDTH == 32:
        tile = tl.program_id(0).to(tl.int64) * (columns // TILE) + tl.program_id(1)
        place = tile * (TILE * COUNT) + (number % 32) * 16 + (number // 32) * 4
        exponent = tl.where((row < rows)[:, None], (scale.to(tl.int32, bitcast=True) >> 23) & 0xFF, 0)
        tl.store(scales + place[:, None] + tl.arange(0, COUNT)[None, :], exponent.to(tl.uint8))
    elif IS_SQUARE:
        place = tl.program_id(0).to(tl.int64) * scale_stride + block
        tl.store(scales + place[None, :] + number[:, None] * 0, scale, mask=number[:, None] == 0)
    else:
        tl.store(scales + row[:, None] + block[None, :] * scale_stride, scale, mask=(row < rows)[:, None])


@triton.jit
def _align(ends, source, group_of, aligned_ends, num_groups, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """The columns of a program are ``ROWS``, of one group."""
    number = tl.arange(0, GROUPS)
    is_group = number < num_groups
    end = tl.load(ends + number, mask=is_group, other=0)
    start = tl.load(ends + number - 1, mask=is_group & (number > 0), other=0)
    length = tl.where(is_group, tl.maximum((end - start + ROWS - 1) // ROWS, 1) * ROWS, 0)
    aligned = tl.cumsum(length, 0)
    first = tl.program_id(0) * ROWS
    group = tl.sum((is_group & (aligned <= first)).to(tl.int32), axis=0)
    is_own = number == group
    begin = tl.sum(tl.where(is_own, start, 0), axis=0)
    count = tl.sum(tl.where(is_own, end - start, 0), axis=0)
    place = first - tl.sum(tl.where(is_own, aligned - length, 0), axis=0) + tl.arange(0, ROWS)
    tl.store(source + first + tl.arange(0, ROWS), tl.where(place < count, begin + place, -1))
    tl.store(group_of + tl.program_id(0), group)
    if tl.program_id(0) == 0:
        tl.store(aligned_ends + number, aligned, mask=is_group)


@triton.jit
def _load_groups(rows, source, group_of, num_groups, width, columns, TILE: tl.constexpr, ROWS: tl.constexpr):
    """A tile in fp32 [TILE, TILE / ROWS, ROWS]; its rows, columns, and where the scales of its groups are."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    taken = tl.load(source + column, mask=column < columns, other=-1).to(tl.int64)
    at = rows + taken[None, :] * width + row[:, None]
    values = tl.load(at, mask=(row < width)[:, None] & (taken >= 0)[None, :], other=0.0).to(tl.float32)
    COUNT: tl.constexpr = TILE // ROWS
    block = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    group = tl.load(group_of + block, mask=block * ROWS < columns, other=num_groups).to(tl.int64)
    place = group[None, :] * width + row[:, None]
    has_scale = (group < num_groups)[None, :] & (row < width)[:, None]
    return tl.reshape(values, (TILE, COUNT, ROWS)), row, column, place, has_scale


@triton.jit
def _largest_of_groups(
    rows, source, group_of, largest, num_groups, width, columns, TILE: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    values, _, _, place, has_scale = _load_groups(rows, source, group_of, num_groups, width, columns, TILE, ROWS)
    bits = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2)
    tl.atomic_max(largest + place, bits, mask=has_scale)


@triton.jit
def _encode_groups(
    rows, source, group_of, largest, codes, scales, num_groups, width, columns, TILE: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    values, row, column, place, has_scale = _load_groups(rows, source, group_of, num_groups, width, columns, TILE, ROWS)
    bits = tl.load(largest + place, mask=has_scale, other=0)
    scale, factor = _scale_of(bits, 448.0, 0.0)
    code = _to_float8(tl.reshape(values * factor[:, :, None], (TILE, TILE)), 3)
    is_inside = (row < width)[:, None] & (column < columns)[None, :]
    tl.store(codes + row[:, None] * columns + column[None, :], (code & 0xFF).to(tl.uint8), mask=is_inside)
    scale = tl.where(bits < 0x7F800000, scale, float("nan"))
    tl.store(scales + place, scale, mask=has_scale)

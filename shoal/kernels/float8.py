"""A matrix to codes of 8 bits with a scale for each row, block, or one in all: see ``low_precision.formats``.

    largest          reads an element
    encode           reads it again, from the cache where the matrix fits, and writes 1 byte
    encode_blocks    reads it once

Of 16 bits: 5 bytes an element. A program has a tile, which may lie in memory along either dim: a product of gradients
takes matrices transposed. The largest magnitude is that of the bits as integers, in which a NaN is larger than all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.block_formats import _power_of_two, _to_float8

_TILE = 64
_BLOCKS = 128  # rows and columns of a tile of whole blocks


def encode(matrix: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Fill ``codes`` and ``scales``.

    Args:
        matrix: [rows, columns].
        codes: float8_e4m3fn or float8_e5m2, [rows, columns], contiguous.
        scales: fp32, of each row, or of the matrix: [rows] or [1].
    """
    by_row = scales.numel() > 1
    largest = torch.zeros_like(scales, dtype=torch.int32)
    shape, strides = matrix.shape, matrix.stride()
    grid = triton.cdiv(shape[0], _TILE), triton.cdiv(shape[1], _TILE)
    _largest[grid](matrix, largest, *shape, *strides, BY_ROW=by_row, TILE=_TILE)
    _encode[grid](
        matrix, largest, codes.view(torch.uint8), scales, *shape, *strides,
        BY_ROW=by_row, IS_E5M2=codes.dtype is torch.float8_e5m2, TILE=_TILE,
    )  # fmt: skip


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
def _largest(
    matrix, largest, rows, columns, row_stride, column_stride, BY_ROW: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    values, row, _, _ = _load(matrix, rows, columns, row_stride, column_stride, TILE)
    of_row = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    if BY_ROW:
        tl.atomic_max(largest + row, of_row, mask=row < rows)
    else:
        tl.atomic_max(largest, tl.max(of_row, axis=0))


@triton.jit
def _encode(
    matrix, largest, codes, scales, rows, columns, row_stride, column_stride,
    BY_ROW: tl.constexpr, IS_E5M2: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    values, row, column, is_inside = _load(matrix, rows, columns, row_stride, column_stride, TILE)
    group = row if BY_ROW else tl.zeros_like(row)
    bits = tl.load(largest + group, mask=row < rows, other=0)
    scale = _power_of_two(tl.div_rn(bits.to(tl.float32, bitcast=True), 57344.0 if IS_E5M2 else 448.0))
    scaled = values * tl.minimum(tl.div_rn(1.0, scale), 3e38)[:, None]
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
    scale = _power_of_two(tl.div_rn(bits.to(tl.float32, bitcast=True), tl.full((TILE, COUNT), 448.0, tl.float32)))
    if WIDTH == 32:
        scale = tl.maximum(scale, 1.1754943508222875e-38)
    factor = tl.minimum(tl.div_rn(tl.full((TILE, COUNT), 1.0, tl.float32), scale), 3e38)
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

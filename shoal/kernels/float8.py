"""A matrix to codes of 8 bits with a scale for each row, or one in all: ``shoal.parallel.low_precision.formats``.

    largest    reads an element
    encode     reads it again, from the cache where the matrix fits, and writes 1 byte

Of 16 bits: 5 bytes an element. A program has a tile, which may lie in memory along either dim: a product of gradients
takes matrices transposed. The largest magnitude is that of the bits as integers, in which a NaN is larger than all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shoal.kernels.block_formats import _power_of_two, _to_float8

_TILE = 64


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

"""Blocks of values to codes and scales, and back, in one pass over memory: the formats of ``shoal.comm.formats``.

    encode    reads 4 (error: 8) bytes an element of fp32, writes bits / 8 + 4 / block (error: and 4)
    decode    reads bits / 8 + 4 / block, writes 4

A program has some blocks, each in a row of a tile whose length is a power of two; what is beyond a block is masked.
Rounding is to the nearest, of two to the even one, as torch's: a sum with 1.5 * 2^23 leaves no bits of a fraction.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 2048  # elements of a program
_KINDS = {"int8": 0, "int4": 1, "int4_hadamard": 2, "fp8": 3, "1bit": 4}
_BITS = {"int8": 8, "int4": 4, "int4_hadamard": 4, "fp8": 8, "1bit": 1}


def encode(
    name: str, block: int, rows: torch.Tensor, error: torch.Tensor | None, codes: torch.Tensor, scales: torch.Tensor
) -> None:
    """As ``formats.BlockFormat.encode``. Shapes: [rows, numel] -> uint8 [rows, bytes], fp32 [rows, blocks]."""
    grid, shape = _grid(rows, block, scales)
    _encode[grid](
        rows, rows if error is None else error, codes, scales, *shape,
        rows.stride(0), 0 if error is None else error.stride(0), codes.stride(0), scales.stride(0),
        KIND=_KINDS[name], BITS=_BITS[name], HAS_ERROR=error is not None, **_tile(block),
    )  # fmt: skip


def decode(name: str, block: int, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """As ``formats.BlockFormat.decode``. Shapes: uint8 [rows, bytes], fp32 [rows, blocks] -> [rows, numel]."""
    grid, shape = _grid(out, block, scales)
    _decode[grid](
        codes, scales, out, *shape, codes.stride(0), scales.stride(0), out.stride(0),
        KIND=_KINDS[name], BITS=_BITS[name], **_tile(block),
    )  # fmt: skip


def _tile(block: int) -> dict[str, int]:
    padded = triton.next_power_of_2(block)
    return {"BLOCK": block, "PADDED": padded, "COUNT": max(_TILE // padded, 1)}


def _grid(rows: torch.Tensor, block: int, scales: torch.Tensor) -> tuple[tuple[int], tuple[int, int, int]]:
    """The number of programs; and of all blocks, of those of a row, and of elements of a row."""
    num_blocks = len(rows) * scales.shape[1]
    return (triton.cdiv(num_blocks, _tile(block)["COUNT"]),), (num_blocks, scales.shape[1], rows.shape[1])


@triton.jit
def _rounded(values):
    return (values + 12582912.0) - 12582912.0


@triton.jit
def _place(num_blocks, per_row, numel, BLOCK: tl.constexpr, PADDED: tl.constexpr, COUNT: tl.constexpr):
    """Of the blocks of this program: the row, the number in it, the width, what of them exists; the columns."""
    index = tl.program_id(0).to(tl.int64) * COUNT + tl.arange(0, COUNT)
    row, at = index // per_row, index % per_row
    width = tl.minimum((numel - at * BLOCK + 31) // 32 * 32, BLOCK)
    return row, at, width, index < num_blocks, tl.arange(0, PADDED)


@triton.jit
def _rotated(values, PADDED: tl.constexpr, COUNT: tl.constexpr):
    """Each 32 elements times the Hadamard matrix: five rounds of sums and differences."""
    values = _with_distance(values, 1, PADDED, COUNT)
    values = _with_distance(values, 2, PADDED, COUNT)
    values = _with_distance(values, 4, PADDED, COUNT)
    values = _with_distance(values, 8, PADDED, COUNT)
    return _with_distance(values, 16, PADDED, COUNT) * 0.17677669529663687


@triton.jit
def _with_distance(values, DISTANCE: tl.constexpr, PADDED: tl.constexpr, COUNT: tl.constexpr):
    """The sum and the difference of each element and the one at a distance after it."""
    pairs = tl.permute(tl.reshape(values, [COUNT, PADDED // (2 * DISTANCE), 2, DISTANCE]), [0, 1, 3, 2])
    a, b = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(a + b, a - b), [0, 1, 3, 2]), [COUNT, PADDED])


@triton.jit
def _power_of_two(numbers):
    """The smallest powers of two that are not smaller; 1 of 0."""
    bits = (numbers.to(tl.int32, bitcast=True) + 0x007FFFFF) & -0x00800000
    return tl.where(numbers == 0, 1.0, bits.to(tl.float32, bitcast=True))


@triton.jit
def _to_float8(values, MANTISSA: tl.constexpr):
    """The bits of numbers in the range of e4m3 (3 bits of mantissa) or e5m2 (2), as int32 from 0 to 255."""
    BIAS: tl.constexpr = (1 << (6 - MANTISSA)) - 1
    SHIFT: tl.constexpr = 23 - MANTISSA
    STEPS: tl.constexpr = 1 << (BIAS - 1 + MANTISSA)  # of 1, below the smallest normal number
    bits = values.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + ((1 << (SHIFT - 1)) - 1) + ((size >> SHIFT) & 1)) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    small = _rounded(tl.abs(values) * STEPS).to(tl.int32)
    return tl.where(size < ((128 - BIAS) << 23), small, normal) | ((bits >> 24) & 0x80)


@triton.jit
def _from_e4m3(codes):
    """One place further left, the bits are those of fp16 of the value / 256."""
    bits = (codes.to(tl.int16) << 7) & -16385
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _encode(
    rows, error, codes, scales, num_blocks, per_row, numel,
    row_stride, error_stride, code_stride, scale_stride,
    KIND: tl.constexpr, BITS: tl.constexpr, HAS_ERROR: tl.constexpr,
    BLOCK: tl.constexpr, PADDED: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    row, at, width, exists, column = _place(num_blocks, per_row, numel, BLOCK, PADDED, COUNT)
    element = (at * BLOCK)[:, None] + column[None, :]
    is_value = exists[:, None] & (column[None, :] < width[:, None]) & (element < numel)
    values = tl.load(rows + row[:, None] * row_stride + element, mask=is_value, other=0.0).to(tl.float32)
    if HAS_ERROR:
        lost = error + row[:, None] * error_stride + element
        values += tl.load(lost, mask=is_value, other=0.0)
    is_bad = tl.max((values - values != 0.0).to(tl.int32), axis=1) > 0
    sent = values
    if KIND == 2:
        sent = _rotated(values, PADDED, COUNT)
    if KIND == 4:
        scale = tl.sum(tl.abs(sent), axis=1) / width.to(tl.float32)
        number = (sent.to(tl.int32, bitcast=True) >> 31) & 1
        arrived = tl.where(number != 0, -1.0, 1.0)
    else:
        largest = tl.max(tl.abs(sent), axis=1)
        if KIND == 3:
            scale = _power_of_two(largest / 448.0)
            factor = tl.minimum(1.0 / scale, 3e38)
            number = _to_float8(sent * factor[:, None], 3)
            arrived = _from_e4m3(number.to(tl.int8))
        else:
            steps: tl.constexpr = 127.0 if KIND == 0 else 7.0
            scale = largest / steps
            factor = tl.minimum(steps / largest, 3e38)
            arrived = _rounded(sent * factor[:, None])
            number = arrived.to(tl.int32)
    scale = tl.where(is_bad, float("nan"), scale)
    tl.store(scales + row * scale_stride + at, scale, mask=exists)
    if HAS_ERROR:
        arrived = arrived * scale[:, None]
        if KIND == 2:
            arrived = _rotated(arrived, PADDED, COUNT)
        tl.store(lost, tl.where(is_bad[:, None], 0.0, values - arrived), mask=is_value)
    per_byte: tl.constexpr = 8 // BITS
    byte = tl.arange(0, PADDED // per_byte)
    part = width // per_byte
    place = byte[None, :] + tl.zeros_like(part)[:, None]
    code = number
    if per_byte > 1:
        code = tl.gather(number, place.to(tl.int32), 1)
        for which in tl.static_range(1, per_byte):
            beyond = tl.minimum(place + which * part[:, None], PADDED - 1).to(tl.int32)
            code += tl.gather(number, beyond, 1) << (which * BITS)
    target = codes + row[:, None] * code_stride + (at * (BLOCK // per_byte))[:, None] + byte[None, :]
    tl.store(target, (code & 0xFF).to(tl.uint8), mask=exists[:, None] & (byte[None, :] < part[:, None]))


@triton.jit
def _decode(
    codes, scales, out, num_blocks, per_row, numel,
    code_stride, scale_stride, out_stride,
    KIND: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    row, at, width, exists, column = _place(num_blocks, per_row, numel, BLOCK, PADDED, COUNT)
    element = (at * BLOCK)[:, None] + column[None, :]
    is_value = exists[:, None] & (column[None, :] < width[:, None])
    per_byte: tl.constexpr = 8 // BITS
    part = (width // per_byte)[:, None]
    source = codes + row[:, None] * code_stride + (at * (BLOCK // per_byte))[:, None] + column[None, :] % part
    code = tl.load(source, mask=is_value, other=0).to(tl.int8, bitcast=True)
    which = column[None, :] // part
    if KIND == 3:
        values = _from_e4m3(code)
    elif KIND == 4:
        values = 1.0 - 2.0 * ((code.to(tl.int32) >> which) & 1).to(tl.float32)
    elif KIND == 0:
        values = code.to(tl.float32)
    else:
        wide = code.to(tl.int32)  # low + 16 * high, each from -7 to 7
        values = tl.where(which == 0, (wide << 28) >> 28, (wide + 8) >> 4).to(tl.float32)
    values *= tl.load(scales + row * scale_stride + at, mask=exists, other=0.0)[:, None]
    if KIND == 2:
        values = _rotated(tl.where(is_value, values, 0.0), PADDED, COUNT)
    target = out + row[:, None] * out_stride + element
    tl.store(target, values.to(out.dtype.element_ty), mask=is_value & (element < numel))

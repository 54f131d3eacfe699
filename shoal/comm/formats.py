"""Wire formats: how values are written with fewer bits while they are sent, and what the writing loses.

    name            bytes for each element     what is lost
    bf16, fp16      2                          mantissa; fp16: values over 65,504 become infinite
    fp8             1 + 4 / block              e4m3 with a power of two for each block: 3 bits of mantissa
    int8            1 + 4 / block              half of a step: the largest value of the block / 254
    int4            1/2 + 4 / block            the same / 14
    int4_hadamard   1/2 + 4 / block            the same, after a rotation that spreads outliers over 32 elements
    1bit            1/8 + 4 / block            all but the sign, and the mean of the magnitudes

Values are encoded by rows: one for each rank that gets another range. A block never crosses a row. A block with an
infinity or a NaN decodes to NaN alone, so that the norm of a gradient tells, as it does without a format.

With ``error`` (error feedback, 1-bit SGD: Seide et al. 2014) what earlier messages lost is added before the encoding,
and ``error`` is set to what this one loses.

Sources: blocks of int8 and int4, ZeRO++ (arXiv:2306.10209, section 3); the rotation, SDP4Bit (arXiv:2410.15526,
section 3.2); signs with the mean magnitude, arXiv:1901.09847.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch

from shoal.device import numel_at_once
from shoal.errors import ConfigError
from shoal.kernels.use import has_kernels, one_kernel

_CHUNK = 1 << 17  # elements that are encoded at once on a CPU
_ROTATED = 32  # elements that a rotation mixes
# Elements of a block, by bits. The codes of a byte are gathered from the whole block: for 1 bit ptxas takes 5 s at 512
# elements and a minute at 1,024, for 4 bits 20 s at 2,048 and all memory at 8,192.
_LARGEST_OF_KERNELS = {8: 8192, 4: 1024, 1: 512}
_MOST = 3e38  # of a factor, so that zeros times it are zeros


class WireFormat(Protocol):
    """An encoding of floating-point rows."""

    @property
    def name(self) -> str:
        """As in ``FORMATS``."""
        ...

    def __hash__(self) -> int: ...

    def encode(
        self, rows: torch.Tensor, error: torch.Tensor | None = None, parts: Sequence[torch.Tensor] | None = None
    ) -> Sequence[torch.Tensor]:
        """What to send for each row. Shapes: [rows, numel] -> of each part [rows, its numel].

        The numels and dtypes of the parts depend on the numel and dtype of a row alone.

        Args:
            error: fp32; added to ``rows``, then set to what is lost. Shape: that of ``rows``.
            parts: memory that the result is written to; None: memory of its own.
        """
        ...

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Write the values that ``parts`` encode to ``out``. Shape: [rows, numel], as they were encoded."""
        ...


@dataclass(frozen=True)
class Cast:
    """Another dtype: ``torch.bfloat16`` or ``torch.float16``."""

    dtype: torch.dtype

    @property
    def name(self) -> str:
        return "bf16" if self.dtype is torch.bfloat16 else "fp16"

    def encode(
        self, rows: torch.Tensor, error: torch.Tensor | None = None, parts: Sequence[torch.Tensor] | None = None
    ) -> Sequence[torch.Tensor]:
        parts = parts or (torch.empty_like(rows, dtype=self.dtype, memory_format=torch.contiguous_format),)
        if error is None:
            parts[0].copy_(rows)
            return parts
        step = max(numel_at_once(rows, _CHUNK) // max(len(rows), 1), 1)
        for sent, values, lost in zip(*(each.split(step, 1) for each in (parts[0], rows, error)), strict=True):
            sent.copy_(lost.add_(values))
            lost.sub_(sent).nan_to_num_(0.0, 0.0, 0.0)  # what is not finite loses nothing that can be sent later
        return parts

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        out.copy_(parts[0])


@dataclass(frozen=True)
class BlockFormat(ABC):
    """Codes of a few bits, with one fp32 scale for each block of a row.

    Args:
        block: elements that share a scale. The last block of a row may be shorter.
    """

    block: int = 256

    def __post_init__(self) -> None:
        if self.block < _ROTATED or self.block % _ROTATED:
            raise ConfigError(
                f"a wire format has blocks of {self.block} elements: not a multiple of {_ROTATED}.",
                do=f"use a multiple of {_ROTATED}, such as 256.",
                code="wire-block",
            )

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def bits(self) -> int:
        """Of a code."""

    @abstractmethod
    def quantize(self, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, scratch: torch.Tensor) -> None:
        """Write the codes and scales of blocks. Shapes: [..., numel] fp32 -> uint8 [..., bytes], [...].

        A block that is not finite has the scale NaN, and any codes.

        Args:
            scratch: memory to use up. Shape: that of ``values``.
        """

    @abstractmethod
    def dequantize(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Write the values of blocks to ``out``. Shapes: uint8 [..., bytes], [...] -> fp32 [..., numel]."""

    def encode(
        self, rows: torch.Tensor, error: torch.Tensor | None = None, parts: Sequence[torch.Tensor] | None = None
    ) -> Sequence[torch.Tensor]:
        num_rows, numel = rows.shape
        codes, scales = parts or (
            torch.empty(num_rows, self._code_bytes(numel), dtype=torch.uint8, device=rows.device),
            torch.empty(num_rows, -(-numel // self.block), dtype=torch.float32, device=rows.device),
        )
        if self._has_kernels(rows, codes):
            _kernels().encode(self.name, self.block, rows, error, codes, scales)
            return codes, scales
        with one_kernel():
            self._encode_pieces(rows, error, codes, scales)
        return codes, scales

    def _encode_pieces(
        self, rows: torch.Tensor, error: torch.Tensor | None, codes: torch.Tensor, scales: torch.Tensor
    ) -> None:
        # One for all pieces: fresh memory costs as much as a pass.
        scratch = torch.empty(self._most_of(rows), dtype=torch.float32, device=rows.device)
        for piece in self._pieces(rows):
            values = piece.of(rows).float()
            if error is not None:
                values = piece.of(error).add_(values)
            part, scale = piece.coded(codes, self.bits), piece.scaled(scales, self.block)
            arrived = scratch[: values.numel()].view(values.shape)
            self.quantize(values, part, scale, arrived)
            if error is not None:
                self.dequantize(part, scale, arrived)
                # What is not finite loses nothing that can be sent later.
                is_finite = (scale == scale).to(torch.int32).neg_()[..., None]  # all bits, or none
                values.sub_(arrived).view(torch.int32).bitwise_and_(is_finite)
                if piece.is_padded:
                    piece.put(error, values)

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        codes, scales = parts
        if self._has_kernels(out, codes):
            _kernels().decode(self.name, self.block, codes, scales, out)
            return
        with one_kernel():
            self._decode_pieces(codes, scales, out)

    def _decode_pieces(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        for piece in self._pieces(out):
            part, scale = piece.coded(codes, self.bits), piece.scaled(scales, self.block)
            is_direct = out.dtype is torch.float32 and not piece.is_padded
            values = piece.of(out) if is_direct else out.new_empty(*part.shape[:-1], piece.width, dtype=torch.float32)
            self.dequantize(part, scale, values)
            if not is_direct:
                piece.put(out, values)

    def _has_kernels(self, rows: torch.Tensor, codes: torch.Tensor) -> bool:
        """Of blocks that fit into a program, in rows whose elements follow each other."""
        return self.block <= _LARGEST_OF_KERNELS[self.bits] and rows.stride(-1) == 1 and has_kernels(rows, codes)

    def _code_bytes(self, numel: int) -> int:
        return -(-numel // _ROTATED) * _ROTATED * self.bits // 8

    def _most_of(self, rows: torch.Tensor) -> int:
        """The most elements of a piece, with padding."""
        num_rows, numel = rows.shape
        return max(min(numel_at_once(rows, _CHUNK), num_rows * numel), num_rows * self.block, self.block)

    def _pieces(self, rows: torch.Tensor) -> Iterator[_BlockRange]:
        """What is encoded at once: blocks of some rows; the last block of each row, where it is shorter."""
        num_rows, numel = rows.shape
        whole = numel // self.block * self.block
        chunk = numel_at_once(rows, _CHUNK)
        step = max(chunk // self.block, 1) * self.block
        for start in range(0, whole, step):
            stop = min(start + step, whole)
            count = max(chunk // (stop - start), 1)
            for row in range(0, num_rows, count):
                yield _BlockRange(row, min(row + count, num_rows), start, stop, self.block)
        if whole < numel:
            yield _BlockRange(0, num_rows, whole, numel, -(-(numel - whole) // _ROTATED) * _ROTATED)


@dataclass(frozen=True)
class _BlockRange:
    """Elements ``start`` to ``stop`` of some rows, in blocks of ``width`` elements; the last one is padded."""

    first: int
    last: int
    start: int
    stop: int
    width: int

    @property
    def is_padded(self) -> bool:
        return (self.stop - self.start) % self.width != 0

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """The elements: a view, or where they are padded a copy. Shape: [rows, blocks, width]."""
        values: torch.Tensor = rows[self.first : self.last, self.start : self.stop]
        if self.is_padded:
            values = torch.nn.functional.pad(values, (0, -(self.stop - self.start) % self.width))
        return _in_blocks(values, self.width)

    def put(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        rows[self.first : self.last, self.start : self.stop] = values.flatten(1)[:, : self.stop - self.start]

    def coded(self, codes: torch.Tensor, bits: int) -> torch.Tensor:
        padded = self.start + -(-(self.stop - self.start) // self.width) * self.width
        part = codes[self.first : self.last, self.start * bits // 8 : padded * bits // 8]
        return _in_blocks(part, self.width * bits // 8)

    def scaled(self, scales: torch.Tensor, block: int) -> torch.Tensor:
        return scales[self.first : self.last, self.start // block : -(-self.stop // block)]


@dataclass(frozen=True)
class Float8(BlockFormat):
    """``torch.float8_e4m3fn``; ``scale``: the smallest power of two with ``max |block| <= 448 * scale``.

    So numbers of two blocks lie on one grid, and products that take them in e4m3 round nothing again.
    """

    name = "fp8"
    bits = 8

    def quantize(self, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, scratch: torch.Tensor) -> None:
        factors = _scales_of(values, 448.0, scales, scratch, are_powers=True)
        codes.view(torch.float8_e4m3fn).copy_(torch.mul(values, factors, out=scratch))

    def dequantize(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        # torch's own conversion is 30 times slower on CPUs. The bits of e4m3, one place further left in those of fp16,
        # are the value / 256, since the exponent's bias there is 15 in place of 7.
        bits = codes.view(torch.int8).to(torch.int16).mul_(1 << 7).bitwise_and_(~(1 << 14))
        out.copy_(bits.view(torch.float16)).mul_((scales * 256.0)[..., None])


@dataclass(frozen=True)
class Int8(BlockFormat):
    """``value = scale * integer``, ``scale = max |block| / 127``."""

    name = "int8"
    bits = 8

    def quantize(self, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, scratch: torch.Tensor) -> None:
        factors = _scales_of(values, 127.0, scales, scratch)
        codes.view(torch.int8).copy_(torch.mul(values, factors, out=scratch).round_())

    def dequantize(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(codes.view(torch.int8)).mul_(scales[..., None])


@dataclass(frozen=True)
class Int4(BlockFormat):
    """``value = scale * integer``, ``scale = max |block| / 7``. A byte has an element of each half of the block.

    Args:
        is_rotated: each 32 elements are multiplied by a Hadamard matrix first.
    """

    is_rotated: bool = False

    bits = 4

    @property
    def name(self) -> str:
        return "int4_hadamard" if self.is_rotated else "int4"

    def quantize(self, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, scratch: torch.Tensor) -> None:
        if self.is_rotated:
            values = _rotated(values)
        factors = _scales_of(values, 7.0, scales, scratch)
        low, high = torch.mul(values, factors, out=scratch).round_().to(torch.int8).tensor_split(2, dim=-1)
        codes.view(torch.int8).copy_(torch.add(low, high, alpha=16))

    def dequantize(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        sums = codes.view(torch.int8)  # low + 16 * high, each from -7 to 7
        out.copy_(torch.cat([(sums << 4) >> 4, (sums + 8) >> 4], dim=-1)).mul_(scales[..., None])
        if self.is_rotated:
            out.copy_(_rotated(out))


@dataclass(frozen=True)
class OneBit(BlockFormat):
    """The sign of each element, times the mean magnitude of its block. A byte has an element of each eighth of it."""

    block: int = 512

    name = "1bit"
    bits = 1

    def quantize(self, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, scratch: torch.Tensor) -> None:
        torch.mean(torch.abs(values, out=scratch), dim=-1, out=scales)
        scales.add_(scales - scales)
        is_negative = (values.view(torch.int32) >> 31).unflatten(-1, (8, -1))  # -1 or 0
        places = is_negative[..., 0, :] & 1
        for place in range(1, 8):
            places |= is_negative[..., place, :] & (1 << place)
        codes.copy_(places)

    def dequantize(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        signed = codes.view(torch.int8)
        signs = torch.cat([signed << (7 - place) for place in range(8)], dim=-1)  # negative where the bit is set
        out.copy_((signs >> 7) | 1).mul_(scales[..., None])


def _kernels() -> Any:
    """Imported when the first values are encoded on a GPU: Triton takes a second."""
    from shoal.kernels import block_formats

    return block_formats


def power_of_two(numbers: torch.Tensor) -> torch.Tensor:
    """The smallest powers of two that are not smaller; 1 of 0. fp32; infinities and NaN are unchanged."""
    bits = (numbers.view(torch.int32) + 0x007FFFFF) & -0x00800000
    powers = torch.where(numbers.isfinite(), bits.view(torch.float32), numbers)
    return powers.masked_fill(numbers == 0, 1.0)


def _scales_of(
    values: torch.Tensor, largest: float, scales: torch.Tensor, scratch: torch.Tensor, *, are_powers: bool = False
) -> torch.Tensor:
    """Write the scale of each block: its largest magnitude over ``largest``. Returns: factors to codes. [..., 1].

    Args:
        scratch: memory to use up. Shape: that of ``values``.
        are_powers: scales are rounded up to powers of two.
    """
    torch.amax(torch.abs(values, out=scratch), dim=-1, out=scales)
    if are_powers:
        scales.copy_(power_of_two(scales.div(largest)))
        factors = scales.reciprocal().clamp_(max=_MOST)
    else:
        factors = scales.reciprocal().mul_(largest).clamp_(max=_MOST)
        scales.div_(largest)
    scales.add_(scales - scales)  # infinite: NaN
    return factors[..., None]


def _in_blocks(values: torch.Tensor, width: int) -> torch.Tensor:
    """The last dimension as blocks. Shape: [..., numel] -> [..., blocks, width]."""
    return values.view(*values.shape[:-1], values.shape[-1] // width, width)


@cache
def hadamard(size: int, device: torch.device) -> torch.Tensor:
    """The orthogonal Hadamard matrix, whose inverse is itself. Shape: [size, size], a power of two."""
    matrix = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / math.sqrt(size)).to(device)


def _rotated(values: torch.Tensor) -> torch.Tensor:
    """Each 32 elements multiplied by the Hadamard matrix: five rounds of sums and differences.

    The order of a matrix product depends on the processor, the number of rows and their address in memory.
    """
    columns = values.reshape(-1, _ROTATED).t().clone(memory_format=torch.contiguous_format)
    for distance in (1, 2, 4, 8, 16):
        a, b = columns.unflatten(0, (-1, 2, distance)).unbind(1)
        difference = a - b
        a.add_(b)
        b.copy_(difference)
    rows = columns.new_empty(columns.shape[1], _ROTATED)
    return torch.mul(columns.t(), 1 / math.sqrt(_ROTATED), out=rows).view(values.shape)


FORMATS: dict[str, Callable[[int | None], WireFormat]] = {
    "bf16": lambda _block: Cast(torch.bfloat16),
    "fp16": lambda _block: Cast(torch.float16),
    "fp8": lambda block: Float8(block or 256),
    "int8": lambda block: Int8(block or 256),
    "int4": lambda block: Int4(block or 256),
    "int4_hadamard": lambda block: Int4(block or 256, is_rotated=True),
    "1bit": lambda block: OneBit(block or 512),
}


def format_named(name: str, block: int | None = None) -> WireFormat:
    """The format of a name in ``FORMATS``.

    Raises: ConfigError: blocks that are no multiple of 32 elements.
    """
    return FORMATS[name](block)

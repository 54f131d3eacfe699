"""The formats of operands: numbers of 8 or 4 bits, and a scale for each block of a matrix.

    number   bits     largest   relative error     scale of a block
    e4m3     1+4+3    448       2^-4               a power of two: the smallest with max |block| <= scale * 448
    e5m2     1+5+2    57344     2^-3               a power of two, in the same way
    e2m1     1+2+1    6         2^-2               e4m3, times one fp32 number of the whole matrix

The relative error is that of numbers that are not subnormal: over 2^-15 (e4m3) or 2^-30 (e5m2) of the block's largest.
With scales that are powers of two, numbers of two scales lie on one grid, so that rounding twice is rounding once:
parameters that were gathered as fp8 have the codes that they have when they are gathered as they are.

An infinity or a NaN makes its block NaN. Operands have their rows along dim 0 and what a product sums over along dim 1.

Sources: e4m3 and e5m2, arXiv:2209.05433; scales rounded up to a power of two, arXiv:2506.08027, section 3; e2m1 with
two levels of scales and stochastic rounding, arXiv:2509.25149, sections 2 and 4.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional as F

from shoal.comm.formats import power_of_two
from shoal.device import is_fake
from shoal.kernels.use import has_kernels, one_kernel

_TILE = 128  # rows of a tile of scales of 8 bits, and elements of 4 of them

Block = tuple[int | None, int | None]  # rows and columns that share a scale; None: all of them


class Format(Protocol):
    """An encoding of matrices."""

    def values(self, matrix: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
        """The matrix rounded to the format, in fp32."""
        ...


@dataclass(frozen=True)
class ScaledFloat8:
    """``torch.float8_e4m3fn`` or ``torch.float8_e5m2`` with power-of-two scales."""

    dtype: torch.dtype
    block: Block

    def quantize(self, matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of the blocks. Shapes: [rows / r, r, columns / c, c], [rows / r, 1, columns / c, 1]."""
        blocks = _in_blocks(matrix.float(), self.block)
        scales = power_of_two(blocks.abs().amax((1, 3), keepdim=True) / torch.finfo(self.dtype).max)
        if self.block == (1, 32):
            scales = scales.clamp_min(torch.finfo(torch.float32).tiny)  # of what 8 bits stand for
        return (blocks / scales).to(self.dtype), scales

    def encode(self, matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes, [rows, columns], contiguous; and the scales of rows, or the one of the matrix: [rows] or [1].

        Several matrices, [matrices, rows, columns], have scales [matrices, rows] or [matrices].

        On a GPU in one pass after one that reads; compiled blocks have such a kernel of the compiler's.
        """
        if torch.compiler.is_compiling() or matrix.dtype is torch.float64 or not matrix.numel():
            return self.encode_by_operators(matrix)
        if has_kernels(matrix):
            from shoal.kernels import float8 as kernels

            codes = torch.empty(matrix.shape, dtype=self.dtype, device=matrix.device)
            shape = matrix.shape[:-1] if self.block[0] is not None else matrix.shape[:-2] or (1,)
            scales = torch.empty(shape, dtype=torch.float32, device=matrix.device)
            kernels.encode(matrix, codes, scales)
            return codes, scales
        if is_fake(matrix):
            with one_kernel():
                matrix.abs().amax()
        with one_kernel():
            return self.encode_by_operators(matrix)

    def encode_by_operators(self, matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What ``encode`` returns, by torch's operators."""
        if matrix.dim() == 3:  # a matrix with one scale counts as a row
            num_whole = 1 if self.block[0] is None else 2
            rows = ScaledFloat8(self.dtype, (1, None))
            codes, scales = rows.encode_by_operators(matrix.flatten(0, num_whole - 1).flatten(1))
            return codes.view(matrix.shape), scales.view(matrix.shape[:num_whole])
        codes, scales = self.quantize(matrix)
        return codes.reshape(matrix.shape).contiguous(), scales.flatten()

    def encode_blocks(self, matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes, [rows, columns], contiguous; and the scales of blocks as torch's operator takes them.

            block      dtype   scales
            1 x 128    fp32    [rows, columns / 128], those of a column adjacent
            128 x 128  fp32    [columns / 128 rounded up to 4, rows / 128], those of a column adjacent
            1 x 32     e8m0    flat: of each 128 rows and 4 scales [32, 4, 4], of rows r, r + 32, r + 64, r + 96

        Rows are multiples of the block's, columns of 128. On a GPU in one pass. Source: cuBLAS 13, "1D Block Scaling
        Factors Layout".
        """
        if not torch.compiler.is_compiling() and has_kernels(matrix) and matrix.dtype is not torch.float64:
            from shoal.kernels import float8 as kernels

            codes = torch.empty(matrix.shape, dtype=self.dtype, device=matrix.device)
            scales = self._empty_scales(matrix)
            kernels.encode_blocks(matrix, codes, scales, self.block)
            return codes, scales
        with one_kernel():
            blocks, of_blocks = self.quantize(matrix)
            codes, of_blocks = blocks.reshape(matrix.shape).contiguous(), of_blocks[:, 0, :, 0]
            if self.block == (1, 128):
                return codes, of_blocks.t().contiguous().t()
            if self.block == (128, 128):
                return codes, F.pad(of_blocks, (0, -of_blocks.shape[1] % 4)).contiguous().t()
            bits = (of_blocks.contiguous().view(torch.int32) >> 23).to(torch.uint8)  # the exponent, without a bias
            tiles = F.pad(bits, (0, 0, 0, -len(bits) % _TILE)).view(-1, 4, 32, bits.shape[1] // 4, 4)
            return codes, tiles.permute(0, 3, 2, 1, 4).flatten().view(torch.float8_e8m0fnu)

    def _empty_scales(self, matrix: torch.Tensor) -> torch.Tensor:
        num_rows, num_blocks = len(matrix), matrix.shape[1] // (self.block[1] or 1)
        if self.block == (1, 32):
            numel = -(-num_rows // _TILE) * _TILE * num_blocks
            return torch.empty(numel, dtype=torch.float8_e8m0fnu, device=matrix.device)
        if self.block == (128, 128):
            num_rows, num_blocks = num_rows // 128, -(-num_blocks // 4) * 4
            return torch.zeros(num_rows, num_blocks, dtype=torch.float32, device=matrix.device).t()
        return torch.empty(num_blocks, num_rows, dtype=torch.float32, device=matrix.device).t()

    def values(self, matrix: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        codes, scales = self.quantize(matrix)
        return _whole(codes.float() * scales, matrix)


@dataclass(frozen=True)
class ScaledFloat4:
    """e2m1 with scales of two levels.

    Args:
        is_stochastic: a number is rounded up with the probability of its distance from the one below.
    """

    block: Block
    is_stochastic: bool = False

    def values(self, matrix: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        blocks = _in_blocks(matrix.float(), self.block)
        largest = blocks.abs().amax((1, 3), keepdim=True)
        of_matrix = largest.amax() / (6.0 * 448.0)
        of_matrix = torch.where(of_matrix == 0, 1.0, of_matrix)
        scales = (largest / 6.0 / of_matrix).to(torch.float8_e4m3fn).float() * of_matrix
        scaled = torch.where(scales == 0, 0.0, blocks / scales).clamp(-6.0, 6.0)
        noise = None
        if self.is_stochastic:
            noise = torch.rand(scaled.shape, generator=generator, dtype=torch.float32, device=scaled.device)
        return _whole(round_to_e2m1(scaled, noise) * scales, matrix)


def round_to_e2m1(values: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
    """To 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives: the nearest, of two the even one.

    Args:
        values: from -6 to 6.
        noise: from 0 to 1, evenly distributed: rounded stochastically.
    """
    size = values.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    steps = (size / step).round() if noise is None else (size / step + noise).floor()
    return torch.copysign(steps * step, values)


def _in_blocks(matrix: torch.Tensor, block: Block) -> torch.Tensor:
    """Padded with zeros. Shape: [rows, columns] -> [rows / r, r, columns / c, c]."""
    sizes = [length if size is None else size for length, size in zip(matrix.shape, block, strict=True)]
    padding = [-length % size for length, size in zip(matrix.shape, sizes, strict=True)]
    if any(padding):
        matrix = F.pad(matrix, (0, padding[1], 0, padding[0]))
    blocks: torch.Tensor = matrix.unflatten(1, (-1, sizes[1])).unflatten(0, (-1, sizes[0]))
    return blocks


def _whole(blocks: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Without the padding. Shape: [rows / r, r, columns / c, c] -> that of ``matrix``."""
    return blocks.flatten(2).flatten(0, 1)[: matrix.shape[0], : matrix.shape[1]]

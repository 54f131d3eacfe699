"""The recipes: in which formats each product of a linear layer takes its operands, as data.

    recipe                 x, W                     dy                         dy^T x takes
    tensorwise             e4m3, a matrix           e5m2, a matrix             as the others
    rowwise                e4m3, a row              e4m3, a row                as the others
    rowwise_with_gw_hp     e4m3, a row              e4m3, a row                the compute dtype; dy W: W by matrix
    blockwise              e4m3, x 1x128, W 128x128 e4m3, 1x128                1x128
    mxfp8                  e4m3, 1x32               e4m3, 1x32                 1x32
    nvfp4                  e2m1, x 1x16, W 16x16    e2m1, 1x16, stochastic     1x16, both rotated

"A row", 1x128 and the like are along what the product sums over. A scale is that of the values which are multiplied,
not of earlier ones. Sums are fp32.

Sources: tensorwise and rowwise, torchao.float8; blockwise, DeepSeek-V3, section 3.3 (arXiv:2412.19437); mxfp8, OCP
Microscaling Formats 1.0 and arXiv:2506.08027; nvfp4, arXiv:2509.25149, section 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.parallel.low_precision.formats import Format, ScaledFloat4, ScaledFloat8

Pair = tuple[Format, Format]

_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_TENSOR, _ROW = ScaledFloat8(_E4M3, (None, None)), ScaledFloat8(_E4M3, (1, None))
_GRADIENT = ScaledFloat8(_E5M2, (None, None))
_TILE, _SQUARE, _MX = ScaledFloat8(_E4M3, (1, 128)), ScaledFloat8(_E4M3, (128, 128)), ScaledFloat8(_E4M3, (1, 32))
_FP4, _FP4_SQUARE, _FP4_GRADIENT = (
    ScaledFloat4((1, 16)),
    ScaledFloat4((16, 16)),
    ScaledFloat4((1, 16), is_stochastic=True),
)


@dataclass(frozen=True)
class Recipe:
    """The formats of the operands of each product; None: it is computed in the compute dtype.

    Args:
        is_rotated: each 16 tokens of both operands of ``of_weight`` are mixed by a random Hadamard matrix first.
    """

    output: Pair | None
    of_input: Pair | None
    of_weight: Pair | None
    is_rotated: bool = False


RECIPES: dict[str, Recipe] = {
    "tensorwise": Recipe((_TENSOR, _TENSOR), (_GRADIENT, _TENSOR), (_GRADIENT, _TENSOR)),
    "rowwise": Recipe((_ROW, _ROW), (_ROW, _ROW), (_ROW, _ROW)),
    "rowwise_with_gw_hp": Recipe((_ROW, _ROW), (_ROW, _TENSOR), None),
    "blockwise": Recipe((_TILE, _SQUARE), (_TILE, _SQUARE), (_TILE, _TILE)),
    "mxfp8": Recipe((_MX, _MX), (_MX, _MX), (_MX, _MX)),
    "nvfp4": Recipe((_FP4, _FP4_SQUARE), (_FP4_GRADIENT, _FP4_SQUARE), (_FP4_GRADIENT, _FP4), is_rotated=True),
}

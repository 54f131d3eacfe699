"""Adam and AdamW of a range of main parameters, in one pass over memory.

    gradient (bf16, fp16 or fp32) * scale \\
    main parameters, two moments (fp32)    > all three updated in place; the main parameters rounded to the parameters

    reads     12 bytes an element, and the gradient's 2 or 4
    writes    12 bytes, and the parameters' 2 or 4 where they are another tensor than the main parameters

Sums and products are rounded one by one (no fused multiply-add), so bits do not depend on the compiler. Each program
computes the bias corrections from the count of steps, in fp64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_BLOCK = 1024  # elements of a program


def adam(
    main: torch.Tensor,
    moments: Sequence[torch.Tensor],
    gradient: torch.Tensor,
    parameter: torch.Tensor | None,
    count: torch.Tensor,
    *,
    gradient_scale: float,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    is_decoupled: bool,
    is_corrected: bool,
) -> None:
    """Update ``main`` and ``moments`` in place, and round ``main`` to ``parameter``. All 1-D, of one length.

    Args:
        count: of steps, this one included, on the device. Shape: [].
        gradient_scale: the gradient is multiplied by it, in fp32.
        is_corrected: False: moments are taken without bias corrections.
    """
    _adam[(triton.cdiv(main.numel(), _BLOCK),)](
        main, *moments, gradient, main if parameter is None else parameter, count, main.numel(), gradient_scale,
        1 - lr * weight_decay if is_decoupled else weight_decay, 1 - betas[0], betas[1], 1 - betas[1], eps, lr, *betas,
        IS_DECOUPLED=is_decoupled, IS_CORRECTED=is_corrected, HAS_PARAMETER=parameter is not None, BLOCK=_BLOCK,
        enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _power(beta, count):
    """``beta`` to the power of a number in memory, in fp64."""
    power, square = tl.full([], 1.0, tl.float64), tl.full([], 1.0, tl.float64) * beta
    left = tl.load(count).to(tl.int32)
    while left > 0:
        power = tl.where(left % 2 == 1, power * square, power)
        square = square * square
        left = left // 2
    return power


@triton.jit
def _adam(
    main, average, square, gradient, parameter, count, numel, gradient_scale,
    decay, weight1, beta2, weight2, eps, lr: tl.float64, power1: tl.float64, power2: tl.float64,
    IS_DECOUPLED: tl.constexpr, IS_CORRECTED: tl.constexpr, HAS_PARAMETER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = at < numel
    values = tl.load(main + at, mask=exists, other=0.0)
    grad = tl.load(gradient + at, mask=exists, other=0.0).to(tl.float32) * gradient_scale
    if IS_DECOUPLED:
        values = values * decay
    else:
        grad = grad + values * decay
    first = tl.load(average + at, mask=exists, other=0.0)
    first = first + weight1 * (grad - first)
    second = tl.load(square + at, mask=exists, other=0.0)
    second = second * beta2 + weight2 * grad * grad
    rate, root = tl.full([], 1.0, tl.float64) * lr, tl.full([], 1.0, tl.float64)
    if IS_CORRECTED:
        rate = rate / (1.0 - _power(power1, count))
        root = tl.sqrt(1.0 - _power(power2, count))
    divisor = tl.div_rn(tl.sqrt_rn(second), root.to(tl.float32)) + eps
    values = values - tl.div_rn(rate.to(tl.float32) * first, divisor)
    tl.store(average + at, first, mask=exists)
    tl.store(square + at, second, mask=exists)
    tl.store(main + at, values, mask=exists)
    if HAS_PARAMETER:
        tl.store(parameter + at, values.to(parameter.dtype.element_ty), mask=exists)

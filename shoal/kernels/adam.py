"""Adam and AdamW of a range of main parameters, in one pass over memory.

    gradient (bf16, fp16 or fp32) * scale \\
    main parameters, two moments (fp32)    > all three updated in place; the main parameters rounded to the parameters

    reads     12 bytes an element, and the gradient's 2 or 4
    writes    12 bytes, and the parameters' 2 or 4 where they are another tensor than the main parameters

Sums and products are rounded one by one (no fused multiply-add), so bits do not depend on the compiler.
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
    corrections: torch.Tensor,
    *,
    gradient_scale: float,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    is_decoupled: bool,
) -> None:
    """Update ``main`` and ``moments`` in place, and round ``main`` to ``parameter``. All 1-D, of one length.

    Args:
        corrections: the learning rate over the first moment's bias correction; the root of the second's. Shape: [2].
        gradient_scale: the gradient is multiplied by it, in fp32.
    """
    _adam[(triton.cdiv(main.numel(), _BLOCK),)](
        main, *moments, gradient, main if parameter is None else parameter, corrections, main.numel(), gradient_scale,
        1 - lr * weight_decay if is_decoupled else weight_decay, 1 - betas[0], betas[1], 1 - betas[1], eps,
        IS_DECOUPLED=is_decoupled, HAS_PARAMETER=parameter is not None, BLOCK=_BLOCK, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _adam(
    main, average, square, gradient, parameter, corrections, numel, gradient_scale,
    decay, weight1, beta2, weight2, eps,
    IS_DECOUPLED: tl.constexpr, HAS_PARAMETER: tl.constexpr, BLOCK: tl.constexpr,
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
    divisor = tl.div_rn(tl.sqrt_rn(second), tl.load(corrections + 1)) + eps
    values = values - tl.div_rn(tl.load(corrections) * first, divisor)
    tl.store(average + at, first, mask=exists)
    tl.store(square + at, second, mask=exists)
    tl.store(main + at, values, mask=exists)
    if HAS_PARAMETER:
        tl.store(parameter + at, values.to(parameter.dtype.element_ty), mask=exists)

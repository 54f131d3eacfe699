"""Cross-entropy of logits, and its gradient in their place.

    loss       logsumexp(logits) - logits[target]    0 of ignored tokens
    logits     exp(logits - logsumexp) - one-hot     in their dtype, computed in fp32

    reads      an element twice: once from memory where the rows that run at the same time fit the cache
    writes     it once

A program has a row. Source: online softmax (Milakov and Gimelshein, arXiv:1805.02867).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096  # elements of a row that a program has at a time


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor, ignore_index: int) -> None:
    """Fill ``losses``, and put the gradient in the place of the logits. Of ignored tokens it is any numbers.

    Args:
        logits: [T, V], the elements of a row following each other.
        targets: [T], int64; one that is not in the vocabulary has the loss NaN.
        losses: [T], fp32.
    """
    block = min(triton.next_power_of_2(logits.shape[1]), _BLOCK)
    _cross_entropy[(logits.shape[0],)](
        logits, targets, losses, logits.shape[1], logits.stride(0), targets.stride(0), ignore_index,
        BLOCK=block, num_warps=8,
    )  # fmt: skip


@triton.jit
def _cross_entropy(logits, targets, losses, width, stride, target_stride, ignored, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row * target_stride)
    start = logits + row * stride
    is_known = (target >= 0) & (target < width)
    # All warps read it, and one of them overwrites it below: the reductions between are barriers.
    at_target = tl.load(start + target, mask=is_known, other=float("nan")).to(tl.float32)
    column = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], -3e38, tl.float32)  # finite, so that a difference of two is a number
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        values = tl.load(start + first + column, mask=first + column < width, other=float("-inf")).to(tl.float32)
        above = tl.maximum(largest, values)
        total = total * tl.exp(largest - above) + tl.exp(values - above)
        largest = above
    top = tl.max(largest, axis=0)
    log_sum = top + tl.log(tl.sum(total * tl.exp(largest - top), axis=0))
    tl.store(losses + row, tl.where(target == ignored, 0.0, log_sum - at_target))
    for first in range(0, width, BLOCK):
        place = first + column
        values = tl.load(start + place, mask=place < width, other=0.0).to(tl.float32)
        gradient = tl.exp(values - log_sum) - (place == target).to(tl.float32)
        tl.store(start + place, gradient.to(logits.dtype.element_ty), mask=place < width)

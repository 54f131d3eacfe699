"""Rounding to bf16 up or down at random, so that the mean of the rounded values is the value.

    x = 1 + 1/512, between 1 and 1 + 1/128:  to 1 in three cases of four, to 1 + 1/128 in one

Rounding to the nearest value loses an update that is less than half of the last bit, each time. Here it is made with a
probability of its share of that bit.

The random bits are a hash of the step, the parameter's name and the element's index in it: they are the same on every
rank that has the element, in every layout, and after a resume.

Source: Zamirai et al., Revisiting BFloat16 Training (arXiv:2010.06192).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import torch

from shoal.device import numel_at_once
from shoal.sharding.layout import ParameterSpec, Segment

_CHUNK = 1 << 15  # elements that are rounded at once on a CPU


@torch.no_grad()
def round_stochastically(
    source: torch.Tensor,
    target: torch.Tensor,
    segments: Iterable[Segment],
    specs: Sequence[ParameterSpec],
    step_number: int,
) -> None:
    """Round the parameters of a range. Shapes: [numel], fp32 and bf16. Between the parameters nothing is written."""
    chunk = numel_at_once(source, _CHUNK)
    for segment in segments:
        seed = zlib.crc32(f"{step_number} {specs[segment.slot].name}".encode())
        for low in range(segment.start, segment.stop, chunk):
            high = min(low + chunk, segment.stop)
            bits = _random_16_bits(seed + segment.offset + low - segment.start, high - low, source.device)
            bits.add_(source[low:high].view(torch.int32)).bitwise_and_(-(1 << 16))
            target[low:high].copy_(bits.view(torch.float32))


def _random_16_bits(begin: int, numel: int, device: torch.device) -> torch.Tensor:
    """The hash of ``begin``, ``begin + 1``, ..., modulo 2**32. Source: C. Wellons, hash-prospector (lowbias32)."""
    bits = torch.arange(numel, dtype=torch.int32, device=device).add_(_signed(begin))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits.bitwise_xor_(bits >> shift).mul_(_signed(factor))
    return bits.bitwise_xor_(bits >> 16).bitwise_and_((1 << 16) - 1)


def _signed(number: int) -> int:
    """The int32 with the same lowest 32 bits."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)

"""Wire formats: how the values of an all_gather or a reduce_scatter are encoded while they are sent.

    format = Int8Blocks()
    comm.all_gather(full, shard, label="layer 3", wire=format)

    all_gather       encode(shard) ---all_gather---> decode each rank's part into its range of full
    reduce_scatter   encode(each range) --all_to_all--> decode every rank's values of this range to fp32, sum in order

A format encodes a tensor as several tensors (values, and for example scales beside them). Their bytes are packed into
one message a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class WireFormat(Protocol):
    """An encoding of floating-point tensors."""

    def encode(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """1-D tensors to send. Their numels and dtypes depend on numel and dtype of ``tensor`` alone."""
        ...

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Write the values that ``parts`` encode to ``out``, which has the numel of the tensor that was encoded."""
        ...


@dataclass(frozen=True)
class Int8Blocks:
    """8-bit integers with one fp32 scale a block: ``value = scale * integer``, ``scale = max |block| / 127``.

    The error of a value is at most half the scale of its block. A block with an infinity or a NaN decodes to NaN.

    Args:
        block: elements that share a scale. Sends ``1 + 4 / block`` bytes an element.
    """

    block: int = 256

    def encode(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        blocks = self._in_blocks(tensor.float())
        scales = blocks.abs().amax(dim=1) / 127.0
        # A block of zeros has scale 0; any divisor gives zeros. A NaN or infinite scale marks its whole block.
        divisors = torch.where((scales > 0) & scales.isfinite(), scales, 1.0)
        integers = (blocks / divisors[:, None]).nan_to_num(0.0, 127.0, -127.0).round_().clamp_(-127, 127).to(torch.int8)
        return integers.flatten()[: tensor.numel()], scales

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        integers, scales = parts
        scales = torch.where(scales.isfinite(), scales, torch.nan)
        values = self._in_blocks(integers.float()) * scales[:, None]
        out.copy_(values.flatten()[: out.numel()])

    def _in_blocks(self, tensor: torch.Tensor) -> torch.Tensor:
        padding = -tensor.numel() % self.block
        return torch.nn.functional.pad(tensor, (0, padding)).view(-1, self.block)

"""Wire formats: how the values of an all_gather or a reduce_scatter are encoded while they are sent.

    format = Int8Blocks()
    comm.all_gather(full, shard, label="layer 3", wire=format)

    all_gather       encode(shard) ---all_gather---> decode each rank's part into its range of full
    reduce_scatter   encode(each range) --all_to_all--> decode every rank's values of this range to fp32, sum in order

A format encodes a tensor as several tensors (values, and for example their scales). Their bytes are packed into
one message a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from shoal.comm.sums import RankOrderedSum

_ALIGNMENT = 16  # bytes, so that a part can be viewed in its dtype

Empty = Callable[[int, torch.dtype, torch.device], torch.Tensor]  # memory that is sent from without a copy
Encoded = tuple[torch.Tensor, torch.Tensor, Callable[[torch.Tensor], None]]


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


def encoded_gather(wire: WireFormat, shard: torch.Tensor, full: torch.Tensor, size: int, empty: Empty) -> Encoded:
    """What an all_gather of ``shard`` sends, where it receives, and what writes the received values to ``full``."""
    with torch.no_grad():
        parts = wire.encode(shard)
        layout = _Layout(parts)
        message = layout.pack([parts], empty)
    received = torch.empty(size * layout.nbytes, dtype=torch.uint8, device=full.device)

    def decode(received: torch.Tensor) -> None:
        for rank, values in enumerate(full.tensor_split(size)):
            wire.decode(layout.parts(received, rank), values)

    return message, received, decode


def encoded_scatter(
    wire: WireFormat,
    ranges: Sequence[torch.Tensor],
    out: torch.Tensor,
    empty: Empty,
    *,
    scale: float,
    accumulate: bool,
) -> Encoded:
    """What an all_to_all sends for a reduce_scatter of ``ranges``, where it receives, what sums this into ``out``."""
    size = len(ranges)
    with torch.no_grad():
        encoded = [wire.encode(each) for each in ranges]
        layout = _Layout(encoded[0])
        message = layout.pack(encoded, empty)

    def decode(received: torch.Tensor) -> None:
        decoded = [torch.empty(out.numel(), dtype=torch.float32, device=out.device) for _ in range(size)]
        for rank, values in enumerate(decoded):
            wire.decode(layout.parts(received, rank), values)
        RankOrderedSum()(decoded, out, scale=scale, accumulate=accumulate)

    return message, torch.empty_like(message), decode


class _Layout:
    """Where each part lies in the bytes of one encoded range: one after the other, aligned."""

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self._fields: list[tuple[int, int, torch.dtype]] = []  # offset and bytes, dtype
        self.nbytes = 0
        for part in parts:
            self._fields.append((self.nbytes, part.nbytes, part.dtype))
            self.nbytes += -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT

    def pack(self, encoded: Sequence[Sequence[torch.Tensor]], empty: Empty) -> torch.Tensor:
        """The bytes of every range of ``encoded``, one after the other."""
        message = empty(len(encoded) * self.nbytes, torch.uint8, encoded[0][0].device)
        for index, parts in enumerate(encoded):
            for target, part in zip(self.parts(message, index), parts, strict=True):
                target.copy_(part)
        return message

    def parts(self, message: torch.Tensor, index: int) -> list[torch.Tensor]:
        """The parts of range ``index`` as views of ``message``."""
        start = index * self.nbytes
        return [message[start + offset : start + offset + size].view(dtype) for offset, size, dtype in self._fields]

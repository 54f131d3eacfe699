"""Collectives of encoded values: what is sent, and what is done with what is received.

    comm.all_gather(full, shard, label="layer 3", wire=Wire(Int8()))

    all_gather       encode(shard) ---all_gather---> decode each rank's part into its range of full
    reduce_scatter   encode(each range) --all_to_all--> decode every rank's values of this range to fp32, sum in order
    all_reduce       a reduce_scatter into this rank's range, then an all_gather of it

A format (``formats``) encodes a tensor as several tensors (codes, and for example their scales). Their bytes are packed
into one message a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

import torch

from shoal.comm.formats import WireFormat

_ALIGNMENT = 16  # bytes, so that a part can be viewed in its dtype

Empty = Callable[[int, torch.dtype, torch.device], torch.Tensor]  # memory that is sent from without a copy
Encoded = tuple[torch.Tensor, torch.Tensor, Callable[[torch.Tensor], None]]


@dataclass(frozen=True)
class Wire:
    """How one collective encodes what it sends.

    Args:
        format: inside a node, and between nodes where ``between`` is None.
        between: between nodes, of an axis in two levels.
        base: an all_gather sends how the shards differ from the values that every rank has: ``full`` has those of the
            other ranks' ranges, ``base`` those of this rank's. The differences are added (SDP4Bit, arXiv:2410.15526,
            section 3.1). What a format loses then is part of the next difference. Shape: that of the shard.
        error: fp32, of what a reduction encodes first: added before, and set to what is lost. Shape: that of ``full``.
        second_error: the same of what an all_reduce encodes after the sum. Shape: [this rank's range].
        error_decay: the new error is ``error_decay * error + (1 - error_decay) * lost`` (LoCo, arXiv:2407.04480).
    """

    format: WireFormat
    between: WireFormat | None = None
    base: torch.Tensor | None = None
    error: torch.Tensor | None = None
    second_error: torch.Tensor | None = None
    error_decay: float = 0.0

    def encode(self, rows: torch.Tensor, empty: Empty) -> tuple[torch.Tensor, Layout]:
        """The bytes of rows in ``format``, with the error fed back, one after the other. Shape: [rows, numel]."""
        layout = layout_of(self.format, rows.shape[1], rows.dtype, rows.device)
        message = empty(len(rows) * layout.nbytes, torch.uint8, rows.device)
        parts = layout.parts(message, len(rows))
        error = None if self.error is None else self.error.view(rows.shape)
        before = error.clone() if error is not None and self.error_decay else None
        self.format.encode(rows, error, parts)
        if error is not None and before is not None:
            error.lerp_(before, self.error_decay)
        return message, layout

    @contextmanager
    def padded(self, numel: int) -> Iterator[Wire]:
        """The same for ``numel`` elements, of which the error has the first ones; inside the block they are encoded."""
        error = self.error
        if error is None or error.numel() == numel:
            yield self
            return
        padded = torch.nn.functional.pad(error, (0, numel - error.numel()))
        yield replace(self, error=padded)
        error.copy_(padded[: error.numel()])

    def of_sum(self) -> Wire:
        """For what an all_reduce sends after the sum."""
        return replace(self, error=self.second_error, second_error=None)


def encoded_gather(wire: Wire, shard: torch.Tensor, full: torch.Tensor, rank: int, size: int, empty: Empty) -> Encoded:
    """What an all_gather of ``shard`` sends, where it receives, and what writes the received values to ``full``."""
    rows = full.view(size, -1)
    with torch.no_grad():
        message, layout = wire.encode(shard[None] if wire.base is None else shard[None].float() - wire.base, empty)
        if wire.base is not None:
            rows[rank].copy_(wire.base)
    received = torch.empty(size * layout.nbytes, dtype=torch.uint8, device=full.device)

    def decode(received: torch.Tensor) -> None:
        parts = layout.parts(received, size)
        if wire.base is None:
            wire.format.decode(parts, rows)
            return
        changes = torch.empty_like(rows, dtype=torch.float32)
        wire.format.decode(parts, changes)
        rows.add_(changes)

    return message, received, decode


def encoded_scatter(wire: Wire, rows: torch.Tensor, empty: Empty) -> tuple[torch.Tensor, torch.Tensor, Layout]:
    """What an all_to_all sends for a reduce_scatter, where it receives, and how the received bytes are laid out.

    Args:
        rows: what each rank gets. Shape: [ranks, numel].
    """
    with torch.no_grad():
        message, layout = wire.encode(rows, empty)
    return message, torch.empty_like(message), layout


def decoded_sum(
    format: WireFormat, parts: Sequence[torch.Tensor], out: torch.Tensor, *, scale: float, accumulate: bool
) -> None:
    """Decode every rank's values to fp32, and write their sum in rank order, times ``scale``, to ``out``.

    Args:
        parts: of each part of the encoding [ranks, its numel].
        out: 1-D; with ``accumulate`` the sum is added.
    """
    total = torch.empty(1, out.numel(), dtype=torch.float32, device=out.device)
    format.decode([part[:1] for part in parts], total)
    values = torch.empty_like(total) if len(parts[0]) > 1 else total
    for rank in range(1, len(parts[0])):
        format.decode([part[rank : rank + 1] for part in parts], values)
        total.add_(values)
    if scale != 1.0:
        total.mul_(scale)
    if accumulate:
        total.add_(out)
    out.copy_(total[0])


class RowBytes:
    """Rows of one numel, each encoded by itself to the same number of bytes: any of them may go to any rank.

    Args:
        numel, dtype: of a row.
    """

    def __init__(self, format: WireFormat, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._wire = Wire(format)
        self._layout = layout_of(format, numel, dtype, device)

    @property
    def nbytes(self) -> int:
        """Of a row."""
        return self._layout.nbytes

    @torch.no_grad()
    def encode(self, rows: torch.Tensor, empty: Empty) -> torch.Tensor:
        """Shape: [rows, numel] -> uint8 [rows, nbytes]."""
        return self._wire.encode(rows, empty)[0].view(len(rows), self.nbytes)

    @torch.no_grad()
    def decode(self, received: torch.Tensor, out: torch.Tensor) -> None:
        """Write the values to ``out``. Shape: uint8 [rows, nbytes], [rows, numel]."""
        self._wire.format.decode(self._layout.parts(received.view(-1), len(out)), out)


class Layout:
    """Where each part lies in the bytes of one encoded row: one after the other, aligned."""

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self._fields: list[tuple[int, int, torch.dtype]] = []  # offset and bytes, dtype
        self.nbytes = 0
        for part in parts:
            nbytes = part.shape[1] * part.itemsize
            self._fields.append((self.nbytes, nbytes, part.dtype))
            self.nbytes += -(-nbytes // _ALIGNMENT) * _ALIGNMENT

    def parts(self, message: torch.Tensor, num_rows: int) -> list[torch.Tensor]:
        """The parts of all rows as views of ``message``. Shape of each: [rows, numel]."""
        rows = message.view(num_rows, self.nbytes)
        return [rows[:, offset : offset + size].view(dtype) for offset, size, dtype in self._fields]


@cache
def layout_of(format: WireFormat, numel: int, dtype: torch.dtype, device: torch.device) -> Layout:
    """Of rows of one numel and dtype."""
    return Layout(format.encode(torch.empty(0, numel, dtype=dtype, device=device)))

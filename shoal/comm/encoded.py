"""all_gather and reduce_scatter in a wire format, from the plain collectives of any backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shoal.comm.finished import check_divides, own_range
from shoal.comm.protocol import Backend, Work
from shoal.comm.sums import RankOrderedSum
from shoal.comm.wire import WireFormat

_ALIGNMENT = 16  # bytes, so that a part can be viewed in its dtype


class EncodedWork:
    """A collective of encoded values, and the decoding once they are there."""

    __slots__ = ("_decode", "_result", "_work")

    def __init__(self, work: Work, decode: Callable[[torch.Tensor], None], result: torch.Tensor) -> None:
        self._work = work
        self._decode: Callable[[torch.Tensor], None] | None = decode
        self._result = result

    def wait(self) -> torch.Tensor:
        if self._decode is not None:
            received = self._work.wait()
            with torch.no_grad():
                self._decode(received)
            self._decode = None
        return self._result

    def drain(self) -> None:
        self.wait()
        self._work.drain()


def all_gather_encoded(
    comm: Backend, full: torch.Tensor, shard: torch.Tensor | None, wire: WireFormat, *, label: str
) -> EncodedWork:
    """See ``Communicator.all_gather``.

    Memory: the encoded bytes of ``full`` until ``wait()``.
    """
    check_divides("all_gather", full, shard, comm.size, label=label)
    own = own_range(full, comm.rank, comm.size)
    with torch.no_grad():
        parts = wire.encode(own if shard is None else shard)
        layout = _Layout(parts)
        message = layout.pack(comm, [parts])
    received = torch.empty(comm.size * layout.nbytes, dtype=torch.uint8, device=full.device)

    def decode(received: torch.Tensor) -> None:
        for rank in range(comm.size):
            wire.decode(layout.parts(received, rank), own_range(full, rank, comm.size))

    return EncodedWork(comm.all_gather(received, message, label=label), decode, full)


def reduce_scatter_encoded(
    comm: Backend,
    full: torch.Tensor,
    out: torch.Tensor,
    wire: WireFormat,
    *,
    scale: float,
    accumulate: bool,
    label: str,
) -> EncodedWork:
    """See ``Communicator.reduce_scatter``.

    Memory: the encoded bytes of ``full`` twice until ``wait()``, and there this rank's range in fp32 of every rank.
    """
    check_divides("reduce_scatter", full, out, comm.size, label=label)
    with torch.no_grad():
        encoded = [wire.encode(own_range(full, rank, comm.size)) for rank in range(comm.size)]
        layout = _Layout(encoded[0])
        message = layout.pack(comm, encoded)
    received = torch.empty_like(message)

    def decode(received: torch.Tensor) -> None:
        ranges = [torch.empty(out.numel(), dtype=torch.float32, device=out.device) for _ in range(comm.size)]
        for rank, values in enumerate(ranges):
            wire.decode(layout.parts(received, rank), values)
        RankOrderedSum()(ranges, out, scale=scale, accumulate=accumulate)

    return EncodedWork(comm.all_to_all(received, message, label=label), decode, out)


class _Layout:
    """Where each part lies in the bytes of one encoded range: one after the other, aligned."""

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self._fields: list[tuple[int, int, torch.dtype]] = []  # offset and bytes, dtype
        self.nbytes = 0
        for part in parts:
            self._fields.append((self.nbytes, part.nbytes, part.dtype))
            self.nbytes += -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT

    def pack(self, comm: Backend, encoded: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """The bytes of every range of ``encoded``, in memory that ``comm`` sends from without a copy."""
        device = encoded[0][0].device
        message = comm.empty(len(encoded) * self.nbytes, torch.uint8, device)
        for index, parts in enumerate(encoded):
            for target, part in zip(self.parts(message, index), parts, strict=True):
                target.copy_(part)
        return message

    def parts(self, message: torch.Tensor, index: int) -> list[torch.Tensor]:
        """The parts of range ``index`` as views of ``message``."""
        start = index * self.nbytes
        return [message[start + offset : start + offset + size].view(dtype) for offset, size, dtype in self._fields]

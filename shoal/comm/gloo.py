"""Collectives over Gloo's sends and receives: every rank sends each peer its range and sums in rank order.

Gloo's own reduce_scatter and all_gather are several times slower than this exchange, and the order of their sums
depends on the algorithm.

Every message has a header, so that ranks that issue different calls get an error that names both. all_reduce has two
rounds, and the second is sent from ``wait()``. So a rank that waits for a later call does the first rounds of all
earlier ones, on every axis, before it blocks: no two ranks wait for each other.

    tag (30 bits)                          of
    4 * number                             the header of a collective
    4 * checksum(number, call) + 1 or 2    its data, first and second round
    8 * number + 3                         the header of a send
    8 * checksum(number, call) + 7         its data
"""

from __future__ import annotations

import contextlib
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shoal.comm.failure import FailureReports, FirstError
from shoal.comm.finished import (
    check_both_splits,
    check_divides,
    check_peer,
    gather_json,
    own_range,
    split_mismatch,
    split_parts,
)
from shoal.comm.protocol import Work
from shoal.comm.sums import RankOrderedSum, is_same_memory
from shoal.comm.waiting import WaitWatch
from shoal.errors import CommError

_TAG_MASK = (1 << 28) - 1  # with two more bits, tags stay positive 32-bit numbers
_FAREWELL = timedelta(seconds=5)  # for which close() waits until peers have received the last sends
_OPEN_SENDS = 64  # finished works whose sends may still be under way before the oldest is waited for
_TEXT_BYTES = 160
_INLINE_BYTES = 352  # of a small vector, which is sent in the header
_HEADER_BYTES = _TEXT_BYTES + _INLINE_BYTES


class GlooPending:
    """The works of one rank that have a second round to send, over all axes, in the order of issue."""

    def __init__(self, first_error: FirstError) -> None:
        self.works: dict[GlooWork, None] = {}
        self.first_error = first_error
        self.watch = WaitWatch()

    def send_until(self, waited: GlooWork) -> None:
        """Do the first round of every work up to ``waited``."""
        if waited in self.works:
            for work in list(self.works):
                work.do_first()
                if work is waited:
                    return


class GlooWork:
    """One call: its receives and sends under way, and what to do when they have arrived."""

    __slots__ = (
        "_check_header", "_comm", "_first", "_is_finished", "_last", "_received", "_result", "data_tag", "header_tag",
        "headers", "sends", "what",
    )  # fmt: skip

    def __init__(self, comm: GlooCommunicator, what: str, number: int, result: torch.Tensor, is_send: bool) -> None:
        self._comm = comm
        self.what = what
        # Gloo ends the process when a message is longer than its receive. So the tag of data is made of the whole call,
        # and data of calls that differ never meet; the headers, whose tag is the number alone, then show both calls.
        checksum = zlib.crc32(f"{number} {what}".encode())
        if is_send:
            self.header_tag = 8 * (number & (_TAG_MASK >> 1)) + 3
            self.data_tag = 8 * (checksum & (_TAG_MASK >> 1)) + 6
        else:
            self.header_tag = 4 * (number & _TAG_MASK)
            self.data_tag = 4 * (checksum & _TAG_MASK)
        self._result = result
        self._first: tuple[list[Any], Callable[[], None]] | None = None
        self._received: list[Any] = []
        self._last: Callable[[], None] | None = None
        self._is_finished = False
        self._check_header: Callable[[int, torch.Tensor], None] | None = None
        self.headers: list[tuple[int, Any, torch.Tensor]] = []  # peer, receive, the call that it issued
        self.sends: list[tuple[Any, torch.Tensor]] = []

    def check_headers_by(self, check: Callable[[int, torch.Tensor], None]) -> None:
        """Call ``check(peer, the inline bytes of its header)`` before the data is waited for."""
        self._check_header = check

    def first_then(self, receives: list[Any], then: Callable[[], None]) -> None:
        """Do ``then`` once ``receives`` are there, before the rest."""
        self._first = (receives, then)

    def finally_do(self, receives: list[Any], then: Callable[[], None] | None) -> None:
        self._received = receives
        self._last = then

    def do_first(self) -> None:
        first = self._first
        if first is not None:
            self._compare()
            self._first = None
            self._comm.pending.works.pop(self, None)
            self._comm.await_all(first[0], self)
            first[1]()

    def wait(self) -> torch.Tensor:
        if not self._is_finished:
            self._comm.first_error.check()
            try:
                self._finish()
            except CommError as error:
                self._comm.first_error.keep(error)
                raise
            self._is_finished = True
        return self._result

    def drain(self) -> None:
        self.wait()
        if self.sends:
            self._comm.first_error.check()
            self._comm.await_all([send for send, _ in self.sends], self)
            self.sends = []

    def _finish(self) -> None:
        if self._first is not None:
            self._comm.pending.send_until(self)
        else:
            self._compare()
        self._comm.await_all(self._received, self)
        if self._last is not None:
            self._last()
        self._received = []
        self._last = None

    @property
    def is_finished(self) -> bool:
        return self._is_finished

    def _compare(self) -> None:
        """Compare the calls in the peers' headers, which arrive before the data, with this one."""
        for peer, receive, header in self.headers:
            self._comm.await_all([receive], self, peer)
            theirs = header[:_TEXT_BYTES].numpy().tobytes().rstrip(b"\0").decode(errors="replace")
            if theirs.encode() != self.what.encode()[:_TEXT_BYTES]:
                raise CommError(
                    f"the ranks of axis {self._comm.axis!r} disagree: rank {self._comm.rank} on the axis issued "
                    f"{self.what}, rank {peer} issued {theirs}",
                    do="make every rank issue the same collectives in the same order; look for a branch that depends "
                    "on the rank or on the data.",
                    code="comm-mismatch",
                )
            if self._check_header is not None:
                self._check_header(peer, header[_TEXT_BYTES:])
        self.headers = []


class GlooCommunicator:
    """The ranks along one axis, over a Gloo process group of theirs. CPU tensors only."""

    def __init__(
        self,
        axis: str,
        group: dist.ProcessGroupGloo,
        failures: FailureReports,
        pending: GlooPending,
    ) -> None:
        self.axis = axis
        self.rank = group.rank()
        self.size = group.size()
        self.pending = pending
        self.first_error = pending.first_error
        self._group: Any = group
        self._failures = failures
        self._peers = [peer for peer in range(self.size) if peer != self.rank]
        self._sum = RankOrderedSum()
        self._number = 0
        self._num_sends: Counter[tuple[int, bool]] = Counter()  # by peer and whether this rank is the sender
        self._sending: list[GlooWork] = []
        self._landing: defaultdict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)

    @property
    def scratch_nbytes(self) -> int:
        return self._sum.nbytes + sum(part.nbytes for kept in self._landing.values() for part in kept)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor | None = None, *, label: str) -> Work:
        check_divides("all_gather", full, shard, self.size, label=label)
        own = own_range(full, self.rank, self.size)
        work = self._issue("all_gather", label, full, full)
        source = own if shard is None else shard
        receives = [self._receive(work, own_range(full, peer, self.size), peer, 1) for peer in self._peers]
        for peer in self._peers:
            self._send(work, source, peer, 1)

        def keep() -> None:
            if shard is not None and not is_same_memory(own, shard):
                own.detach().copy_(shard)

        work.finally_do(receives, keep)
        return work

    def reduce_scatter(
        self, full: torch.Tensor, out: torch.Tensor, *, scale: float = 1.0, accumulate: bool = False, label: str
    ) -> Work:
        check_divides("reduce_scatter", full, out, self.size, label=label)
        work = self._issue("reduce_scatter", label, full, out)
        receives, parts = self._exchange_ranges(work, full)

        def reduce() -> None:
            self._sum(parts, out, scale=scale, accumulate=accumulate)
            self._keep_landing(parts)

        work.finally_do(receives, reduce)
        return work

    def all_reduce(self, full: torch.Tensor, *, scale: float = 1.0, label: str) -> Work:
        work = self._issue("all_reduce", label, full, full)
        own = own_range(full, self.rank, self.size)
        receives, parts = self._exchange_ranges(work, full)
        # A peer's sum comes after it has received this rank's part of it, so the part is sent before it is overwritten.
        sums = [self._receive(work, own_range(full, peer, self.size), peer, 2) for peer in self._peers]

        def reduce() -> None:
            self._sum(parts, own, scale=scale)
            self._keep_landing(parts)
            for peer in self._peers:
                self._send(work, own, peer, 2)

        work.first_then(receives, reduce)
        work.finally_do(sums, None)
        self.pending.works[work] = None
        return work

    def all_to_all(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        *,
        out_splits: Sequence[int] | None = None,
        source_splits: Sequence[int] | None = None,
        label: str,
    ) -> Work:
        check_both_splits(out_splits, source_splits, label=label)
        parts = split_parts(out, out_splits, self.size, label=label)
        sources = split_parts(source, source_splits, self.size, label=label)
        counts = torch.tensor([part.numel() for part in sources], dtype=torch.int64).view(self.size, 1)
        what = out if out_splits is None else out[:0]
        work = self._issue("all_to_all", label, what, out, inline=lambda peer: counts[peer].view(torch.uint8))

        def check(peer: int, header: torch.Tensor) -> None:
            sent = int(header[:8].view(torch.int64))
            if sent != parts[peer].numel():
                raise split_mismatch(self.axis, label, self.rank, peer, sent, parts[peer].numel())

        work.check_headers_by(check)
        # The tag has the number of elements too: parts of different sizes must not meet.
        receives = [
            self._receive_tagged(work, parts[peer], peer, _tag_with_numel(work, parts[peer])) for peer in self._peers
        ]
        for peer in self._peers:
            self._send_tagged(work, sources[peer], peer, _tag_with_numel(work, sources[peer]))
        work.finally_do(receives, lambda: _copy(sources[self.rank], parts[self.rank]))
        return work

    def send(self, tensor: torch.Tensor, peer: int, *, label: str) -> Work:
        check_peer("send", peer, self.rank, self.size, label=label)
        work = self._issue("send", label, tensor, tensor, to=peer)
        self._send(work, tensor, peer, 1)
        return work

    def recv(self, tensor: torch.Tensor, peer: int, *, label: str) -> Work:
        check_peer("recv", peer, self.rank, self.size, label=label)
        work = self._issue("send", label, tensor, tensor, source=peer)
        work.finally_do([self._receive(work, tensor, peer, 1)], None)
        return work

    def broadcast(self, tensor: torch.Tensor, source: int, *, label: str) -> Work:
        work = self._issue(f"broadcast from {source}", label, tensor, tensor)
        if self.rank == source:
            for peer in self._peers:
                self._send(work, tensor, peer, 1)
        else:
            work.finally_do([self._receive(work, tensor, source, 1)], None)
        return work

    def exchange(self, vector: torch.Tensor, *, label: str) -> Work:
        result = torch.empty(self.size, vector.numel(), dtype=vector.dtype)
        result[self.rank].copy_(vector.detach())
        if vector.nbytes <= _INLINE_BYTES:
            work = self._issue(
                "exchange", label, vector, result, inline=lambda peer: result[self.rank].view(torch.uint8)
            )
            headers = list(work.headers)

            def unpack() -> None:
                for peer, _, header in headers:
                    result[peer].view(torch.uint8).copy_(header[_TEXT_BYTES : _TEXT_BYTES + vector.nbytes])

            work.finally_do([], unpack)
            return work
        work = self._issue("exchange", label, vector, result)
        receives = [self._receive(work, result[peer], peer, 1) for peer in self._peers]
        for peer in self._peers:
            self._send(work, result[self.rank], peer, 1)
        work.finally_do(receives, None)
        return work

    def gather_objects(self, value: Any, *, label: str) -> Sequence[Any]:
        return gather_json(value, lambda vector: self.exchange(vector, label=label).wait(), torch.device("cpu"))

    def barrier(self, *, label: str) -> None:
        self.exchange(torch.zeros(1, dtype=torch.uint8), label=label).wait()

    def drain(self) -> None:
        for work in self._sending:
            if work.is_finished:
                work.drain()
        self._sending = [work for work in self._sending if work.sends]

    def close(self) -> None:
        # A peer may still be receiving what this rank sent in a collective that is finished here.
        with contextlib.suppress(RuntimeError):  # the peer has ended
            if self.first_error.error is None:
                for send in [send for work in self._sending if work.is_finished for send, _ in work.sends]:
                    send.wait(_FAREWELL)
        for work in [work for work in self.pending.works if work._comm is self]:
            del self.pending.works[work]
        self._sending = []
        self._landing.clear()
        self._group = None

    def abandon(self) -> None:
        """Close the connections, although works are under way. Never raises."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):
                group.abort()

    def await_all(self, requests: list[Any], work: GlooWork, peer: int | None = None) -> None:
        """Wait for requests to ``peer``, or to several.

        Raises: RankFailedError: a peer failed; CommError: a time-out, or a lost connection without a report.
        """
        self.pending.watch.current = lambda waits: (
            f"rank {self.rank} on axis {self.axis!r} {waits} in {work.what} for"
            + (" its peers' data" if peer is None else f" rank {peer}, which has not issued it")
        )
        try:
            for request in requests:
                if request is not None:
                    request.wait()
        except RuntimeError as error:
            raise self._explained(error, work) from error
        finally:
            self.pending.watch.current = None

    def _issue(
        self,
        op: str,
        label: str,
        what: torch.Tensor,
        result: torch.Tensor,
        *,
        inline: Callable[[int], torch.Tensor] | None = None,
        to: int | None = None,
        source: int | None = None,
    ) -> GlooWork:
        """Send the header of a call to every peer, and start to receive the peers' headers.

        Args:
            inline: bytes for a peer, sent in its header.
            to: the receiver of a send, which alone gets a header.
            source: the sender of a receive, whose header alone is received.
        """
        if self._group is None:
            self.first_error.check()
            raise CommError(
                f"{op} {label!r} on axis {self.axis!r}: the communicator is closed",
                do="issue no collective after close().",
            )
        self.first_error.check()
        if len(self._sending) >= _OPEN_SENDS:
            self._sending = [work for work in self._sending if work.sends]
            for old in self._sending[: _OPEN_SENDS // 2]:
                if old.is_finished:
                    old.drain()
        text = f"{op} {label!r} of {what.numel()} x {str(what.dtype).removeprefix('torch.')}"
        peer_of_send = source if to is None else to
        if peer_of_send is None:
            self._number += 1
            work = GlooWork(self, text, self._number, result, is_send=False)
        else:
            self._num_sends[peer_of_send, to is not None] += 1
            work = GlooWork(self, text, self._num_sends[peer_of_send, to is not None], result, is_send=True)
        mine = torch.zeros(_HEADER_BYTES, dtype=torch.uint8)
        encoded = text.encode()[:_TEXT_BYTES]
        mine[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        for peer in self._peers:
            if to is None and source in (None, peer):
                theirs = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
                work.headers.append((peer, self._receive(work, theirs, peer, 0), theirs))
            if source is None and to in (None, peer):
                header = mine
                if inline is not None:
                    extra = inline(peer)
                    header = mine.clone()
                    header[_TEXT_BYTES : _TEXT_BYTES + extra.numel()] = extra
                self._send(work, header, peer, 0)
        self._sending.append(work)
        return work

    def _exchange_ranges(self, work: GlooWork, full: torch.Tensor) -> tuple[list[Any], list[torch.Tensor]]:
        """Send each peer its range of ``full``, receive theirs of mine.

        Memory: (size - 1) shards on the host; kept for the next call of this size until ``close()``, since fresh pages
        would cost more time than the transfer.
        """
        own = own_range(full, self.rank, self.size)
        kept = self._landing[own.numel(), own.dtype]
        parts = [
            own if peer == self.rank else kept.pop() if kept else torch.empty_like(own) for peer in range(self.size)
        ]
        receives = [self._receive(work, parts[peer], peer, 1) for peer in self._peers]
        for peer in self._peers:
            self._send(work, own_range(full, peer, self.size), peer, 1)
        return receives, parts

    def _keep_landing(self, parts: list[torch.Tensor]) -> None:
        own = parts[self.rank]
        self._landing[own.numel(), own.dtype] += [part for part in parts if part is not own]

    def _send(self, work: GlooWork, tensor: torch.Tensor, peer: int, part: int) -> None:
        self._send_tagged(work, tensor, peer, _tag(work, part))

    def _receive(self, work: GlooWork, tensor: torch.Tensor, peer: int, part: int) -> Any:
        return self._receive_tagged(work, tensor, peer, _tag(work, part))

    def _send_tagged(self, work: GlooWork, tensor: torch.Tensor, peer: int, tag: int) -> None:
        if tensor.numel() and self._group is not None:
            tensor = tensor.detach()
            try:
                work.sends.append((self._group.send([tensor], peer, tag), tensor))
            except RuntimeError as error:
                raise self._explained(error, work) from error

    def _receive_tagged(self, work: GlooWork, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        if tensor.numel() == 0 or self._group is None:
            return None
        try:
            return self._group.recv([tensor.detach()], peer, tag)
        except RuntimeError as error:
            raise self._explained(error, work) from error

    def _explained(self, error: RuntimeError, work: GlooWork) -> CommError:
        found = self._failures.explain(error, f"{work.what} on axis {self.axis!r} with {self.size} ranks, over Gloo,")
        self.first_error.keep(found)
        return found


def _tag(work: GlooWork, part: int) -> int:
    return work.data_tag + part if part else work.header_tag


def _tag_with_numel(work: GlooWork, tensor: torch.Tensor) -> int:
    return 4 * (zlib.crc32(f"{work.data_tag} {tensor.numel()}".encode()) & _TAG_MASK) + 1


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)

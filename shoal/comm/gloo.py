"""Collectives over Gloo's sends and receives: every rank sends each peer its range and sums in rank order.

Gloo's own reduce_scatter and all_gather are several times slower than this exchange, and the order of their sums
depends on the algorithm.

Every message has a header, so that ranks that issue different calls get an error that names both. all_reduce has two
rounds, and the second is sent from ``wait()``. So a rank that waits for a later call does the first rounds of all
earlier ones, on every axis, before it blocks: no two ranks wait for each other.

The communicators of all axes share a connection to each rank that one of them needs, and have numbers of their own in
the tags of headers. An axis that only exchanges a few numbers connects each rank with those 1, 2, 4, ... places before
and after it, at most 2 * log2(size), rounded up, and values are passed on:

    rank 0 of 8 has the rows of   0   then 0-1 (from 1)   then 0-3 (2-3 from 2)   then 0-7 (4-7 from 4)

    tag (30 bits)                                      of
    8 * (communicator, number)                         the header of a collective
    8 * (number, checksum(communicator, call)) + 1, 2  its data, first and second round
    8 * (communicator, number) + 3                     the header of a send
    8 * (number, checksum(communicator, call)) + 7     its data
"""

from __future__ import annotations

import contextlib
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch

from shoal.comm.failure import FailureReports, FirstError
from shoal.comm.gloo_links import GlooLinks
from shoal.comm.protocol import (
    Backend,
    Call,
    Verbs,
    Work,
    calls_differ,
    closed_error,
    own_range,
    split_mismatch,
    split_parts,
)  # fmt: skip
from shoal.comm.sums import RankOrderedSum, is_same_memory
from shoal.comm.waiting import WaitWatch
from shoal.errors import CommError

_NUMBER_BITS, _COMMUNICATOR_BITS = 15, 12  # with three more bits, tags stay positive 32-bit numbers
_CHECKSUM_BITS = 19  # and 8 bits of a number: data of different calls under way seldom has one tag
_FAREWELL = timedelta(seconds=5)  # for which close() waits until peers have received the last sends
_OPEN_SENDS = 64  # finished works whose sends may still be under way before the oldest is waited for
_TEXT_BYTES = 160
_INLINE_BYTES = 352  # of a small vector, which is sent in the header
_HEADER_BYTES = _TEXT_BYTES + _INLINE_BYTES
_Request = tuple[int, Any]  # a peer, and a send to it or a receive from it; None: of no bytes


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
        "_comm", "_data_tag", "_first", "_header_tag", "_is_send", "_last", "_number", "_received", "_result",
        "check_header", "headers", "is_finished", "sends", "what",
    )  # fmt: skip

    def __init__(self, comm: GlooCommunicator, what: str, number: int, result: torch.Tensor, is_send: bool) -> None:
        self._comm = comm
        self.what = what
        # Gloo ends the process when a message is longer than its receive. So the tag of data is made of the whole call,
        # and data of calls that differ never meet; the headers, whose tag is the number alone, then show both calls.
        self._number = number
        self._is_send = is_send
        header = comm.number % (1 << _COMMUNICATOR_BITS) << _NUMBER_BITS | number % (1 << _NUMBER_BITS)
        self._header_tag = 8 * header + 3 if is_send else 8 * header
        self._data_tag = self._tag_of(what)
        self._result = result
        self._first: tuple[list[_Request], Callable[[], object]] | None = None
        self._received: list[_Request] = []
        self._last: Callable[[], object] | None = None
        self.is_finished = False
        self.check_header: Callable[[int, torch.Tensor], None] | None = None  # gets a peer and its inline bytes
        self.headers: list[tuple[_Request, torch.Tensor]] = []  # receive, the call that the peer issued
        self.sends: list[tuple[_Request, torch.Tensor]] = []

    def tag(self, part: int) -> int:
        """Of the header (0), or of the data of a round."""
        return self._data_tag + part if part else self._header_tag

    def tag_with_numel(self, tensor: torch.Tensor) -> int:
        return self._tag_of(f"{self.what} {tensor.numel()}") + 1

    def _tag_of(self, text: str) -> int:
        checksum = zlib.crc32(f"{self._comm.number} {self._number} {text}".encode()) % (1 << _CHECKSUM_BITS)
        return 8 * ((self._number & 0xFF) << _CHECKSUM_BITS | checksum) + (6 if self._is_send else 0)

    def first_then(self, receives: list[_Request], then: Callable[[], None]) -> None:
        """Do ``then`` once ``receives`` are there, before the rest."""
        self._first = (receives, then)

    def finally_do(self, receives: list[_Request], then: Callable[[], object] | None) -> None:
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
        if not self.is_finished:
            self._comm.first_error.check()
            try:
                self._finish()
            except CommError as error:
                self._comm.first_error.keep(error)
                raise
            self.is_finished = True
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

    def _compare(self) -> None:
        """Compare the calls in the peers' headers, which arrive before the data, with this one."""
        for receive, header in self.headers:
            self._comm.await_all([receive], self, is_header=True)
            peer = receive[0]
            theirs = header[:_TEXT_BYTES].numpy().tobytes().rstrip(b"\0").decode(errors="replace")
            if theirs.encode() != self.what.encode()[:_TEXT_BYTES]:
                raise calls_differ(self._comm.axis, "", ([self._comm.rank], self.what), ([peer], theirs))
            if self.check_header is not None:
                self.check_header(peer, header[_TEXT_BYTES:])
        self.headers = []


class GlooCommunicator(Backend):
    """The ranks along one axis, over Gloo's connections. CPU tensors only.

    Communicates: all ranks of the axis make one together.

    Args:
        ranks: those along the axis, this one among them.
        number: of this communicator, the same on all of them and of no other of ``links``.
        is_mesh: connect each rank with all others. False: with those 1, 2, 4, ... places from it, which is enough for
            ``exchange`` and ``broadcast``; the first other call blocks until its other ranks have issued it too.
    """

    def __init__(
        self,
        axis: str,
        links: GlooLinks,
        ranks: Sequence[int],
        number: int,
        failures: FailureReports,
        pending: GlooPending,
        *,
        is_mesh: bool,
    ) -> None:
        super().__init__(axis, ranks.index(links.rank), len(ranks))
        self.number = number
        self._ranks = ranks
        self.pending = pending
        self.first_error = pending.first_error
        self._links: GlooLinks | None = links
        self._failures = failures
        self._peers = [peer for peer in range(self.size) if peer != self.rank]
        near = neighbours(self.rank, self.size)
        self._is_mesh = is_mesh or len(near) == len(self._peers)
        self._near = self._peers if self._is_mesh else near  # with whom an exchange and a broadcast are compared
        self._sum = RankOrderedSum()
        self._number = 0
        self._num_sends: Counter[tuple[int, bool]] = Counter()  # by peer and whether this rank is the sender
        self._sending: list[GlooWork] = []
        self._landing: defaultdict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        self._connect(self._near)

    @property
    def scratch_nbytes(self) -> int:
        return self._sum.nbytes + sum(part.nbytes for kept in self._landing.values() for part in kept)

    def _all_gather(self, call: Call) -> Work:
        full, shard = call.result, call.sent
        own = own_range(full, self.rank, self.size)
        work = self._begin("all_gather", call, full)
        receives = [self._receive(work, own_range(full, peer, self.size), peer, work.tag(1)) for peer in self._peers]
        for peer in self._peers:
            self._send(work, shard, peer, work.tag(1))

        def keep() -> None:
            if not is_same_memory(own, shard):
                own.detach().copy_(shard)

        work.finally_do(receives, keep)
        return work

    def _reduce_scatter(self, call: Call) -> Work:
        work = self._begin("reduce_scatter", call, call.sent)
        receives, parts = self._exchange_ranges(work, call.sent)

        def reduce() -> None:
            self._sum(parts, call.result, scale=call.scale, accumulate=call.accumulate)
            self._keep_landing(parts)

        work.finally_do(receives, reduce)
        return work

    def _all_reduce(self, call: Call) -> Work:
        full = call.result
        work = self._begin("all_reduce", call, full)
        own = own_range(full, self.rank, self.size)
        receives, parts = self._exchange_ranges(work, full)
        # A peer's sum comes after it has received this rank's part of it, so the part is sent before it is overwritten.
        sums = [self._receive(work, own_range(full, peer, self.size), peer, work.tag(2)) for peer in self._peers]

        def reduce() -> None:
            self._sum(parts, own, scale=call.scale)
            self._keep_landing(parts)
            for peer in self._peers:
                self._send(work, own, peer, work.tag(2))

        work.first_then(receives, reduce)
        work.finally_do(sums, None)
        self.pending.works[work] = None
        return work

    def _all_to_all(self, call: Call) -> Work:
        parts = split_parts(call.result, call.out_splits, self.size)
        sources = split_parts(call.sent, call.source_splits, self.size)
        counts = torch.tensor([part.numel() for part in sources], dtype=torch.int64, device="cpu").view(self.size, 1)
        what = call.result if call.out_splits is None else call.result[:0]
        work = self._begin("all_to_all", call, what, inline=lambda peer: counts[peer].view(torch.uint8))

        def check(peer: int, header: torch.Tensor) -> None:
            sent = int(header[:8].view(torch.int64))
            if sent != parts[peer].numel():
                raise split_mismatch(self.axis, call.label, self.rank, peer, sent, parts[peer].numel())

        work.check_header = check
        # The tag has the number of elements too: parts of different sizes must not meet.
        receives = [self._receive(work, parts[peer], peer, work.tag_with_numel(parts[peer])) for peer in self._peers]
        for peer in self._peers:
            self._send(work, sources[peer], peer, work.tag_with_numel(sources[peer]))
        work.finally_do(receives, lambda: parts[self.rank].copy_(sources[self.rank]))
        return work

    def _message(self, call: Call) -> Work:
        work = self._begin("send", call, call.result, is_sender=call.verb == "send")
        if call.verb == "send":
            self._send(work, call.result, call.peer, work.tag(1))
        else:
            work.finally_do([self._receive(work, call.result, call.peer, work.tag(1))], None)
        return work

    def _broadcast(self, call: Call) -> Work:
        work = self._begin(f"broadcast from {call.peer}", call, call.result, peers=self._near)
        source, targets = call.peer, self._peers if self.rank == call.peer else []
        if not self._is_mesh:  # a rank that has it is 1, 2, 4, ... places before those that it passes it on to
            place = (self.rank - call.peer) % self.size
            source = (self.rank - (1 << place.bit_length() >> 1)) % self.size
            further = [each for each in _distances(self.size) if place < each < self.size - place]
            targets = [(self.rank + each) % self.size for each in further]

        def pass_on() -> None:
            before = len(work.sends)
            for peer in targets:
                self._send(work, call.result, peer, work.tag(1))
            if self.rank != call.peer:  # after wait() the result may be changed
                self.await_all([send for send, _ in work.sends[before:]], work)

        if self.rank == call.peer:
            pass_on()
        else:
            work.finally_do([self._receive(work, call.result, source, work.tag(1))], pass_on)
        return work

    def _exchange(self, call: Call) -> Work:
        vector, result = call.sent.detach(), call.result
        if self._is_mesh and vector.nbytes <= _INLINE_BYTES:
            mine = result[self.rank].copy_(vector)
            work = self._begin("exchange", call, vector, inline=lambda peer: mine.view(torch.uint8))
            headers = list(work.headers)

            def unpack() -> None:
                for (peer, _), header in headers:
                    result[peer].view(torch.uint8).copy_(header[_TEXT_BYTES : _TEXT_BYTES + vector.nbytes])

            work.finally_do([], unpack)
            return work
        rows = torch.empty_like(result)  # the row of this rank, of the one after it, ...
        rows[0] = vector
        if self._is_mesh:
            blocks = [(distance, 1) for distance in range(1, self.size)]
        else:
            blocks = [(distance, min(distance, self.size - distance)) for distance in _distances(self.size)]
        work = self._begin("exchange", call, vector, peers=self._near)
        receives = [
            self._receive(work, rows[distance : distance + number], (self.rank + distance) % self.size, work.tag(1))
            for distance, number in blocks
        ]

        def send(distance: int, number: int) -> None:
            self._send(work, rows[:number], (self.rank - distance) % self.size, work.tag(1))

        def pass_on() -> None:
            for (distance, number), receive in zip(blocks, receives, strict=True):
                if number > 1:
                    send(distance, number)
                self.await_all([receive], work)
            result.copy_(rows.roll(self.rank, 0))

        for distance, number in blocks:
            if number == 1:
                send(distance, number)
        work.finally_do([], pass_on)
        return work

    verbs: ClassVar[Verbs] = {
        "all_gather": _all_gather,
        "reduce_scatter": _reduce_scatter,
        "all_reduce": _all_reduce,
        "all_to_all": _all_to_all,
        "send": _message,
        "recv": _message,
        "broadcast": _broadcast,
        "exchange": _exchange,
    }

    def drain(self) -> None:
        for work in self._sending:
            if work.is_finished:
                work.drain()
        self._sending = [work for work in self._sending if work.sends]

    def close(self) -> None:
        # A peer may still be receiving what this rank sent in a collective that is finished here.
        with contextlib.suppress(RuntimeError):  # the peer has ended
            if self.first_error.error is None:
                for work in self._sending:
                    for (_, send), _ in work.sends if work.is_finished else ():
                        send.wait(_FAREWELL)
        for work in [work for work in self.pending.works if work._comm is self]:
            del self.pending.works[work]
        self._sending = []
        self._landing.clear()
        self._links = None

    def abandon(self) -> None:
        """Close the connections, although works are under way. Never raises."""
        links, self._links = self._links, None
        if links is not None:
            links.abort()

    def await_all(self, requests: list[_Request], work: GlooWork, *, is_header: bool = False) -> None:
        """Wait for requests; ``is_header``: one, for the header of a peer.

        Raises: RankFailedError: a peer failed; CommError: a time-out, or a lost connection without a report.
        """
        self.pending.watch.current = lambda waits: (
            f"rank {self.rank} on axis {self.axis!r} {waits} in {work.what} for"
            + (f" rank {requests[0][0]}, which has not issued it" if is_header else " its peers' data")
        )
        peer = self.rank
        try:
            for each in requests:
                peer, request = each
                if request is not None:
                    request.wait()
        except RuntimeError as error:
            raise self._explained(error, work.what, peer) from error
        finally:
            self.pending.watch.current = None

    def _begin(
        self,
        op: str,
        call: Call,
        what: torch.Tensor,
        *,
        inline: Callable[[int], torch.Tensor] | None = None,
        is_sender: bool | None = None,
        peers: Sequence[int] = (),
    ) -> GlooWork:
        """Send the header of a call to every peer, and start to receive the peers' headers.

        Args:
            peers: none: all.
            what: its numel and dtype are in the header: they are the same on all ranks.
            inline: bytes for a peer, sent in its header.
            is_sender: of a message, whose header goes from the one rank to the other; None: no message.
        """
        label = call.label
        if self._links is None:
            self.first_error.check()
            raise closed_error(self.axis, op, label)
        self.first_error.check()
        if len(self._sending) >= _OPEN_SENDS:
            self._sending = [work for work in self._sending if work.sends]
            for old in self._sending[: _OPEN_SENDS // 2]:
                if old.is_finished:
                    old.drain()
        text = f"{op} {label!r} of {what.numel()} x {str(what.dtype).removeprefix('torch.')}"
        if is_sender is None:
            peers = peers or self._peers
            self._number += 1
            work = GlooWork(self, text, self._number, call.result, is_send=False)
        else:
            peers = [call.peer]
            self._num_sends[call.peer, is_sender] += 1
            work = GlooWork(self, text, self._num_sends[call.peer, is_sender], call.result, is_send=True)
        if not self._is_mesh:
            self._connect(peers)
        mine = torch.zeros(_HEADER_BYTES, dtype=torch.uint8, device="cpu")
        encoded = text.encode()[:_TEXT_BYTES]
        mine[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        for peer in peers:
            if not is_sender:
                theirs = torch.empty(_HEADER_BYTES, dtype=torch.uint8, device="cpu")
                work.headers.append((self._receive(work, theirs, peer, work.tag(0)), theirs))
            if is_sender is not False:
                header = mine
                if inline is not None:
                    extra = inline(peer)
                    header = mine.clone()
                    header[_TEXT_BYTES : _TEXT_BYTES + extra.numel()] = extra
                self._send(work, header, peer, work.tag(0))
        self._sending.append(work)
        return work

    def _exchange_ranges(self, work: GlooWork, full: torch.Tensor) -> tuple[list[_Request], list[torch.Tensor]]:
        """Send each peer its range of ``full``, receive theirs of mine.

        Memory: (size - 1) shards on the host; kept for the next call of this size until ``close()``, since fresh pages
        would cost more time than the transfer.
        """
        own = own_range(full, self.rank, self.size)
        kept = self._landing[own.numel(), own.dtype]
        parts = [
            own if peer == self.rank else kept.pop() if kept else torch.empty_like(own) for peer in range(self.size)
        ]
        receives = [self._receive(work, parts[peer], peer, work.tag(1)) for peer in self._peers]
        for peer in self._peers:
            self._send(work, own_range(full, peer, self.size), peer, work.tag(1))
        return receives, parts

    def _keep_landing(self, parts: list[torch.Tensor]) -> None:
        own = parts[self.rank]
        self._landing[own.numel(), own.dtype] += [part for part in parts if part is not own]

    def _connect(self, peers: Sequence[int]) -> None:
        if self._links is not None:
            try:
                self._links.connect(self._ranks, peers)
            except RuntimeError as error:
                raise self._explained(error, f"connecting {len(peers) + 1} ranks", self.rank) from error

    def _send(self, work: GlooWork, tensor: torch.Tensor, peer: int, tag: int) -> None:
        if tensor.numel() and self._links is not None:
            tensor = tensor.detach()
            try:
                work.sends.append(((peer, self._links.send(tensor, self._ranks[peer], tag)), tensor))
            except RuntimeError as error:
                raise self._explained(error, work.what, peer) from error

    def _receive(self, work: GlooWork, tensor: torch.Tensor, peer: int, tag: int) -> _Request:
        if tensor.numel() == 0 or self._links is None:
            return peer, None
        try:
            return peer, self._links.receive(tensor.detach(), self._ranks[peer], tag)
        except RuntimeError as error:
            raise self._explained(error, work.what, peer) from error

    def _explained(self, error: RuntimeError, what: str, peer: int) -> CommError:
        what = f"{what} on axis {self.axis!r} with {self.size} ranks, over Gloo,"
        explained = self._failures.explain(error, what, [self._ranks[peer]] if peer != self.rank else [])
        self.first_error.keep(explained)
        return explained


def _distances(size: int) -> list[int]:
    return [1 << power for power in range((size - 1).bit_length())]


def neighbours(rank: int, size: int) -> list[int]:
    """The coordinates, on an axis of ``size`` ranks, of those 1, 2, 4, ... places before and after ``rank``.

    >>> neighbours(0, 8), len(neighbours(0, 512)), len(neighbours(0, 4096))
    ([1, 2, 4, 6, 7], 17, 23)
    """
    return sorted({(rank + sign * distance) % size for distance in _distances(size) for sign in (1, -1)} - {rank})

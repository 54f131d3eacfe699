"""What a communicator can do: the only way from Shoal's code to another rank.

A communicator is bound to one axis of the mesh. Callers say what to move, never which group. All tensors are 1-D and
contiguous; ``shard numel = full numel / size``; rank ``r`` owns ``full[r * shard : (r + 1) * shard]``. Every rank
issues the same collectives in the same order; sends and receives are ordered between the two ranks only.

A collective is *issued* by the call (which does not block) and *completed* by ``Work.wait()``. Between the two the
source must not be written. After ``wait()`` the result is there, but peers may still be reading this rank's source:
call ``Work.drain()``, or ``Communicator.drain()`` for all of them, before overwriting it. A collective of
``Communicator.blocking`` has done both when it returns.

Sums run in rank order in fp32 (fp64 for fp64), are multiplied by ``scale`` in fp32 and rounded once to the dtype of the
result, so that reduce_scatter and all_reduce give the same bits (NCCL sums in an order of its own: see ``nccl``).

After the first error (a failed rank, a time-out, calls that differ) every further wait raises it at once.

    caller --all_reduce(...)--> Communicator: checks, records --issue(Call)--> Backend: Gloo, NCCL, shared memory, ...
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import torch

from shoal.comm.recorder import Group, Recorder
from shoal.comm.side_stream import CopyDone, SideStream
from shoal.comm.wire import Wire, decoded_sum, encoded_gather, encoded_scatter
from shoal.device import read_vector
from shoal.errors import CommError, UsageError
from shoal.streams import MemoryPool, host_memory, is_in_host_memory, keep_for_current_stream
from shoal.text import listed_ranks

Verb = Literal[
    "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "recv", "batch", "broadcast", "exchange",
    "barrier",
]  # fmt: skip

_CONTROL = ("broadcast", "exchange")  # verbs that move neither parameters nor gradients
_SHAPED = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")  # verbs that ``shapes_only`` can leave out
_IS_FOR_SHAPES: ContextVar[bool] = ContextVar("is_for_shapes", default=False)


@contextmanager
def shapes_only() -> Iterator[None]:
    """Collectives of this thread return their results without values, and are neither sent nor recorded.

    For a pipeline stage that calls a module of another stage with tensors that have no data, for the shapes of what it
    returns.
    """
    token = _IS_FOR_SHAPES.set(True)
    try:
        yield
    finally:
        _IS_FOR_SHAPES.reset(token)


@runtime_checkable
class Work(Protocol):
    """A collective, send or receive under way."""

    def wait(self) -> torch.Tensor:
        """Block until the result is there (on CUDA: make the current stream wait for it); return it. Idempotent."""
        ...

    def drain(self) -> None:
        """Block until this rank's source may be overwritten. Implies ``wait()``. Idempotent."""
        ...


Step = Callable[[Work], Work]


class FinishedWork:
    """A collective that needed no other rank, or that blocked until it was done."""

    __slots__ = ("_result",)

    def __init__(self, result: torch.Tensor) -> None:
        self._result = result

    def wait(self) -> torch.Tensor:
        return self._result

    def drain(self) -> None:
        return None


class StagedWork:
    """Collectives one after the other: each begins with what the one before has received.

    Args:
        side: the stream in which they are issued; None: the current one, and those after the first in ``wait()``.
        first: issues the first one.
        steps: each waits for the work before, and issues the next one.

    Order: on an accelerator all are issued at once, each to start when the one before has ended; the current stream
        waits in ``wait()``, for the last one. On the CPU the host waits for each, in ``wait()``.
    """

    __slots__ = ("_issued", "_steps", "_works")

    def __init__(self, side: SideStream | None, first: Callable[[], Work], *steps: Step) -> None:
        self._steps = steps
        with nullcontext(CopyDone()) if side is None else side.queued() as self._issued:
            self._works = [first()]
            if side is not None:
                self._follow()

    def _follow(self) -> None:
        steps, self._steps = self._steps, ()
        with torch.no_grad():
            for step in steps:
                self._works.append(step(self._works[-1]))

    def wait(self) -> torch.Tensor:
        self._follow()
        self._issued.wait()
        return self._works[-1].wait()

    def drain(self) -> None:
        self.wait()
        for work in self._works:
            work.drain()


class BatchWork:
    """Sends and receives that were issued together; ``wait()`` returns the tensor of the last one."""

    __slots__ = ("_works",)

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> torch.Tensor:
        return [work.wait() for work in self._works][-1]

    def drain(self) -> None:
        for work in self._works:
            work.drain()


class Message(NamedTuple):
    """A send or a receive of ``Communicator.batch``. Attributes: ``peer``: a coordinate on the axis."""

    verb: Literal["send", "recv"]
    tensor: torch.Tensor
    peer: int
    label: str


class Call(NamedTuple):
    """One call of a communicator, whose arguments are checked: all that a backend, or a wrapper of one, gets.

    Attributes:
        result: what ``Work.wait()`` returns. A send reads it, every other verb writes it.
        source: what is sent, where it is not ``result``.
        nbytes: that this rank receives, by the formula of the verb, rounded down.
        peer: of a send or a receive the other rank, of a broadcast the one that sends: a coordinate on the axis.
        out_splits: elements of each part of an all_to_all's ``result``, as ``source_splits`` of its ``source``; None:
            equal parts.
        messages: of a batch its sends, then its receives; ``result`` is that of the last one.
        operator: what a backend calls in place of its collective, with the name of torch's group; ``result`` and
            ``source`` then only have the shapes of what is communicated. See ``open_symmetric_memory``.
    """

    verb: Verb
    label: str
    result: torch.Tensor
    source: torch.Tensor | None = None
    nbytes: int = 0
    scale: float = 1.0
    accumulate: bool = False
    peer: int = -1
    out_splits: Sequence[int] | None = None
    source_splits: Sequence[int] | None = None
    messages: tuple[Call, ...] = ()
    operator: Callable[[str], torch.Tensor] | None = None

    @property
    def sent(self) -> torch.Tensor:
        return self.result if self.source is None else self.source


Verbs = Mapping[Verb, Callable[[Any, Call], Work]]


class Backend:
    """The ranks along one axis, over one means of transport.

    A backend has a function for each verb in ``verbs``, or redefines ``issue``.
    """

    verbs: ClassVar[Verbs] = {}
    carries_values: bool = True  # False: no rank gets values of another
    compares_calls: ClassVar[bool] = True  # False: ranks that issue different calls in device memory get no error
    max_ctas: int | None = None  # see ``World.communicator``
    group: Group | None = None  # None: no other rank, or no ranks of a world

    def __init__(self, axis: str, rank: int, size: int) -> None:
        self.axis = axis
        self.rank = rank  # this rank's coordinate on the axis
        self.size = size

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of the scratch for sums, which is reused between calls, without tensors of :meth:`empty`."""
        return 0

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A 1-D tensor in memory that this backend can send from without a copy (shared memory, registered memory)."""
        return torch.empty(numel, dtype=dtype, device=device)

    def new_pool(self, device: torch.device, *, is_symmetric: bool) -> MemoryPool | None:
        """Memory that this backend's collectives read and write without a copy; None: it has no memory of its own.

        Args:
            is_symmetric: all ranks allocate the same segments in the same order.

        Raises: CommError: the device, or torch, cannot.
        """
        return None

    def open_symmetric_memory(self, device: torch.device) -> bool:
        """True if calls with an ``operator`` may be issued: each rank's device reads the memory of the others."""
        return False

    def issue(self, call: Call) -> Work:
        """Begin a call. Does not block."""
        return self.issue_each(call) if call.messages else self.verbs[call.verb](self, call)

    def issue_each(self, batch: Call) -> Work:
        """Begin the messages of a batch one by one."""
        return BatchWork([self.issue(message) for message in batch.messages])

    def divides(self, whole: torch.Tensor, part: torch.Tensor, dim: int, label: str) -> None:
        """This rank takes its ``part``, along ``dim``, of what all ranks have: nothing is sent."""

    def gather_objects(self, value: Any, *, label: str) -> Sequence[Any]:
        return gather_json(value, lambda vector: self.issue(exchange_of(vector, self.size, label)).wait())

    def barrier(self, *, label: str) -> None:
        self.issue(exchange_of(torch.zeros(1, dtype=torch.uint8, device="cpu"), self.size, label)).wait()

    def drain(self) -> None:
        """Block until no peer reads any source of a collective that this rank has waited for."""

    def check(self) -> None:
        """Raises: CommError: the first error. What an accelerator's collectives gave since may be of any value."""

    def close(self) -> None:
        """Release groups, maps and threads. Idempotent."""


class Communicator:
    """The ranks along one axis: what :meth:`World.communicator` returns.

    Checks and records every call, then issues it on the backend. A call with a wire format is recorded as the
    collective that it is made of, with the encoded bytes. Inside of ``shapes_only`` nothing is sent or recorded.

    Attributes: ``rank``: this rank's coordinate on the axis.
    """

    def __init__(self, backend: Backend, recorder: Recorder) -> None:
        self.axis = backend.axis
        self.rank = backend.rank
        self.size = backend.size
        self.recorder = recorder
        self.backend = backend
        self._side_stream: SideStream | None = None

    @property
    def is_for_shapes(self) -> bool:
        """True inside of ``shapes_only``."""
        return _IS_FOR_SHAPES.get()

    def side_stream(self, tensor: torch.Tensor) -> SideStream | None:
        """The stream in which a collective of ``tensor`` waits for the one whose result it takes; None: it is in host
        memory.
        """
        if is_in_host_memory(tensor):
            return None
        if self._side_stream is None:
            self._side_stream = SideStream(tensor.device)
        return self._side_stream

    def issue(self, call: Call) -> Work:
        """Record one call, and issue it.

        Raises: RuntimeError: inside of ``shapes_only``, for what is called for values. UsageError: device memory on an
            axis that was opened without.
        """
        if self.backend.max_ctas == 0 and not is_in_host_memory(call.sent):
            raise UsageError(
                f"{call.verb} {call.label!r} of device memory on axis {self.axis!r}, which was opened with max_ctas=0.",
                do="use world.communicator(axis, mesh).",
            )
        if _IS_FOR_SHAPES.get():
            if call.verb in _SHAPED:
                return FinishedWork(call.result)
            self._raise_for_shapes(call.verb, call.label)
        kind: Literal["data", "control"] = "control" if call.verb in _CONTROL else "data"
        for one in call.messages or (call,):
            numels, dtype = (one.sent.numel(), one.result.numel()), one.sent.dtype
            self.recorder.add(self.axis, one.verb, one.label, one.nbytes, dtype, kind, self._group_of(one), numels)
        return self.begin(call)

    def begin(self, call: Call) -> Work:
        """Issue a call that is recorded."""
        return self.backend.issue(call)

    def staged(self, tensor: torch.Tensor, first: Callable[[], Work], *steps: Step) -> Work:
        """Collectives of ``tensor`` one after the other: see ``StagedWork``."""
        return StagedWork(self.side_stream(tensor), first, *steps)

    def wire_of(self, full: torch.Tensor, wire: Wire | None) -> Wire | None:
        """How a collective of ``full`` is encoded that was asked to use ``wire``; on one rank nothing is."""
        return None if self.size == 1 or _IS_FOR_SHAPES.get() else wire

    def _group_of(self, call: Call) -> Group | None:
        group = self.backend.group
        if group is None or call.verb not in ("send", "recv"):
            return group
        here, peer = group.ranks[self.rank], group.ranks[call.peer]
        sender, receiver = (here, peer) if call.verb == "send" else (peer, here)
        return Group(f"{self.axis} from rank {sender} to {receiver}", (sender, receiver))

    def _record_blocking(self, op: str, label: str) -> None:
        if _IS_FOR_SHAPES.get():
            self._raise_for_shapes(op, label)
        self.recorder.add(self.axis, op, label, 0, None, "control", self.backend.group)

    def _raise_for_shapes(self, op: str, label: str) -> None:
        raise RuntimeError(f"it calls {op} ({label}) on {self.axis!r}, whose result has no shape of its own")

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of the scratch for sums, which is reused between calls, without tensors of :meth:`empty`."""
        return self.backend.scratch_nbytes

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A 1-D tensor in memory that this communicator can send from without a copy (shared memory, registered
        memory).
        """
        if _IS_FOR_SHAPES.get():
            return torch.empty(numel, dtype=dtype, device=device)  # under a FakeTensorMode a fake
        return self.backend.empty(numel, dtype, device)

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor | None = None, *, label: str, wire: Wire | None = None
    ) -> Work:
        """Gather every rank's shard into ``full``. Without ``shard``, this rank's range of ``full`` is the shard.

        With ``wire``, the shards are sent encoded (on one rank nothing is sent, nor encoded). Every rank then gets the
        decoded values, this rank's own range included, so that all copies are equal.

        Communicates: (size - 1) / size * full bytes received per rank; with ``wire`` the encoded bytes of the other
            ranks' shards.
        Memory: with ``wire`` the encoded bytes of ``full`` until ``wait()``.
        """
        check_divides("all_gather", full, shard, self.size, label=label)
        source = own_range(full, self.rank, self.size) if shard is None else shard
        if (wire := self.wire_of(full, wire)) is not None:
            return encoded_all_gather(self, self, full, source, label=label, wire=wire)
        return self.issue(Call("all_gather", label, full, source, full.nbytes * (self.size - 1) // self.size))

    def reduce_scatter(
        self,
        full: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float = 1.0,
        accumulate: bool = False,
        label: str,
        wire: Wire | None = None,
    ) -> Work:
        """``out = scale * sum over ranks of full[own range]``, or ``out += ...`` with ``accumulate``.

        ``out`` has shard numel, may be of another dtype than ``full`` and may be this rank's own range of ``full``
        (then without ``accumulate``). The other ranges of ``full`` have undefined values afterwards.

        With ``wire``, each range of ``full`` is encoded and sent to its owner by an all_to_all. The owner decodes the
        ranges to fp32 and sums them in rank order. ``full`` keeps its values then.

        Communicates: (size - 1) / size * full bytes received per rank; with ``wire`` the encoded bytes of this rank's
            range from every other rank.
        Memory: with ``wire`` the encoded bytes of ``full`` twice until ``wait()``, and there this rank's range in fp32
            twice.
        """
        check_divides("reduce_scatter", full, out, self.size, label=label)
        if (wire := self.wire_of(full, wire)) is not None:
            message, received, layout = encoded_scatter(wire, full.view(self.size, -1), self.empty)

            def finish(before: Work) -> Work:
                parts = layout.parts(before.wait(), self.size)
                decoded_sum(wire.format, parts, out, scale=scale, accumulate=accumulate)
                keep_for_current_stream(message, received)
                return FinishedWork(out)

            return self.staged(full, lambda: self.all_to_all(received, message, label=label), finish)
        nbytes = full.nbytes * (self.size - 1) // self.size
        return self.issue(Call("reduce_scatter", label, out, full, nbytes, scale, accumulate))

    def all_reduce(self, full: torch.Tensor, *, scale: float = 1.0, label: str, wire: Wire | None = None) -> Work:
        """``full = scale * sum over ranks of full``, in place: a reduce_scatter followed by an all_gather, to the bit.

        Any numel (not only multiples of ``size``).

        Communicates: 2 (size - 1) / size * full bytes received per rank; with ``wire`` the encoded bytes.
        """
        if (wire := self.wire_of(full, wire)) is not None:
            return encoded_all_reduce(self, self, full, scale=scale, label=label, wire=wire)
        return self.issue(Call("all_reduce", label, full, None, 2 * full.nbytes * (self.size - 1) // self.size, scale))

    def all_to_all(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        *,
        out_splits: Sequence[int] | None = None,
        source_splits: Sequence[int] | None = None,
        label: str,
    ) -> Work:
        """Send part ``r`` of ``source`` to rank ``r``; receive its part for this rank into part ``r`` of ``out``.

        Args:
            out_splits: elements of each part of ``out``; None: equal parts.
            source_splits: elements of each part of ``source``. Both or neither.

        Communicates: ``out`` without this rank's own part received per rank.
        """
        check_splits(out, out_splits, source, source_splits, self.size, label=label)
        own = out.numel() // self.size if out_splits is None else out_splits[self.rank]
        nbytes = (out.numel() - own) * out.itemsize
        return self.issue(
            Call("all_to_all", label, out, source, nbytes, out_splits=out_splits, source_splits=source_splits)
        )

    def send(self, tensor: torch.Tensor, peer: int, *, label: str) -> Work:
        """Send ``tensor`` to coordinate ``peer``, whose ``recv`` has the same numel, dtype and label.

        ``wait()`` does not wait for the peer; ``drain()`` waits until ``tensor`` may be overwritten. The n-th send to a
        peer matches its n-th receive from this rank, whatever else the two issue in between.
        """
        return self.batch([Message("send", tensor, peer, label)])

    def recv(self, tensor: torch.Tensor, peer: int, *, label: str) -> Work:
        """Receive ``tensor`` from coordinate ``peer``.

        Communicates: ``tensor`` received.
        """
        return self.batch([Message("recv", tensor, peer, label)])

    def batch(self, messages: Sequence[Message]) -> Work:
        """Begin sends and receives together: none of them waits for another one, and links carry both directions.

        Each matches a send or a receive of its peer as one of :meth:`send` or :meth:`recv` does, also where the peer
        has issued it alone. On NCCL a batch is one kernel: it ends, and what this rank issues after it begins, when all
        its messages have been sent and received.

        Args:
            messages: at least one.

        Returns: ``wait()`` returns the tensor of the last receive; ``drain()`` waits for all of them.
        Raises: UsageError: a peer is this rank, or not on the axis.
        Communicates: what is received. Recorded as one send or recv a message, sends first.
        """
        calls: list[Call] = []
        for verb, tensor, peer, label in sorted(messages, key=lambda message: message.verb == "recv"):
            check_peer(verb, peer, self.rank, self.size, label=label)
            calls.append(Call(verb, label, tensor, nbytes=tensor.nbytes if verb == "recv" else 0, peer=peer))
        if len(calls) == 1:
            return self.issue(calls[0])
        labels = " and ".join(dict.fromkeys(call.label for call in calls))
        return self.issue(
            Call("batch", labels, calls[-1].result, nbytes=sum(call.nbytes for call in calls), messages=tuple(calls))
        )

    def broadcast(self, tensor: torch.Tensor, source: int, *, label: str) -> Work:
        """Copy ``tensor`` of coordinate ``source`` into ``tensor`` of every rank, in place."""
        nbytes = 0 if source == self.rank else tensor.nbytes
        return self.issue(Call("broadcast", label, tensor, nbytes=nbytes, peer=source))

    def exchange(self, vector: torch.Tensor, *, label: str) -> Work:
        """All-gather a small vector (control messages: norms, flags, orders): the result is ``[size, numel]`` in rank
        order.

        Recorded separately from the collectives that move parameters and gradients.
        """
        return self.issue(exchange_of(vector, self.size, label))

    def exchange_on_host(self, numbers: Sequence[float], *, label: str) -> list[list[float]]:
        """Every rank's numbers, which its host knows, in rank order.

        Communicates: as :meth:`exchange`, 8 bytes a number.
        Order: blocks the host until every rank has called; it does not wait for the device.
        """
        vector = host_memory(torch.tensor(list(numbers), dtype=torch.float64, device="cpu"), is_pinned=False)
        result = host_memory(torch.empty(self.size, len(numbers), dtype=torch.float64, device="cpu"), is_pinned=False)
        rows = self.issue(exchange_of(vector, self.size, label)._replace(result=result)).wait()
        return rows.tolist() if self.backend.carries_values else [list(numbers)] * self.size

    def gather_objects(self, value: Any, *, label: str) -> Sequence[Any]:
        """Every rank's ``value`` (anything that JSON can hold), in rank order, on every rank.

        Order: blocks the host. For start-up, not for steps.
        """
        self._record_blocking("gather_objects", label)
        return self.backend.gather_objects(value, label=label)

    def barrier(self, *, label: str) -> None:
        """Block until every rank has called this."""
        self._record_blocking("barrier", label)
        self.backend.barrier(label=label)

    @property
    def blocking(self) -> Communicator:
        """The same communicator with calls that block: when one returns, the result is there and the source is free."""
        return _BlockingCommunicator(self)

    def gathered(self, tensor: torch.Tensor, *, label: str) -> torch.Tensor:
        """Every rank's tensor, of one shape on all ranks, in rank order. Shape: [size, *tensor.shape].

        Communicates: one all_gather. Order: blocks until peers have read ``tensor``, too.
        """
        full = tensor.new_empty((self.size, *tensor.shape))
        self.blocking.all_gather(full.view(-1), tensor.contiguous().view(-1), label=label)
        return full

    def drain(self) -> None:
        """Block until no peer reads any source of a collective that this rank has waited for."""
        self.backend.drain()

    def check(self) -> None:
        """Call after the host has read what a collective gave, before it acts on it.

        Where a rank fails, the kernels that wait for it end, and with them the host's wait for the value.

        Raises: CommError: the first error.
        """
        self.backend.check()

    def read(self, given: torch.Tensor, *, when_fake: float) -> list[float]:
        """As ``read_vector``, of what a collective gave; its elements in order. Raises: as ``check``."""
        values = read_vector(given.flatten(), when_fake=when_fake)
        self.check()
        return values

    def close(self) -> None:
        """Release groups, maps and threads. Idempotent."""
        self.backend.close()


class _BlockingCommunicator(Communicator):
    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm.backend, comm.recorder)
        self._comm = comm

    def issue(self, call: Call) -> Work:
        work = self._comm.issue(call)
        work.drain()
        return work

    def staged(self, tensor: torch.Tensor, first: Callable[[], Work], *steps: Step) -> Work:
        work = super().staged(tensor, first, *steps)
        work.drain()
        return work


def exchange_of(vector: torch.Tensor, size: int, label: str) -> Call:
    """The call that gathers ``vector`` of each of ``size`` ranks."""
    return Call("exchange", label, vector.new_empty(size, vector.numel()), vector, vector.nbytes * (size - 1))


def encoded_all_gather(
    axis: Communicator | Any, comm: Communicator, full: torch.Tensor, source: torch.Tensor, *, label: str, wire: Wire
) -> Work:
    """An all_gather along ``axis`` of the encoded bytes of ``source``, which are decoded into ``full``."""
    message, received, decode = encoded_gather(wire, source, full, axis.rank, axis.size, comm.empty)

    def finish(before: Work) -> Work:
        decode(before.wait())
        keep_for_current_stream(message, received)
        return FinishedWork(full)

    return comm.staged(full, lambda: axis.all_gather(received, message, label=label), finish)


def encoded_all_reduce(
    axis: Communicator | Any, comm: Communicator, full: torch.Tensor, *, scale: float, label: str, wire: Wire
) -> Work:
    """A reduce_scatter along ``axis`` and an all_gather of the sum, which is not rounded in between."""
    padded = full
    if full.numel() % axis.size:
        padded = torch.nn.functional.pad(full, (0, -full.numel() % axis.size))
    total = torch.empty(padded.numel() // axis.size, dtype=torch.float32, device=full.device)

    def gather(before: Work) -> Work:
        with wire.of_sum().padded(total.numel()) as of_sum:
            return axis.all_gather(padded, before.wait(), label=label, wire=of_sum)

    def finish(before: Work) -> Work:
        before.wait()
        keep_for_current_stream(total, padded)
        return FinishedWork(full if padded is full else full.copy_(padded[: full.numel()]))

    with wire.padded(padded.numel()) as of_ranks:
        work = axis.reduce_scatter(padded, total, scale=scale, label=label, wire=of_ranks)
    return comm.staged(full, lambda: work, gather, finish)


def own_range(full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Rank ``rank``'s range of ``full``: all ranges but the last few are of one size, so any numel works."""
    if size == 1:
        return full
    chunk = -(-full.numel() // size)
    return full[min(rank * chunk, full.numel()) : min((rank + 1) * chunk, full.numel())]


def split_parts(tensor: torch.Tensor, split_sizes: Sequence[int] | None, size: int) -> tuple[torch.Tensor, ...]:
    """``tensor`` as one part a rank: ``size`` equal parts, or parts of ``split_sizes`` elements."""
    sizes = [tensor.numel() // size] * size if split_sizes is None else list(split_sizes)
    return tuple(tensor.detach().split(sizes))


def check_divides(op: str, full: torch.Tensor, shard: torch.Tensor | None, size: int, *, label: str) -> None:
    """Raises: UsageError: ``full`` is not ``size`` times ``shard``."""
    if full.numel() % size or (shard is not None and shard.numel() * size != full.numel()):
        raise UsageError(
            f"{op} {label!r}: the full tensor has {full.numel()} elements and the shard "
            f"{'none' if shard is None else shard.numel()}, over {size} ranks",
            do="pad the full tensor to a multiple of the ranks, and give a shard of full numel / ranks.",
        )


def check_splits(
    out: torch.Tensor,
    out_splits: Sequence[int] | None,
    source: torch.Tensor,
    source_splits: Sequence[int] | None,
    size: int,
    *,
    label: str,
) -> None:
    """Raises: UsageError: the parts of one tensor do not add up to it, or only one of the two has split sizes."""
    if (out_splits is None) != (source_splits is None):
        raise UsageError(
            f"all_to_all {label!r}: only one of out_splits and source_splits is given",
            do="give both, or neither for equal parts.",
        )
    for tensor, sizes in ((out, out_splits), (source, source_splits)):
        if sizes is None:
            check_divides("all_to_all", tensor, None, size, label=label)
        elif len(sizes) != size or sum(sizes) != tensor.numel() or min(sizes) < 0:
            raise UsageError(
                f"all_to_all {label!r}: split sizes {list(sizes)} for a tensor of {tensor.numel()} elements and "
                f"{size} ranks",
                do="give one split size for each rank; their sum is the number of elements.",
            )


def check_peer(op: str, peer: int, rank: int, size: int, *, label: str) -> None:
    """Raises: UsageError: ``peer`` is this rank, or not on the axis."""
    if peer == rank or not 0 <= peer < size:
        raise UsageError(
            f"{op} {label!r}: rank {rank} of {size} names peer {peer}",
            do="name the coordinate of another rank on the axis.",
        )


def closed_error(axis: str, op: str, label: str) -> CommError:
    return CommError(
        f"{op} {label!r} on axis {axis!r}: the communicator is closed", do="issue no collective after close()."
    )


def calls_differ(axis: str, about: str, *issued: tuple[Sequence[int], object]) -> CommError:
    """The error of ranks that disagree. Args: ``issued``: ranks on the axis, and the call that each of them issued."""
    texts = [f"rank{'s' if len(ranks) > 1 else ''} {listed_ranks(ranks)} issued {call}" for ranks, call in issued]
    texts[0] = texts[0].replace(" issued", " on the axis issued", 1)
    return CommError(
        f"the ranks of axis {axis!r} disagree{about}: {', '.join(texts)}",
        do="make every rank issue the same collectives in the same order; look for a branch that depends on the rank "
        "or on the data.",
        code="comm-mismatch",
    )


def split_mismatch(axis: str, label: str, rank: int, peer: int, sent: int, expected: int) -> CommError:
    """The error of two ranks whose split sizes of one all_to_all differ."""
    return CommError(
        f"all_to_all {label!r} on axis {axis!r}: rank {peer} sends {sent} elements to rank {rank}, which expects "
        f"{expected}",
        do="make out_splits[peer] of each rank equal to source_splits[rank] of each peer.",
        code="comm-mismatch",
    )


def gather_json(value: Any, exchange: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    """Every rank's ``value`` by two exchanges: of the lengths, then of the padded JSON texts."""
    try:
        text = json.dumps(value).encode()
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"a {type(value).__name__} cannot be sent to other ranks: {error}",
            do="send only what JSON holds: numbers, strings, lists, and dicts with string keys.",
        ) from error
    lengths = exchange(torch.tensor([len(text)], dtype=torch.int64, device="cpu")).flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = exchange(padded)
    return [json.loads(rows[rank, :length].numpy().tobytes().decode()) for rank, length in enumerate(map(int, lengths))]

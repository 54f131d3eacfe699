"""The flight recorder: what this rank issued, on which axis, in which order, and how many bytes it received.

It is always on. The last calls are kept in a ring; ``with recorder.recording() as entries`` keeps all of them:

    with world.recorder.recording() as entries:
        engine.step()
    assert sum(entry.nbytes for entry in entries if entry.kind == "data") == 3 * parameter_bytes * (n - 1) // n
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from shoal.comm.encoded import all_gather_encoded, reduce_scatter_encoded
from shoal.comm.finished import FinishedWork
from shoal.comm.protocol import Backend, Work
from shoal.comm.wire import WireFormat

Result = TypeVar("Result")

RING = 1024  # calls: the last few steps of a large model


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


class Entry(NamedTuple):
    """One collective, send or receive as this rank issued it."""

    seq: int
    axis: str
    op: str
    label: str
    nbytes: int  # received by this rank, by the formula of the protocol, rounded down
    dtype: torch.dtype | None
    kind: Literal["data", "control"]  # parameters and gradients, or everything else


class Recorder:
    """The calls of one rank over all its axes."""

    def __init__(self, ring: int = RING) -> None:
        self.num_issued = 0
        self._ring: deque[Entry] = deque(maxlen=ring)
        self._recordings: list[list[Entry]] = []

    def add(
        self,
        axis: str,
        op: str,
        label: str,
        nbytes: int,
        dtype: torch.dtype | None,
        kind: Literal["data", "control"],
    ) -> None:
        entry = Entry(self.num_issued, axis, op, label, nbytes, dtype, kind)
        self.num_issued += 1
        self._ring.append(entry)
        if self._recordings:
            for entries in self._recordings:
                entries.append(entry)

    @contextmanager
    def recording(self) -> Iterator[list[Entry]]:
        """Collect every call that is issued inside the block."""
        entries: list[Entry] = []
        self._recordings.append(entries)
        try:
            yield entries
        finally:
            self._recordings = [kept for kept in self._recordings if kept is not entries]

    @property
    def last(self) -> list[Entry]:
        """The calls still in the ring, oldest first."""
        return list(self._ring)

    def table(self, entries: Sequence[Entry] | None = None) -> str:
        """``entries`` (by default the ring) as text, a line a call."""
        rows = [("seq", "axis", "op", "label", "bytes", "dtype", "kind")]
        rows += [
            (
                str(entry.seq), entry.axis, entry.op, entry.label, f"{entry.nbytes:,}",
                str(entry.dtype).removeprefix("torch.") if entry.dtype else "-", entry.kind,
            )
            for entry in (self._ring if entries is None else entries)
        ]  # fmt: skip
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join(
            "  ".join(
                cell.rjust(width) if column in (0, 4) else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        )


class RecordedCommunicator:
    """The communicator of one axis: records every call, then issues it on the backend.

    A call with a wire format is recorded as the collective that it is made of, with the encoded bytes. Inside of
    ``shapes_only`` nothing is sent or recorded.
    """

    def __init__(self, backend: Backend, recorder: Recorder) -> None:
        self.axis = backend.axis
        self.rank = backend.rank
        self.size = backend.size
        self.recorder = recorder
        self.backend = backend

    def issue(
        self,
        op: str,
        label: str,
        nbytes: int,
        tensor: torch.Tensor | None,
        call: Callable[[], Result],
        kind: Literal["data", "control"] = "data",
    ) -> Result:
        """Record one call of the backend, and issue it.

        Args:
            nbytes: that this rank receives.
            tensor: what is sent; of all_gather, and of reduce_scatter, all ranks' shards.

        Raises: RuntimeError: inside of ``shapes_only``, for what is called for values.
        """
        if _IS_FOR_SHAPES.get():
            raise RuntimeError(f"it calls {op} ({label}) on {self.axis!r}, whose result has no shape of its own")
        self.recorder.add(self.axis, op, label, nbytes, None if tensor is None else tensor.dtype, kind)
        return call()

    @property
    def scratch_nbytes(self) -> int:
        return self.backend.scratch_nbytes

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if _IS_FOR_SHAPES.get():
            return torch.empty(numel, dtype=dtype, device=device)  # under a FakeTensorMode a fake
        return self.backend.empty(numel, dtype, device)

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor | None = None, *, label: str, wire: WireFormat | None = None
    ) -> Work:
        if _IS_FOR_SHAPES.get():
            return FinishedWork(full)
        if wire is not None and self.size > 1:
            return all_gather_encoded(self, full, shard, wire, label=label)
        call = partial(self.backend.all_gather, full, shard, label=label)
        return self.issue("all_gather", label, full.nbytes * (self.size - 1) // self.size, full, call)

    def reduce_scatter(
        self,
        full: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float = 1.0,
        accumulate: bool = False,
        label: str,
        wire: WireFormat | None = None,
    ) -> Work:
        if _IS_FOR_SHAPES.get():
            return FinishedWork(out)
        if wire is not None and self.size > 1:
            return reduce_scatter_encoded(self, full, out, wire, scale=scale, accumulate=accumulate, label=label)
        call = partial(self.backend.reduce_scatter, full, out, scale=scale, accumulate=accumulate, label=label)
        return self.issue("reduce_scatter", label, full.nbytes * (self.size - 1) // self.size, full, call)

    def all_reduce(self, full: torch.Tensor, *, scale: float = 1.0, label: str) -> Work:
        if _IS_FOR_SHAPES.get():
            return FinishedWork(full)
        call = partial(self.backend.all_reduce, full, scale=scale, label=label)
        return self.issue("all_reduce", label, 2 * full.nbytes * (self.size - 1) // self.size, full, call)

    def all_to_all(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        *,
        out_splits: Sequence[int] | None = None,
        source_splits: Sequence[int] | None = None,
        label: str,
    ) -> Work:
        if _IS_FOR_SHAPES.get():
            return FinishedWork(out)
        own = out.numel() // self.size if out_splits is None else out_splits[self.rank]
        splits = {"out_splits": out_splits, "source_splits": source_splits}
        call = partial(self.backend.all_to_all, out, source, **splits, label=label)
        return self.issue("all_to_all", label, (out.numel() - own) * out.itemsize, source, call)

    def send(self, tensor: torch.Tensor, peer: int, *, label: str) -> Work:
        return self.issue("send", label, 0, tensor, lambda: self.backend.send(tensor, peer, label=label))

    def recv(self, tensor: torch.Tensor, peer: int, *, label: str) -> Work:
        return self.issue("recv", label, tensor.nbytes, tensor, lambda: self.backend.recv(tensor, peer, label=label))

    def broadcast(self, tensor: torch.Tensor, source: int, *, label: str) -> Work:
        nbytes = 0 if source == self.rank else tensor.nbytes
        call = partial(self.backend.broadcast, tensor, source, label=label)
        return self.issue("broadcast", label, nbytes, tensor, call, "control")

    def exchange(self, vector: torch.Tensor, *, label: str) -> Work:
        call = partial(self.backend.exchange, vector, label=label)
        return self.issue("exchange", label, vector.nbytes * (self.size - 1), vector, call, "control")

    def gather_objects(self, value: Any, *, label: str) -> Sequence[Any]:
        call = partial(self.backend.gather_objects, value, label=label)
        return self.issue("gather_objects", label, 0, None, call, "control")

    def barrier(self, *, label: str) -> None:
        self.issue("barrier", label, 0, None, lambda: self.backend.barrier(label=label), "control")

    def drain(self) -> None:
        self.backend.drain()

    def close(self) -> None:
        self.backend.close()

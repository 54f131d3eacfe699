"""What a communicator can do: the only way from Shoal's code to another rank.

A communicator is bound to one axis of the mesh. Callers say what to move, never which group. All tensors are 1-D and
contiguous; ``shard numel = full numel / size``; rank ``r`` owns ``full[r * shard : (r + 1) * shard]``. Every rank
issues the same collectives in the same order; sends and receives are ordered between the two ranks only.

A collective is *issued* by the call (which does not block) and *completed* by ``Work.wait()``. Between the two the
source must not be written. After ``wait()`` the result is there, but peers may still be reading this rank's source:
call ``Work.drain()``, or ``Communicator.drain()`` for all of them, before overwriting it.

Sums run in rank order in fp32 (fp64 for fp64), are multiplied by ``scale`` in fp32 and rounded once to the dtype of the
result, so that reduce_scatter and all_reduce give the same bits (NCCL sums in an order of its own: see ``nccl``).

After the first error (a failed rank, a time-out, calls that differ) every further wait raises it at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from shoal.comm.wire import WireFormat


@runtime_checkable
class Work(Protocol):
    """A collective, send or receive under way."""

    def wait(self) -> torch.Tensor:
        """Block until the result is there (on CUDA: make the current stream wait for it); return it. Idempotent."""
        ...

    def drain(self) -> None:
        """Block until this rank's source may be overwritten. Implies ``wait()``. Idempotent."""
        ...


class Backend(Protocol):
    """The ranks along one axis, over one means of transport."""

    axis: str
    rank: int  # this rank's coordinate on the axis
    size: int

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of the scratch for sums, which is reused between calls, without tensors of :meth:`empty`."""
        ...

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A 1-D tensor in memory that this communicator can send from without a copy (shared memory, registered
        memory).
        """
        ...

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor | None = None, *, label: str) -> Work:
        """Gather every rank's shard into ``full``. Without ``shard``, this rank's range of ``full`` is the shard.

        Communicates: (size - 1) / size * full bytes received per rank.
        """
        ...

    def reduce_scatter(
        self, full: torch.Tensor, out: torch.Tensor, *, scale: float = 1.0, accumulate: bool = False, label: str
    ) -> Work:
        """``out = scale * sum over ranks of full[own range]``, or ``out += ...`` with ``accumulate``.

        ``out`` has shard numel, may be of another dtype than ``full`` and may be this rank's own range of ``full``
        (then without ``accumulate``). The other ranges of ``full`` have undefined values afterwards.

        Communicates: (size - 1) / size * full bytes received per rank.
        """
        ...

    def all_reduce(self, full: torch.Tensor, *, scale: float = 1.0, label: str) -> Work:
        """``full = scale * sum over ranks of full``, in place: a reduce_scatter followed by an all_gather, to the bit.

        Any numel (not only multiples of ``size``).

        Communicates: 2 (size - 1) / size * full bytes received per rank.
        """
        ...

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
        ...

    def send(self, tensor: torch.Tensor, peer: int, *, label: str) -> Work:
        """Send ``tensor`` to coordinate ``peer``, whose ``recv`` has the same numel, dtype and label.

        ``wait()`` does not wait for the peer; ``drain()`` waits until ``tensor`` may be overwritten. The n-th send to a
        peer matches its n-th receive from this rank, whatever else the two issue in between.
        """
        ...

    def recv(self, tensor: torch.Tensor, peer: int, *, label: str) -> Work:
        """Receive ``tensor`` from coordinate ``peer``.

        Communicates: ``tensor`` received.
        """
        ...

    def broadcast(self, tensor: torch.Tensor, source: int, *, label: str) -> Work:
        """Copy ``tensor`` of coordinate ``source`` into ``tensor`` of every rank, in place."""
        ...

    def exchange(self, vector: torch.Tensor, *, label: str) -> Work:
        """All-gather a small vector (control messages: norms, flags, orders): the result is ``[size, numel]`` in rank
        order.

        Recorded separately from the collectives that move parameters and gradients.
        """
        ...

    def gather_objects(self, value: Any, *, label: str) -> Sequence[Any]:
        """Every rank's ``value`` (anything that JSON can hold), in rank order, on every rank.

        Order: blocks the host. For start-up, not for steps.
        """
        ...

    def barrier(self, *, label: str) -> None:
        """Block until every rank has called this."""
        ...

    def drain(self) -> None:
        """Block until no peer reads any source of a collective that this rank has waited for."""
        ...

    def close(self) -> None:
        """Release groups, maps and threads. Idempotent."""
        ...


@runtime_checkable
class Communicator(Backend, Protocol):
    """The ranks along one axis: what :meth:`World.communicator` returns."""

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor | None = None, *, label: str, wire: WireFormat | None = None
    ) -> Work:
        """As a backend's. With ``wire``, the shards are sent encoded (on one rank nothing is sent, nor encoded).

        Every rank then gets the decoded values, this rank's own range included, so that all copies are equal.

        Communicates: with ``wire``: the encoded bytes of the other ranks' shards received per rank.
        """
        ...

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
        """As a backend's. With ``wire``, each range of ``full`` is encoded and sent to its owner by an all_to_all.

        The owner decodes the ranges to fp32 and sums them in rank order.

        Communicates: with ``wire``: the encoded bytes of this rank's range from every other rank received per rank.
        """
        ...

"""What a communicator can do: the seam between Shoal and every other rank.

A communicator is bound to one axis of the mesh. Callers say what is to be moved, never which group. All tensors are 1-D
and contiguous; ``shard numel = full numel / size``; rank ``r`` owns ``full[r * shard : (r + 1) * shard]``. Every rank
issues the same calls in the same order.

A collective is *issued* by the call (which does not block) and *completed* by ``Work.wait()``. Between the two the
source must not be written. After ``wait()`` the result is there, but peers may still be reading this rank's source:
call ``Work.drain()``, or ``Communicator.drain()`` for all of them, before overwriting it.

Sums run in rank order in fp32 (fp64 for fp64), are multiplied by ``scale`` in fp32 and rounded once to the dtype of the
result, so that reduce_scatter and all_reduce give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch


@runtime_checkable
class Work(Protocol):
    """A collective under way."""

    def wait(self) -> torch.Tensor:
        """Block until the result is there (on CUDA: until the current stream waits for it); return it. Idempotent."""
        ...

    def drain(self) -> None:
        """Block until this rank's source may be overwritten. Implies ``wait()``. Idempotent."""
        ...


@runtime_checkable
class Communicator(Protocol):
    """The ranks along one axis."""

    axis: str
    rank: int  # this rank's coordinate on the axis
    size: int

    @property
    def scratch_nbytes(self) -> int:
        """Bytes that it keeps from call to call for its own sums; what callers got by :meth:`empty` is theirs."""
        ...

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A 1-D tensor in memory that this communicator can send from without a copy (shared memory, registered
        memory).
        """
        ...

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor | None = None, *, label: str) -> Work:
        """Fill ``full`` with every rank's shard. Without ``shard``, this rank's range of ``full`` holds it already.

        Communicates: (size - 1) / size * full bytes received per rank.
        """
        ...

    def reduce_scatter(
        self, full: torch.Tensor, out: torch.Tensor, *, scale: float = 1.0, accumulate: bool = False, label: str
    ) -> Work:
        """``out = scale * sum over ranks of full[own range]``, or ``out += ...`` with ``accumulate``.

        ``out`` has shard numel, may be of another dtype than ``full`` and may be this rank's own range of ``full``
        (then without ``accumulate``). The other ranges of ``full`` are left as they were or clobbered: not to be read
        again.

        Communicates: (size - 1) / size * full bytes received per rank.
        """
        ...

    def all_reduce(self, full: torch.Tensor, *, scale: float = 1.0, label: str) -> Work:
        """``full = scale * sum over ranks of full``, in place: a reduce_scatter followed by an all_gather, to the bit.

        Any numel (not only multiples of ``size``).

        Communicates: 2 (size - 1) / size * full bytes received per rank.
        """
        ...

    def broadcast(self, tensor: torch.Tensor, source: int, *, label: str) -> Work:
        """Copy ``tensor`` of coordinate ``source`` into ``tensor`` of every rank, in place."""
        ...

    def exchange(self, vector: torch.Tensor, *, label: str) -> Work:
        """All-gather a small vector (control messages: norms, flags, orders): the result is ``[size, numel]`` in rank
        order.

        Recorded apart from the collectives that move parameters and gradients.
        """
        ...

    def gather_objects(self, value: Any, *, label: str) -> Sequence[Any]:
        """Every rank's ``value`` (anything that JSON can hold), in rank order, on every rank.

        Blocks. For start-up only.
        """
        ...

    def barrier(self, *, label: str) -> None:
        """Block until every rank has come."""
        ...

    def drain(self) -> None:
        """Block until no peer reads any source of a collective that this rank has waited for."""
        ...

    def close(self) -> None:
        """Give back groups, maps and threads. Idempotent."""
        ...

"""A flat buffer and its one verb: ``redistribute`` moves it from one placement to another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from shoal.comm.protocol import FinishedWork, Work
from shoal.comm.wire import WireFormat
from shoal.sharding.placement import Move, Placement, moves


class Axis(Protocol):
    """What moves a buffer along one mesh axis: a ``Communicator``, or ``SparseSum``."""

    rank: int
    size: int

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor | None = None, *, label: str, wire: WireFormat | None = None
    ) -> Work: ...
    def all_reduce(self, full: torch.Tensor, *, scale: float = 1.0, label: str) -> Work: ...
    def reduce_scatter(
        self,
        full: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float = 1.0,
        accumulate: bool = False,
        label: str,
        wire: WireFormat | None = None,
    ) -> Work: ...


class Redistribution:
    """The collectives of one ``redistribute``, one after the other: each needs the result of the one before."""

    def __init__(
        self, buffer: FlatBuffer, todo: tuple[Move, ...], scale: float, accumulate: bool, wire: WireFormat | None
    ) -> None:
        self._buffer = buffer
        self._todo = todo[1:]
        self._wire = wire
        self._is_first_in_place = todo[0].collective == "all_reduce"  # peers read what the next one overwrites
        self._first = self._last = buffer.issue(todo[0], scale=scale, accumulate=accumulate, wire=wire)

    def wait(self) -> torch.Tensor:
        """Wait for the collective under way, then run those that follow. Returns the buffer's memory."""
        result = self._last.wait()
        todo, self._todo = self._todo, ()
        if todo and self._is_first_in_place:
            self._first.drain()
        for move in todo:
            self._last = self._buffer.issue(move, wire=self._wire)
            self._last.drain()  # the next collective, and the caller, overwrite what peers read
            result = self._last.wait()
        return result

    def drain(self) -> None:
        """Wait until the sources may be overwritten, too."""
        self.wait()
        self._first.drain()


@dataclass(eq=False)
class FlatBuffer:
    """One flat tensor, spread over mesh axes.

    Args:
        axes: by axis name, what moves the buffer along it. An axis that is not named here has one rank.
        placement: where the values are now. Where an axis shards, ``shard`` holds them, else ``full``.
        full: the whole buffer. Shape: [numel].
        shard: this rank's range; may be a view of ``full``, or None where nothing moves to or from it. Where it is
            None and the source of an all-gather, ``full`` holds this rank's range already.
    """

    label: str
    axes: Mapping[str, Axis]
    placement: Placement
    full: torch.Tensor
    shard: torch.Tensor | None = None

    def redistribute(
        self, to: Placement, *, scale: float = 1.0, accumulate: bool = False, wire: WireFormat | None = None
    ) -> Work:
        """Move the values to another placement. Does not block the host.

        Args:
            scale: the sum over the first axis is multiplied by it.
            accumulate: a reduce-scatter adds to ``shard``.
            wire: how all-gathers and reduce-scatters encode what they send; an all-reduce sends values as they are.

        Raises: PlacementError: on some axis no single collective leads from here to ``to``.
        Communicates: per axis whose placement changes the collective that ``placement.moves`` names.
        Order: the source must not be written before ``wait()``; peers may read it until ``drain()``.
        """
        todo = tuple(move for move in moves(self.placement, to) if move.axis in self.axes)
        self.placement = to
        if not todo:
            return FinishedWork(self.memory)
        return Redistribution(self, todo, scale, accumulate, wire)

    @property
    def memory(self) -> torch.Tensor:
        """Where the values are."""
        return self.shard if self.placement.is_sharded and self.shard is not None else self.full

    def issue(
        self, move: Move, *, scale: float = 1.0, accumulate: bool = False, wire: WireFormat | None = None
    ) -> Work:
        """Start one move. Called by ``redistribute`` alone."""
        axis = self.axes[move.axis]
        if move.collective == "all_gather":
            return axis.all_gather(self.full, self.shard, label=self.label, wire=wire)
        if move.collective == "reduce_scatter":
            assert self.shard is not None
            return axis.reduce_scatter(
                self.full, self.shard, scale=scale, accumulate=accumulate, label=self.label, wire=wire
            )
        if move.collective == "all_reduce":
            return axis.all_reduce(self.memory, scale=scale, label=self.label)
        if self.shard is not None and self.shard.data_ptr() != self.full.data_ptr():
            numel = self.shard.numel()
            self.shard.copy_(self.full[axis.rank * numel : (axis.rank + 1) * numel])
        return FinishedWork(self.memory)

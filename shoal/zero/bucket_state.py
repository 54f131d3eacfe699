"""What the optimizer holds of one bucket: this rank's range of master weights, its gradient, and where they are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from shoal.memory.bucket import ParameterBucket
from shoal.memory.layout import Segment
from shoal.zero.gradient import BucketGradient
from shoal.zero.unit import Unit

if TYPE_CHECKING:
    from shoal.zero.host_lane import HostLane
    from shoal.zero.shelf import StateShelf


@dataclass(eq=False)
class Piece:
    """A range of one bucket's owned master weights that the optimizer updates as one tensor."""

    param: torch.nn.Parameter  # 1-D view of the master weights
    group: int
    start: int  # in the owned range
    stop: int
    segments: tuple[Segment, ...]


@dataclass(eq=False)
class BucketState:
    """What the optimizer holds of one trainable bucket.

    ``master`` is this rank's owned range, in the master dtype; it is the parameters' own memory where that dtype is
    theirs.
    """

    unit: Unit
    bucket: ParameterBucket
    gradient: BucketGradient
    master: torch.Tensor  # [owned numel]
    has_own_master: bool
    pieces: list[Piece] = field(default_factory=list)
    is_apart: bool = False  # master and optimizer state rest in memory that the device does not compute in
    lane: HostLane | None = None  # where apart: what is updated beside the device's work
    shelf: StateShelf | None = None  # where master and optimizer state rest on a disk
    before_change: Callable[[], None] | None = None  # somebody is still reading master, state or shard

    def at_hand(self) -> AbstractContextManager[None]:
        """Hold master and optimizer state in memory, wherever they rest; what changes in them is kept."""
        self.settle()
        return nullcontext() if self.shelf is None else self.shelf.at_hand(self)

    def settle(self) -> None:
        """Have everything as the last step leaves it, also where its update is still under way, free to be changed."""
        self.let_go()
        if self.lane is not None:
            self.lane.settle(self)

    def let_go(self) -> None:
        """Wait until nobody reads master weights, optimizer state and shard any more (an asynchronous save)."""
        if self.before_change is not None:
            self.before_change()
            self.before_change = None

    @torch.no_grad()
    def follow(self, start: int, stop: int, new: torch.Tensor) -> None:
        """Parameters in ``[start, stop)`` of the owned range were set to ``new``: let own master weights follow.

        Where a parameter is what its master weight rounds to, the master keeps its precision.
        """
        if not self.has_own_master:
            self.settle()
            return
        with self.at_hand():
            was = self.master[start:stop].to(new.device)
            self.master[start:stop].copy_(torch.where(new != was.to(new.dtype), new.to(was.dtype), was))

    @property
    def owned_parameters(self) -> torch.Tensor:
        """This rank's owned range of the parameters themselves, as the last step leaves it. Shape: [owned numel]."""
        self.settle()
        return self.resting_parameters

    @property
    def resting_parameters(self) -> torch.Tensor:
        """The memory of ``owned_parameters``, whatever is under way."""
        if self.bucket.is_sharded:
            return self.bucket.shard
        return self.bucket.full[self.bucket.begin : self.bucket.end]

    @property
    def is_native(self) -> bool:
        return self.gradient.is_native

"""Ranks that can read each other's memory: one rank's view of its group.

Each rank posts its calls (operation, label, where its source tensor lies) and marks how far it is with each; peers poll
these words. This file defines the words only. ``direct`` decides what is read and summed, and when. ``threads`` keeps
the words in Python objects, ``shm`` in shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

import torch


class GroupCall(NamedTuple):
    """One operation as a rank issued it. Its peers must issue the same."""

    op: str
    label: str
    numel: int
    dtype: torch.dtype
    root: int = -1  # of a broadcast

    def __str__(self) -> str:
        source = f" from {self.root}" if self.root >= 0 else ""
        return f"{self.op} {self.label!r}{source} of {self.numel} x {str(self.dtype).removeprefix('torch.')}"


class Mark(IntEnum):
    """How far a rank is with a call that it has posted."""

    REDUCED = 0  # its range of full has the sum; peers may copy it
    DONE = 1  # it no longer reads its peers' memory for this call


class MemoryGroup(Protocol):
    """One rank's view of a group of ranks that can read each other's memory."""

    rank: int
    size: int
    capacity: int  # calls that may be open at once
    timeout: float  # seconds without progress after which a wait raises
    must_drain_to_close: bool  # True if peers lose access to this rank's memory when it leaves

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor that peers can read."""
        ...

    def readable(self, source: torch.Tensor) -> torch.Tensor:
        """``source`` itself if peers can read it, else a copy that they can read."""
        ...

    def channel(self, source: int, target: int) -> MemoryGroup:
        """The group of two, ``source`` (0) and ``target`` (1), for sends from one to the other. Does not block."""
        ...

    def post(self, number: int, call: GroupCall, source: torch.Tensor) -> None:
        """Announce this rank's call. ``source`` is readable and stays so until all peers are done."""
        ...

    def has_posted(self, peer: int, number: int) -> bool: ...

    def mismatch(self, peer: int, number: int, call: GroupCall) -> str | None:
        """None if ``peer`` posted the same call, else the call that it posted."""
        ...

    def source(self, peer: int, number: int, dtype: torch.dtype) -> torch.Tensor:
        """The tensor that ``peer`` posted, in its own memory."""
        ...

    def mark(self, number: int, mark: Mark) -> None: ...

    def has_marked(self, peer: int, number: int, mark: Mark) -> bool: ...

    def ticket(self) -> int:
        """The present state, for :meth:`pause`. Take it before polling."""
        ...

    def pause(self, ticket: int, attempt: int) -> None:
        """Let other threads and processes run; return soon after something changed since ``ticket``."""
        ...

    def check(self, missing: Sequence[int]) -> None:
        """Raises: RankFailedError: a rank failed, or one of ``missing`` has ended."""
        ...

    def has_left(self, peer: int) -> bool:
        """True if ``peer`` has ended, normally or not. It then reads nothing any more."""
        ...

    def last_calls(self) -> list[str]:
        """The call that each rank of the group issued last, as text."""
        ...

    def close(self) -> None: ...

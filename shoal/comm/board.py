"""The board on which the ranks of one group post their calls: what each asked for, and how far it is with it.

A board only holds words. What is read and summed, and when, is the communicator's matter (``direct``); where the words
lie is that of the two kinds of board: objects of one process (``threads``) or shared memory (``shm``).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

import torch


class Call(NamedTuple):
    """What a rank asked for; peers must ask for the same."""

    op: str
    label: str
    numel: int
    dtype: torch.dtype
    root: int = -1  # of a broadcast

    def __str__(self) -> str:
        source = f" from {self.root}" if self.root >= 0 else ""
        return f"{self.op} {self.label!r}{source} of {self.numel} x {str(self.dtype).removeprefix('torch.')}"


class Mark(Enum):
    """How far a rank is with a call it has posted."""

    REDUCED = 0  # its range of full holds the sum; peers may copy it
    DONE = 1  # it reads no other rank's memory for this call any more


class Board(Protocol):
    """Where the ranks of one group post their calls; one rank's view of it."""

    rank: int
    size: int
    capacity: int  # calls that may be open at once
    timeout: float  # seconds without any progress after which a wait gives up
    must_drain_to_close: bool  # is this rank's memory lost to its peers when it leaves?

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor that peers can read."""
        ...

    def readable(self, source: torch.Tensor) -> torch.Tensor:
        """``source`` itself where peers can read it, else a copy that they can."""
        ...

    def post(self, number: int, call: Call, source: torch.Tensor) -> None:
        """Announce this rank's call; ``source`` is readable and stays so until all peers are done."""
        ...

    def has_posted(self, peer: int, number: int) -> bool: ...

    def mismatch(self, peer: int, number: int, call: Call) -> str | None:
        """None if ``peer`` posted the same call, else what it posted."""
        ...

    def source(self, peer: int, number: int, dtype: torch.dtype) -> torch.Tensor:
        """The tensor that ``peer`` posted, in its own memory."""
        ...

    def mark(self, number: int, mark: Mark) -> None: ...

    def has_marked(self, peer: int, number: int, mark: Mark) -> bool: ...

    def ticket(self) -> int:
        """To be taken before looking at the board, and handed to :meth:`pause`."""
        ...

    def pause(self, ticket: int, attempt: int) -> None:
        """Let others run; return soon after something changed since ``ticket``."""
        ...

    def check(self, missing: Sequence[int]) -> None:
        """Raises: RankFailedError: a rank failed, or one of ``missing`` is gone for good."""
        ...

    def has_left(self, peer: int) -> bool:
        """Is ``peer`` gone, in good order or not? It reads nothing any more."""
        ...

    def last_calls(self) -> list[str]:
        """What each rank of the group issued last, in words."""
        ...

    def close(self) -> None: ...

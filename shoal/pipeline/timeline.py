"""What each rank ran and when: the data of a simulated or a measured run of a pipeline schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shoal.pipeline.schedule import Action


class TimedAction(NamedTuple):
    """An action with its start and end, in seconds or in the unit of a simulation."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The actions of each rank with their times. Sends, receives and reductions may be among them.

    Args:
        ranks: by rank, in order of time.
    """

    name: str
    ranks: tuple[tuple[TimedAction, ...], ...]

    @property
    def start(self) -> float:
        return min((timed.start for rank in self.ranks for timed in rank), default=0.0)

    @property
    def end(self) -> float:
        return max((timed.end for rank in self.ranks for timed in rank), default=0.0)

    @cached_property
    def bubble(self) -> float:
        """The part of the ranks' time, from the first start to the last end, in which they do not compute."""
        return self._idle(self.end - self.start)

    @cached_property
    def own_bubble(self) -> float:
        """The same, with the longest time of one rank from its own first start to its own last end.

        Papers on zero-bubble schedules measure it so: there a rank begins its next step when it is done with this one.
        Source: Zero Bubble Pipeline Parallelism (arXiv:2401.10241).
        """
        return self._idle(max((rank[-1].end - rank[0].start for rank in self.ranks if rank), default=0.0))

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """By rank, the most micro-batches whose activations it holds at once, counted for each of its pipeline stages.

        They are held from F to the end of B, or of W where the backward is split.
        """
        return tuple(map(_peak, self.ranks))

    def _idle(self, duration: float) -> float:
        computing = sum(timed.end - timed.start for rank in self.ranks for timed in rank if timed.action.kind in "FBIW")
        return 1.0 - computing / (duration * len(self.ranks)) if duration else 0.0


def _peak(rank: Sequence[TimedAction]) -> int:
    held = peak = 0
    for timed in rank:
        held += {"F": 1, "B": -1, "W": -1}.get(timed.action.kind, 0)
        peak = max(peak, held)
    return peak

"""Which experts of a layer a forward uses: the parameters of the others need not be gathered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from shoal.comm.protocol import Communicator
from shoal.device import read_vector


class ExpertUsage:
    """The experts of one layer that got a row, on any of the ranks that gather their parameters together.

    Args:
        comm: the ranks that hold shards of the same experts.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._used: tuple[bool, ...] | None = None

    @property
    def is_running(self) -> bool:
        """True if the experts run."""
        return self._used is not None

    @contextmanager
    def of(self, counts: Sequence[int], device: torch.device) -> Iterator[None]:
        """Run the experts inside the block.

        Args:
            counts: this rank's rows of each expert.
            device: of the rows.

        Communicates: along ``comm``, an exchange of 8 bytes an expert. Order: it blocks the host.
        """
        used = tuple(count > 0 for count in counts)
        if self._comm.size > 1:
            mine = torch.tensor(list(counts), dtype=torch.int64, device=device)
            of_all = self._comm.exchange(mine, label="used experts").wait()
            used = tuple(total > 0 for total in read_vector(of_all.sum(0), when_fake=1.0))
        before, self._used = self._used, used
        try:
            yield
        finally:
            self._used = before

    def used(self, place: int | None = None) -> tuple[bool, ...] | None:
        """For each expert, True if the forward that runs uses it. None: the experts do not run.

        Args:
            place: of one expert, which is asked for alone; None: all of them.
        """
        if self._used is None or place is None:
            return self._used
        return (self._used[place],)

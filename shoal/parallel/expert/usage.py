"""Which experts of a list a forward uses: the parameters of the others need not be gathered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from shoal.comm.protocol import Communicator
from shoal.device import read_vector


class ExpertUsage:
    """The experts of one list that got a row, on any of the ranks that gather their parameters together.

    Args:
        comm: the ranks that hold shards of the same experts.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._is_used: Sequence[bool] | None = None

    @contextmanager
    def of(self, counts: Sequence[int], device: torch.device) -> Iterator[None]:
        """Run the list inside the block.

        Args:
            counts: this rank's rows of each expert.
            device: of the rows.

        Communicates: along ``comm``, an exchange of 8 bytes an expert. Order: it blocks the host.
        """
        used = [count > 0 for count in counts]
        if self._comm.size > 1:
            mine = torch.tensor(list(counts), dtype=torch.int64, device=device)
            of_all = self._comm.exchange(mine, label="used experts").wait()
            used = [total > 0 for total in read_vector(of_all.sum(0), when_fake=1.0)]
        before, self._is_used = self._is_used, used
        try:
            yield
        finally:
            self._is_used = before

    def is_used(self, place: int) -> bool | None:
        """Does the forward that runs use the expert at this place of the list? None: the list does not run."""
        return None if self._is_used is None else self._is_used[place]

"""How many samples a step has: micro-batch x accumulation steps x data-parallel ranks."""

from __future__ import annotations

from shoal.errors import ConfigError


class Batch:
    """The sizes of one engine's batches.

    >>> batch = Batch(micro=4, num_micro=2, num_ranks=8)
    >>> batch.total
    64
    >>> batch.set_total(96)
    >>> batch.num_micro
    3

    Args:
        micro: samples of one micro-batch of one rank.
        num_micro: micro-batches of one step (accumulation steps).
        num_ranks: data-parallel ranks.
    """

    def __init__(self, *, micro: int, num_micro: int, num_ranks: int) -> None:
        self.micro = micro
        self.num_micro = num_micro
        self.num_ranks = num_ranks

    @property
    def total(self) -> int:
        """Samples of one step, over all ranks."""
        return self.micro * self.num_micro * self.num_ranks

    def samples_of(self, num_micro: int) -> int:
        """Samples of so many micro-batches, over all ranks."""
        return num_micro * self.micro * self.num_ranks

    def set_total(self, total: int) -> None:
        """Another number of micro-batches. Raises: ConfigError: it does not divide."""
        per_micro = self.micro * self.num_ranks
        if total <= 0 or total % per_micro:
            low = max(total // per_micro, 1) * per_micro
            raise ConfigError(
                f"train_batch_size {total} does not divide by micro-batch {self.micro}"
                f" x data-parallel {self.num_ranks} = {per_micro}.",
                do=f"take {low} or {low + per_micro}.",
                code="batch-size",
            )
        self.num_micro = total // per_micro

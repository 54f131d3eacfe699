"""Where a step ends: micro-batches counted, unless somebody outside says it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shoal.engine.batch import Batch


class Boundary:
    """Counts the micro-batches of one engine's steps.

    >>> boundary = Boundary(Batch(micro=4, num_micro=2, num_ranks=1), is_managed=True)
    >>> boundary.is_here()
    False
    >>> boundary.pass_by(is_end=False)
    >>> boundary.is_here()
    True

    Args:
        is_managed: False: the script accumulates by itself, and every ``step()`` is a boundary
            (``managed_gradient_accumulation``).
    """

    def __init__(self, batch: Batch, *, is_managed: bool) -> None:
        self._batch = batch
        self.is_managed = is_managed
        self.micro_in_step = 0  # micro-batches since the last boundary
        self.said: bool | None = None  # from outside; None: counted here

    def is_here(self) -> bool:
        """Does the optimizer step after the micro-batch that is under way?"""
        if self.said is not None:
            return self.said
        if not self.is_managed:
            return True
        return self.micro_in_step + 1 >= self._batch.num_micro

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside it a step ends here, whatever the count says; what was said from outside stays."""
        is_sayer = self.said is None and not self.is_here()
        if is_sayer:
            self.said = True
        try:
            yield
        finally:
            if is_sayer:
                self.said = None

    def num_passed(self, num_losses: int) -> int:
        """The micro-batches that one ``step()`` after so many losses stands for.

        Told from outside where a step ends, a client calls once for all of them.
        """
        return 1 if self.said is None else max(1, num_losses)

    def pass_by(self, *, is_end: bool) -> None:
        """A micro-batch is done, and with it, perhaps, its step."""
        self.micro_in_step = 0 if is_end else self.micro_in_step + 1

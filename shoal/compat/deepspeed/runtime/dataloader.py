"""``deepspeed.runtime.dataloader``: the loader of a rank's micro-batches, and one that never ends."""

from __future__ import annotations

from typing import Any

from shoal.data import Loader as DeepSpeedDataLoader


class RepeatingLoader:
    """Starts the loader again when it ends.

    Raises: StopIteration: the loader has no batch at all.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]

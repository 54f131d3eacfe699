"""Notices that a model was changed after it was sharded, at a few microseconds a forward."""

from __future__ import annotations

from torch import nn

from shoal.zero.build import check_unchanged
from shoal.zero.runtime import ShardedModel

_FULL_CHECK_EVERY = 64


class ModelGuard:
    """Counts modules and parameters before each forward, and compares every parameter now and then."""

    def __init__(self, model: nn.Module, sharded: ShardedModel) -> None:
        self._model = model
        self._sharded = sharded
        self._modules = list(model.modules())
        self._count = self._counted()
        self._forwards = 0

    def _counted(self) -> tuple[int, int]:
        return (
            sum(len(module._parameters) for module in self._modules),
            sum(len(module._modules) for module in self._modules),
        )

    def check(self) -> None:
        """Raises: ModelError: naming what was added or removed."""
        is_due = self._forwards % _FULL_CHECK_EVERY < 2
        self._forwards += 1
        if is_due or self._counted() != self._count:
            check_unchanged(self._model, self._sharded)
            self._modules = list(self._model.modules())
            self._count = self._counted()

"""Finds the engine that holds a parameter: all that ``GatheredParameters`` and the safe accessors are given."""

from __future__ import annotations

import weakref
from typing import Protocol

import torch

from shoal.sharding.param_group import ParameterGroup
from shoal.zero.access import Access
from shoal.zero.runtime import ShardedModel


class Owner(Protocol):
    """What holds sharded parameters: the engine."""

    sharded: ShardedModel

    @property
    def access(self) -> Access: ...

    @property
    def is_watched(self) -> bool:
        """Are changes an error that ``GatheredParameters`` would lose?"""
        ...

    @property
    def trained_groups(self) -> list[ParameterGroup]: ...


class _Registry:
    """Owners by parameter. Holds neither alive."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[Owner]]] = {}

    def put(self, parameter: torch.Tensor, owner: Owner) -> None:
        key = id(parameter)

        def forget(gone: weakref.ref[torch.Tensor]) -> None:
            entry = self._by_id.get(key)
            if entry is not None and entry[0] is gone:
                del self._by_id[key]

        self._by_id[key] = (weakref.ref(parameter, forget), weakref.ref(owner))

    def pop(self, parameter: torch.Tensor) -> None:
        self._by_id.pop(id(parameter), None)

    def get(self, parameter: torch.Tensor) -> Owner | None:
        entry = self._by_id.get(id(parameter))
        if entry is None or entry[0]() is not parameter:
            return None
        return entry[1]()


OWNERS = _Registry()

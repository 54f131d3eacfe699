"""Warns, or raises, when code that does not handle shards reads parameters that are sharded.

``state_dict()``, ``copy.deepcopy()`` and ``torch.save()`` of a module find a placeholder where a parameter is sharded:
its shape, and NaN. Nothing in that is an error to them, and a checkpoint of NaN is found out too late.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from shoal.errors import UsageError
from shoal.sharding.unit import Unit, UnitState

_WHOLE = "`with shoal.zero.GatheredParameters(model.parameters()):`, on every rank"


class Notice:
    """What one engine says at most once."""

    def __init__(self) -> None:
        self.is_given = False


class AtRestHook:
    """A ``state_dict`` pre-hook of one module that holds sharded parameters.

    It warns before the values are read. It is also copied and pickled with the module, and refuses while a parameter
    is at rest; a copy of the module gets a hook that does nothing.
    """

    def __init__(self, name: str, module: nn.Module, units: Sequence[Unit], notice: Notice) -> None:
        self._name = name or type(module).__name__
        self._module = module
        self._units = tuple(units)
        self._notice = notice

    def __call__(self, called: nn.Module, _prefix: str, _keep_vars: bool) -> None:
        if called is not self._module or not self._is_at_rest or self._notice.is_given:
            return
        self._notice.is_given = True
        warnings.warn(
            f"state_dict() reads parameters at rest: those of {self._name!r}, and whatever else is sharded and not"
            f" gathered, come out as NaN. Take engine.module_state_dict(), or call state_dict() inside {_WHOLE}."
        )

    @property
    def _is_at_rest(self) -> bool:
        return any(unit.state is not UnitState.FULL for unit in self._units)

    def __reduce_ex__(self, _protocol: Any) -> tuple[Callable[[], Any], tuple[()]]:
        """Raises: UsageError: a parameter of the module is at rest."""
        if self._is_at_rest:
            raise UsageError(
                f"{self._name!r} cannot be copied or pickled: its parameters are at rest, and the copy's would be NaN.",
                do=f"copy it inside {_WHOLE}; or build the model anew and load engine.module_state_dict() into it.",
                code="copy-at-rest",
            )
        return _nothing, ()


def _nothing() -> Callable[[nn.Module, str, bool], None]:
    return _do_nothing


def _do_nothing(_module: nn.Module, _prefix: str, _keep_vars: bool) -> None:
    return

"""Errors that DeepSpeed raises by ``assert``: the same error, which is an AssertionError too."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from shoal.errors import ShoalError


def be_assertion(error: ShoalError) -> None:
    """Derive a class of the error that ``except AssertionError`` catches as well."""
    if not isinstance(error, AssertionError):
        kind: Any = type(error)
        error.__class__ = _asserted(kind)


@cache
def _asserted(kind: Any) -> type[ShoalError]:
    body = {"__module__": kind.__module__, "__reduce__": _reduce}
    return type(kind.__name__, (kind, AssertionError), body)


def _reduce(error: ShoalError) -> tuple[Any, ...]:
    """As ``ShoalError.__reduce__``, by the base class: pickle finds no class that was made here."""
    kind: Any = type(error).__mro__[1]
    restore, (_, *args), *state = kind.__reduce__(error)
    return _restore, (restore, kind, *args), *state


def _restore(restore: Callable[..., ShoalError], *args: Any) -> ShoalError:
    error = restore(*args)
    be_assertion(error)
    return error

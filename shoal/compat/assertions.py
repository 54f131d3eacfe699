"""Errors that DeepSpeed raises by ``assert``: the same error, also an AssertionError, with words that scripts match."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from shoal.config import ConfigProblems
from shoal.errors import ShoalError

# The key of a problem, or the code of an error -> what DeepSpeed's message has in it.
KNOWN_AS = {
    "gradient_allreduce_op": "Invalid gradient_allreduce_op",
    "communication_data_type": "Invalid communication_data_type",
    "data_types.param_dtype": "data_types.param_dtype conflicts with the enabled precision mode",
    "bf16.enabled": "bfloat16 and fp16 modes cannot be simultaneously enabled",
    "scheduler.type": "DeepSpeed does not recognize LR scheduler",
    "config-duplicate-key": "Duplicate keys in DeepSpeed config",
}


def be_assertion(error: ShoalError) -> None:
    """Derive a class of the error that ``except AssertionError`` catches as well, and name it as DeepSpeed does."""
    problems = error.problems if isinstance(error, ConfigProblems) else []
    names = [KNOWN_AS[key] for key in (error.code, *(problem.path for problem in problems)) if key in KNOWN_AS]
    if names and error.args:
        error.args = ("\n".join([error.args[0], f"  DeepSpeed's words: {'; '.join(names)}."]), *error.args[1:])
    _derive(error)


def _derive(error: ShoalError) -> None:
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
    _derive(error)
    return error

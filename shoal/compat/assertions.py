"""DeepSpeed asserts what Shoal raises errors of its own for: under its name they are AssertionErrors too."""

from __future__ import annotations

from shoal.errors import ShoalError


def be_assertion(error: ShoalError) -> None:
    """Let ``except AssertionError`` catch the error as well."""
    kind = type(error)
    if not issubclass(kind, AssertionError):
        error.__class__ = type(kind.__name__, (kind, AssertionError), {"__module__": kind.__module__})

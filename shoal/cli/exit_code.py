"""The exit code of an error of Shoal's own."""

from __future__ import annotations

from shoal.errors import ConfigError, ModelError, UsageError


def exit_code_of(error: Exception) -> int:
    """2 for what the user wrote, 1 for what happened while it was done."""
    return 2 if isinstance(error, ConfigError | ModelError | UsageError) else 1

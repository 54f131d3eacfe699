"""Libraries that Shoal uses where they are installed, and does not require."""

from __future__ import annotations

import importlib
from typing import Any

from shoal.errors import UsageError


def import_optional(name: str, user: str, install: str, otherwise: str = "", code: str = UsageError.code) -> Any:
    """
    Args:
        name: of a module, with dots.
        user: what needs it: "logging to MLflow".
        install: what pip installs.
        otherwise: what the user can do without it.

    Raises: UsageError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f"{user} needs {name.partition('.')[0]!r}, which is not installed.",
            do=f"pip install {install}{otherwise and f', or {otherwise}'}.",
            code=code,
        ) from error

"""The metadata of the distribution ``deepspeed`` while it is an alias of Shoal: its API level and provider; and where
another DeepSpeed is installed.
"""

from __future__ import annotations

from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

from shoal.version import __version__

API_LEVEL = "0.19.8"


def alias_version() -> str:
    """``0.19.8+shoal.X``: a local version of PEP 440, which matches 0.19.8 and is visible in bug reports."""
    return f"{API_LEVEL}+shoal.{__version__.replace('+', '.')}"


class AliasDistribution(Distribution):
    """The distribution that ``importlib.metadata`` finds for ``deepspeed``. It has no files."""

    def read_text(self, filename: str) -> str | None:
        if filename in ("METADATA", "PKG-INFO"):
            return (
                "Metadata-Version: 2.1\n"
                "Name: deepspeed\n"
                f"Version: {alias_version()}\n"
                "Summary: provided by Shoal, not by DeepSpeed\n"
            )
        return "deepspeed\n" if filename == "top_level.txt" else None

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).resolve().parent / path


def real_deepspeed() -> ModuleSpec | None:
    """The spec of an installed DeepSpeed that the alias hides; None: there is none."""
    return PathFinder.find_spec("deepspeed")

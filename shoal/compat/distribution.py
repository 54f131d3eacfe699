"""The metadata of the lent name: which API level it is, and who provides it."""

from __future__ import annotations

from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

API_LEVEL = "0.19.8"


def lent_version() -> str:
    """``0.19.8+shoal.X``: a local label of PEP 440, which passes for 0.19.8 and shows in bug reports."""
    from shoal import __version__

    return f"{API_LEVEL}+shoal.{__version__.replace('+', '.')}"


class LentDistribution(Distribution):
    """What ``importlib.metadata`` says of ``deepspeed``. There is no file behind it."""

    def read_text(self, filename: str) -> str | None:
        if filename in ("METADATA", "PKG-INFO"):
            return (
                "Metadata-Version: 2.1\n"
                "Name: deepspeed\n"
                f"Version: {lent_version()}\n"
                "Summary: provided by Shoal, not by DeepSpeed\n"
            )
        return "deepspeed\n" if filename == "top_level.txt" else None

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).resolve().parent / path


def lent_distribution() -> Distribution:
    return LentDistribution()

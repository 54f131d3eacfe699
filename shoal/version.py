"""Shoal's version, which ``shoal.__version__`` is; also without an installed distribution."""

from __future__ import annotations

__version__ = "0.1.0"

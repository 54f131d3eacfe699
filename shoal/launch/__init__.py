"""Starting ranks, one process each, and reading what a launcher has said about them."""

from __future__ import annotations

from shoal.launch.environment import Environment, read_environment
from shoal.launch.local import LocalJob, Outcome, run_local

__all__ = ["Environment", "LocalJob", "Outcome", "read_environment", "run_local"]

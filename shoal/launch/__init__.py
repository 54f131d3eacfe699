"""Starting ranks, one process each, and reading what a launcher has said about them."""

from __future__ import annotations

from shoal.launch.environment import Environment, read_environment
from shoal.launch.local import Elastic, LocalJob, Outcome, Place, run_local
from shoal.launch.remote import RemoteJob, run_remote

__all__ = [
    "Elastic",
    "Environment",
    "LocalJob",
    "Outcome",
    "Place",
    "RemoteJob",
    "read_environment",
    "run_local",
    "run_remote",
]

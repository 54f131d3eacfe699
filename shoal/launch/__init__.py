"""Starting ranks, one process each, and reading what a launcher has said about them."""

from __future__ import annotations

from shoal.launch.clusters import ClusterJob, Program
from shoal.launch.cores import BoundCores, cpu_list, divide_cores, physical_cores
from shoal.launch.environment import Environment, read_environment
from shoal.launch.local import Elastic, LocalJob, Outcome, Place, run_local
from shoal.launch.remote import RemoteJob, run_remote

__all__ = [
    "BoundCores",
    "ClusterJob",
    "Elastic",
    "Environment",
    "LocalJob",
    "Outcome",
    "Place",
    "Program",
    "RemoteJob",
    "cpu_list",
    "divide_cores",
    "physical_cores",
    "read_environment",
    "run_local",
    "run_remote",
]

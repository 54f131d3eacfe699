"""Monitors, timers and profilers: ``tensorboard``, ``csv_monitor``, ``wandb``, ``comet``, ``comms_logger``,
``flops_profiler``, ``timers``."""

from __future__ import annotations

from shoal.config.base import Section, key


class Tensorboard(Section):
    """TensorBoard's event files."""

    enabled: bool = key(False, "write event files")
    output_path: str = key("", "folder; empty: a folder of the run")
    job_name: str = key("DeepSpeedJobName", "folder inside it")


class CsvMonitor(Section):
    """CSV files."""

    enabled: bool = key(False, "write CSV files")
    output_path: str = key("", "folder; empty: a folder of the run")
    job_name: str = key("DeepSpeedJobName", "folder inside it")


class Wandb(Section):
    """Weights & Biases."""

    enabled: bool = key(False, "log to Weights & Biases")
    group: str | None = key(None, "group of runs")
    team: str | None = key(None, "team (its word: entity)")
    project: str = key("deepspeed", "project")


class Comet(Section):
    """Comet."""

    enabled: bool = key(False, "log to Comet")
    samples_log_interval: int = key(100, "samples between two entries", ge=1)
    project: str | None = key(None, "project")
    workspace: str | None = key(None, "workspace")
    api_key: str | None = key(None, "the service's key; never printed, logged or saved", secret=True)
    experiment_name: str | None = key(None, "name of the run")
    experiment_key: str | None = key(None, "a run to resume")
    online: bool | None = key(None, "send immediately, or store locally")
    mode: str | None = key(None, "get, create, or get_or_create")


class CommsLogger(Section):
    """Times of collectives."""

    enabled: bool = key(False, "time every collective")
    prof_all: bool = key(True, "all kinds of collectives")
    prof_ops: tuple[str, ...] = key((), "only these kinds")
    verbose: bool = key(False, "print each collective")
    debug: bool = key(False, "print its caller too")


class FlopsProfilerSection(Section):
    """Operations of one step, by module."""

    enabled: bool = key(False, "count the operations of one step")
    profile_step: int = key(1, "which step", alias=("step",), ge=0)
    module_depth: int = key(-1, "depth of the printed tree; -1: all", ge=-1)
    top_modules: int = key(1, "modules printed at each depth", ge=1)
    detailed: bool = key(True, "print the whole tree")
    output_file: str | None = key(None, "file to print to")
    recompute_fwd_factor: float = key(0.0, "forward passes counted for recomputation", ge=0)

"""``autotuning.enabled``: the run is an experiment of a search, ends after some steps, and writes what it measured.

    {"latency": 91.3, "throughput": 175.2, "FLOPS_per_gpu": 1.3e10}

Milliseconds of a step, the median of those from start_profile_step to end_profile_step; samples per second of all
ranks; floating-point operations per second of a rank, where backward counts twice as much as forward.
"""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from shoal.device import Device
from shoal.engine.log import say_on_rank_0
from shoal.engine.parts.part import Part
from shoal.observe.flops import OperationCount

METRICS_FILE = "autotuning_metric.json"  # in the current folder, where the configuration names none


class ExperimentSteps(Part):
    """Measures steps, then ends the process on every rank.

    Raises: SystemExit: by ``engine.step()``, from the step after end_profile_step on; the exit code is 0.
    """

    def __init__(self, section: Any) -> None:
        self._section = section
        self._path = Path(section.metric_path or METRICS_FILE).absolute()
        self._operations: OperationCount | None = OperationCount()  # of the first step; None: it is over
        self._flops = 0.0
        self._times: list[float] = []
        self._num_steps = 0
        self._engine: Any = None

    def prepare(self, engine: Any) -> None:
        self._engine = engine
        say_on_rank_0(
            engine.global_rank,
            f"autotuning.enabled: training ends after {self._section.end_profile_step + 1} steps, and what they took is"
            f" written to {self._path}.",
        )
        if self._section.start_profile_step == 0:  # the first step is measured, so it is not counted
            self._operations = None
            self._times.append(time.perf_counter())

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._operations is not None and not self._operations.is_open and torch.is_grad_enabled():
            self._operations.__enter__()

    def after_forward(self, output: Any) -> None:
        if self._operations is not None and self._operations.is_open:
            self._operations.__exit__(None, None, None)

    def explain(self, error: Exception) -> None:
        self.after_forward(None)

    def after_step(self) -> None:
        self._num_steps += 1
        if self._operations is not None:
            self._flops, self._operations = 3.0 * self._operations.flops, None
        first, last = self._section.start_profile_step, self._section.end_profile_step
        if self._num_steps >= first:
            Device(self._engine.device).synchronize()
            self._times.append(time.perf_counter())
        if self._num_steps == last + 1:
            self._write()
        if self._num_steps > last:
            raise SystemExit(0)

    def _write(self) -> None:
        """Communicates: each rank's seconds and operations."""
        engine = self._engine
        own = median(end - begin for begin, end in pairwise(self._times)), self._flops
        taken, flops = zip(*engine.axes.world.gather_objects(own, label="autotuning"), strict=True)
        if engine.global_rank:
            return
        seconds = max(taken)
        metrics = {"latency": 1e3 * seconds, "throughput": engine.train_batch_size() / seconds}
        if self._flops:
            metrics["FLOPS_per_gpu"] = mean(flops) / seconds
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(metrics), encoding="utf-8")

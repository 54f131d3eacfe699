"""How much a job gets done on each number of GPUs: a step's time, less what checkpoints and failures cost.

    t         seconds of a step                          from a plan for so many GPUs
    C         seconds that a checkpoint stops training
    M         mean seconds between failures of the job:  that of a GPU / number of GPUs
    interval  sqrt(2 C (M + R)) - C, Daly's; Young's is sqrt(2 C M)
    waste     C / (interval + C)  +  (R + (interval + C) / 2) / M
    goodput   global batch / t x (1 - waste)

Source: Young, A first order approximation to the optimum checkpoint interval (1974); Daly, A higher order estimate of
the optimum checkpoint interval for restart dumps (2006), equation 20; goodput: Pollux (OSDI 2021), Sia (SOSP 2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from shoal.errors import UsageError
from shoal.planner.search import plan
from shoal.planner.trial import Trial

GPU_MTBF = 50_000.0 * 3600  # seconds. Source: Llama 3 405B: 419 failures in 54 days of 16,384 GPUs (arXiv:2407.21783)


@dataclass(frozen=True)
class Goodput:
    """What a number of GPUs gets done.

    Attributes: ``seconds``: of a step; ``nbytes``: allocated on a GPU. ``interval``: seconds between two checkpoints.
    ``waste``: the part of the time that trains nothing that is kept. ``rows_per_second``: that are kept.
    """

    num_ranks: int
    trial: Trial
    seconds: float
    nbytes: int
    interval: float
    waste: float
    rows_per_second: float


def checkpoint_interval(checkpoint_seconds: float, restart_seconds: float, mtbf: float) -> float:
    """Seconds of training between two checkpoints that waste least. Args: ``mtbf``: of the job, in seconds."""
    if checkpoint_seconds >= 2 * mtbf:
        return mtbf
    return math.sqrt(2 * checkpoint_seconds * (mtbf + restart_seconds)) - checkpoint_seconds


def waste(interval: float, checkpoint_seconds: float, restart_seconds: float, mtbf: float) -> float:
    """The part of the time that goes to checkpoints, restarts and work that is lost; at most 1."""
    cycle = interval + checkpoint_seconds
    return min(checkpoint_seconds / cycle + (restart_seconds + cycle / 2) / mtbf, 1.0)


def goodput(
    model: str | Callable[[], nn.Module],
    sizes: Sequence[int],
    *,
    checkpoint_seconds: float | None = None,
    restart_seconds: float = 300.0,
    gpu_mtbf: float = GPU_MTBF,
    **options: Any,
) -> list[Goodput]:
    """For each number of GPUs, the best plan and what it gets done. Sizes for which nothing fits are left out.

    Args:
        checkpoint_seconds: that one stops training; None: parameters and state of a rank to the node's disk.
        restart_seconds: from a failure to the next step.
        gpu_mtbf: mean seconds between failures of one GPU with its part of the node.
        options: of ``plan``: ``machine``, ``sequence``, ``global_batch`` ...

    Raises: UsageError: a time that is not positive; what ``plan`` raises for a model, or for every size.
    """
    for name, value in (
        ("restart_seconds", restart_seconds),
        ("gpu_mtbf", gpu_mtbf),
        ("checkpoint", checkpoint_seconds),
    ):
        if value is not None and value <= 0:
            raise UsageError(f"{name} is {value}: it must be above 0.", code="plan-impossible")
    made: list[Goodput] = []
    for size in sizes:
        found = plan(model, size, **options)
        best = found.best
        if best is None:
            continue
        stop = checkpoint_seconds
        if stop is None:  # 14 bytes of each parameter, over the disks of all nodes
            node = found.request.machine
            stop = 14 * found.facts.numel / (node.disk_bandwidth * max(size / node.gpus_per_node, 1))
        interval = checkpoint_interval(stop, restart_seconds, gpu_mtbf / size)
        lost = waste(interval, stop, restart_seconds, gpu_mtbf / size)
        rate = found.request.global_batch / best.seconds * (1 - lost)
        made.append(Goodput(size, best, best.seconds, best.nbytes, interval, lost, rate))
    return made

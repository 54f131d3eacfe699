"""``deepspeed.runtime.lr_schedules``: the schedules, and the command-line options that tune them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from shoal.optim.schedules import (
    VALID_LR_SCHEDULES,
)

LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR = "LRRangeTest", "OneCycle", "WarmupLR"
WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupDecayLR", "WarmupCosineLR"
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "log", "linear"


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--lr_schedule`` and the parameters of all schedules to a parser. Returns: the same parser."""
    group = parser.add_argument_group("Convergence tuning", "parameters of the learning-rate schedules")
    names = ", ".join(VALID_LR_SCHEDULES)
    group.add_argument("--lr_schedule", default=None, help=f"schedule of the learning rate: {names}")
    for name, kind, value in _TUNING:
        about = f"parameter {name} of the schedule"
        if kind is bool:
            group.add_argument(f"--{name}", action="store_true", help=about)
        else:
            group.add_argument(f"--{name}", type=kind, default=value, help=about)
    return parser


_TUNING: tuple[tuple[str, Callable[[str], Any], object], ...] = (
    ("lr_range_test_min_lr", float, 1e-3),
    ("lr_range_test_step_rate", float, 1.0),
    ("lr_range_test_step_size", int, 1000),
    ("lr_range_test_staircase", bool, False),
    ("cycle_first_step_size", int, 1000),
    ("cycle_first_stair_count", int, -1),
    ("cycle_second_step_size", int, -1),
    ("cycle_second_stair_count", int, -1),
    ("decay_step_size", int, 1000),
    ("cycle_min_lr", float, 1e-2),
    ("cycle_max_lr", float, 1e-1),
    ("decay_lr_rate", float, 0.0),
    ("cycle_momentum", bool, False),  # as DeepSpeed's: read by no schedule
    ("cycle_min_mom", float, 0.8),
    ("cycle_max_mom", float, 0.9),
    ("decay_mom_rate", float, 0.0),
    ("warmup_min_lr", float, 0.0),
    ("warmup_max_lr", float, 1e-3),
    ("warmup_num_steps", int, 1000),
    ("warmup_type", str, WARMUP_LOG_RATE),
    ("warmup_min_ratio", float, 0.01),
    ("cos_min_ratio", float, 0.01),
)

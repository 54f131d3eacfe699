"""``deepspeed.runtime.lr_schedules``: the schedules, and the command-line options that tune them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from shoal.optim.schedules import (
    VALID_LR_SCHEDULES,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)

LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR = "LRRangeTest", "OneCycle", "WarmupLR"
WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupDecayLR", "WarmupCosineLR"
TOTAL_NUM_STEPS, WARMUP_NUM_STEPS, WARMUP_TYPE = "total_num_steps", "warmup_num_steps", "warmup_type"
WARMUP_MIN_LR, WARMUP_MAX_LR = "warmup_min_lr", "warmup_max_lr"
WARMUP_MIN_RATIO, COS_MIN_RATIO = "warmup_min_ratio", "cos_min_ratio"
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "log", "linear"
CYCLE_FIRST_STEP_SIZE, CYCLE_SECOND_STEP_SIZE = "cycle_first_step_size", "cycle_second_step_size"
CYCLE_FIRST_STAIR_COUNT, CYCLE_SECOND_STAIR_COUNT = "cycle_first_stair_count", "cycle_second_stair_count"
CYCLE_MIN_LR, CYCLE_MAX_LR, CYCLE_MIN_MOM, CYCLE_MAX_MOM = (
    "cycle_min_lr",
    "cycle_max_lr",
    "cycle_min_mom",
    "cycle_max_mom",
)
DECAY_STEP_SIZE, DECAY_LR_RATE, DECAY_MOM_RATE = "decay_step_size", "decay_lr_rate", "decay_mom_rate"
LR_RANGE_TEST_MIN_LR, LR_RANGE_TEST_STEP_RATE = "lr_range_test_min_lr", "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE, LR_RANGE_TEST_STAIRCASE = "lr_range_test_step_size", "lr_range_test_staircase"


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--lr_schedule`` and the parameters of all schedules to a parser. Returns: the same parser."""
    group = parser.add_argument_group("Convergence tuning", "parameters of the learning-rate schedules")
    group.add_argument("--lr_schedule", default=None, choices=VALID_LR_SCHEDULES, help="of the learning rate")
    for name, kind, value in _TUNING:
        group.add_argument(f"--{name}", type=kind, default=value, help=f"parameter {name} of the schedule")
    return parser


def _truth(text: str) -> bool:
    return text.lower() in ("1", "true", "yes", "on")


_TUNING: tuple[tuple[str, Callable[[str], Any], object], ...] = (
    (LR_RANGE_TEST_MIN_LR, float, 1e-3),
    (LR_RANGE_TEST_STEP_RATE, float, 1.0),
    (LR_RANGE_TEST_STEP_SIZE, int, 1000),
    (LR_RANGE_TEST_STAIRCASE, _truth, False),
    (CYCLE_FIRST_STEP_SIZE, int, 1000),
    (CYCLE_FIRST_STAIR_COUNT, int, -1),
    (CYCLE_SECOND_STEP_SIZE, int, -1),
    (CYCLE_SECOND_STAIR_COUNT, int, -1),
    (DECAY_STEP_SIZE, int, 1000),
    (CYCLE_MIN_LR, float, 1e-2),
    (CYCLE_MAX_LR, float, 1e-1),
    (DECAY_LR_RATE, float, 0.0),
    (CYCLE_MIN_MOM, float, 0.8),
    (CYCLE_MAX_MOM, float, 0.9),
    (DECAY_MOM_RATE, float, 0.0),
    (WARMUP_MIN_LR, float, 0.0),
    (WARMUP_MAX_LR, float, 1e-3),
    (WARMUP_NUM_STEPS, int, 1000),
    (WARMUP_TYPE, str, WARMUP_LOG_RATE),
)

__all__ = [
    "LRRangeTest",
    "OneCycle",
    "VALID_LR_SCHEDULES",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "add_tuning_arguments",
]

"""``deepspeed.runtime.lr_schedules``: the schedules, and the command-line options that tune them."""

from __future__ import annotations

import argparse
import inspect
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


def get_config_from_args(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """The section ``scheduler`` of the options of ``add_tuning_arguments``. Returns: it, or None and the reason."""
    kind = getattr(args, "lr_schedule", None)
    if kind not in _CLASSES:
        return None, f"--lr_schedule is {kind}, expected one of {', '.join(VALID_LR_SCHEDULES)}"
    taken = inspect.signature(_CLASSES[kind]).parameters
    given = {name: getattr(args, name, None) for name, _, _ in _TUNING if name in taken}
    unset = {CYCLE_FIRST_STAIR_COUNT, CYCLE_SECOND_STEP_SIZE, CYCLE_SECOND_STAIR_COUNT}  # whose default is -1
    params = {k: v for k, v in given.items() if v is not None and not (k in unset and v < 0)}
    return {"type": kind, "params": params}, None


def get_lr_from_config(config: dict[str, Any]) -> tuple[float | None, str]:
    """The rate that a section ``scheduler`` names. Returns: it, or None and the reason."""
    kind, params = config.get("type"), config.get("params", {})
    name = {LR_RANGE_TEST: LR_RANGE_TEST_MIN_LR, ONE_CYCLE: CYCLE_MAX_LR}.get(str(kind), WARMUP_MAX_LR)
    if kind not in _CLASSES or kind == WARMUP_COSINE_LR or name not in params:
        return None, f"a schedule {kind} with {sorted(params)} names no rate"
    return float(params[name]), ""


_CLASSES: dict[Any, type] = {
    cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


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
    *(name for name in vars() if name.isupper() and not name.startswith("_")),
    *_CLASSES,
    "add_tuning_arguments",
    "get_config_from_args",
    "get_lr_from_config",
]

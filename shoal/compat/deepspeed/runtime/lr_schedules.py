"""``deepspeed.runtime.lr_schedules``: the schedules, and the command-line options that tune them."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoal.optim.schedules import (
    VALID_LR_SCHEDULES,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)
from shoal.optim.schedules import torch_optimizer as get_torch_optimizer

LR_SCHEDULE, EDGE_VALUE, MID_VALUE = "lr_schedule", "edge_value", "mid_value"
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
CYCLE_MOMENTUM = "cycle_momentum"
DECAY_STEP_SIZE, DECAY_LR_RATE, DECAY_MOM_RATE = "decay_step_size", "decay_lr_rate", "decay_mom_rate"
LR_RANGE_TEST_MIN_LR, LR_RANGE_TEST_STEP_RATE = "lr_range_test_min_lr", "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE, LR_RANGE_TEST_STAIRCASE = "lr_range_test_step_size", "lr_range_test_staircase"


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--lr_schedule`` and the parameters of all schedules to a parser. Returns: the same parser."""
    group = parser.add_argument_group("Convergence tuning", "parameters of the learning-rate schedules")
    names = ", ".join(VALID_LR_SCHEDULES)
    group.add_argument(f"--{LR_SCHEDULE}", default=None, help=f"schedule of the learning rate: {names}")
    for name, kind, value in _TUNING:
        about = f"parameter {name} of the schedule"
        if kind is bool:
            group.add_argument(f"--{name}", action="store_true", help=about)
        else:
            group.add_argument(f"--{name}", type=kind, default=value, help=about)
    return parser


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """The options of ``add_tuning_arguments`` on the command line. Returns: them, and all other arguments."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def get_config_from_args(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """The section ``scheduler`` of the options of ``add_tuning_arguments``. Returns: it, or None and the reason."""
    kind = getattr(args, LR_SCHEDULE, None)
    if kind not in _CLASSES:
        return None, f"--lr_schedule is {kind}, expected one of {', '.join(VALID_LR_SCHEDULES)}"
    params: dict[str, Any] = {}
    _override(args, params, kind)
    return {"type": kind, "params": params}, None


def get_lr_from_config(config: dict[str, Any]) -> tuple[float | None, str]:
    """The rate that a section ``scheduler`` names. Returns: it, or None and the reason."""
    kind, params = config.get("type"), config.get("params", {})
    name = {LR_RANGE_TEST: LR_RANGE_TEST_MIN_LR, ONE_CYCLE: CYCLE_MAX_LR}.get(str(kind), WARMUP_MAX_LR)
    if kind not in _CLASSES or kind == WARMUP_COSINE_LR or name not in params:
        return None, f"a schedule {kind} with {sorted(params)} names no rate"
    return float(params[name]), ""


def override_lr_range_test_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Put the options that ``LRRangeTest`` takes into ``params``, over what is there."""
    _override(args, params, LR_RANGE_TEST)


def override_1cycle_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Put the options that ``OneCycle`` takes into ``params``, over what is there."""
    _override(args, params, ONE_CYCLE)


def override_warmupLR_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Put the options that ``WarmupLR`` takes into ``params``, over what is there."""
    _override(args, params, WARMUP_LR)


def override_warmupCosineLR_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Put the options that ``WarmupCosineLR`` takes into ``params``, over what is there."""
    _override(args, params, WARMUP_COSINE_LR)


def override_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Put the options of every schedule into ``params``, over what is there."""
    _override(args, params, *_CLASSES)


def update_lr(param_groups: Sequence[dict[str, Any]], lrs: Sequence[Any]) -> list[Any]:
    """Set the groups' rates, in place where a rate is a tensor. Returns: the rates that all groups have then."""
    for group, lr in zip(param_groups, lrs, strict=False):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
    return [group["lr"] for group in param_groups]


_CLASSES: dict[Any, type] = {
    cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


def _override(args: argparse.Namespace, params: dict[str, Any], *kinds: Any) -> None:
    """A value of None, and of the three options whose default is -1 that default, is not put."""
    taken = {name for kind in kinds for name in inspect.signature(_CLASSES[kind]).parameters}
    unset = {CYCLE_FIRST_STAIR_COUNT, CYCLE_SECOND_STEP_SIZE, CYCLE_SECOND_STAIR_COUNT}
    for name in (name for name, _, _ in _TUNING if name in taken - {CYCLE_MOMENTUM}):
        value = getattr(args, name, None)
        if value is not None and not (name in unset and value < 0):
            params[name] = value


_TUNING: tuple[tuple[str, Callable[[str], Any], object], ...] = (
    (LR_RANGE_TEST_MIN_LR, float, 1e-3),
    (LR_RANGE_TEST_STEP_RATE, float, 1.0),
    (LR_RANGE_TEST_STEP_SIZE, int, 1000),
    (LR_RANGE_TEST_STAIRCASE, bool, False),
    (CYCLE_FIRST_STEP_SIZE, int, 1000),
    (CYCLE_FIRST_STAIR_COUNT, int, -1),
    (CYCLE_SECOND_STEP_SIZE, int, -1),
    (CYCLE_SECOND_STAIR_COUNT, int, -1),
    (DECAY_STEP_SIZE, int, 1000),
    (CYCLE_MIN_LR, float, 1e-2),
    (CYCLE_MAX_LR, float, 1e-1),
    (DECAY_LR_RATE, float, 0.0),
    (CYCLE_MOMENTUM, bool, False),  # as DeepSpeed's: read by no schedule
    (CYCLE_MIN_MOM, float, 0.8),
    (CYCLE_MAX_MOM, float, 0.9),
    (DECAY_MOM_RATE, float, 0.0),
    (WARMUP_MIN_LR, float, 0.0),
    (WARMUP_MAX_LR, float, 1e-3),
    (WARMUP_NUM_STEPS, int, 1000),
    (WARMUP_TYPE, str, WARMUP_LOG_RATE),
    (WARMUP_MIN_RATIO, float, 0.01),
    (COS_MIN_RATIO, float, 0.01),
)

__all__ = [
    *(name for name in vars() if name.isupper() and not name.startswith("_")),
    *_CLASSES,
    "add_tuning_arguments",
    "get_config_from_args",
    "get_lr_from_config",
    "get_torch_optimizer",
    "override_1cycle_params",
    "override_lr_range_test_params",
    "override_params",
    "override_warmupCosineLR_params",
    "override_warmupLR_params",
    "parse_arguments",
    "update_lr",
]

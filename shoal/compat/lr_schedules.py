"""``deepspeed.runtime.lr_schedules``: the schedules, and the command-line options that tune them."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Collection, Sequence
from functools import partial
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


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """The options of ``add_tuning_arguments`` on the command line. Returns: them, and all other arguments."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def get_config_from_args(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """The section ``scheduler`` of the options of ``add_tuning_arguments``. Returns: it, or None and the reason."""
    kind = getattr(args, "lr_schedule", None)
    if kind not in _CLASSES:
        return None, f"--lr_schedule is {kind}, expected one of {', '.join(VALID_LR_SCHEDULES)}"
    params: dict[str, Any] = {}
    _override(args, params, kinds=(kind,))
    return {"type": kind, "params": params}, None


def get_lr_from_config(config: dict[str, Any]) -> tuple[float | None, str]:
    """The rate that a section ``scheduler`` names. Returns: it, or None and the reason."""
    kind, params = config.get("type"), config.get("params", {})
    name = {LR_RANGE_TEST: "lr_range_test_min_lr", ONE_CYCLE: "cycle_max_lr"}.get(str(kind), "warmup_max_lr")
    if kind not in _CLASSES or kind == WARMUP_COSINE_LR or name not in params:
        return None, f"a schedule {kind} with {sorted(params)} names no rate"
    return float(params[name]), ""


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


def _override(args: argparse.Namespace, params: dict[str, Any], *, kinds: Collection[Any]) -> None:
    """Put the options that the schedules ``kinds`` take into ``params``, over what is there.

    A value of None, and of the three options whose default is -1 that default, is not put.
    """
    taken = {name for kind in kinds for name in inspect.signature(_CLASSES[kind]).parameters}
    unset = {"cycle_first_stair_count", "cycle_second_step_size", "cycle_second_stair_count"}
    for name in (name for name, _, _ in _TUNING if name in taken - {"cycle_momentum"}):
        value = getattr(args, name, None)
        if value is not None and not (name in unset and value < 0):
            params[name] = value


override_lr_range_test_params = partial(_override, kinds=(LR_RANGE_TEST,))
override_1cycle_params = partial(_override, kinds=(ONE_CYCLE,))
override_warmupLR_params = partial(_override, kinds=(WARMUP_LR,))
override_warmupCosineLR_params = partial(_override, kinds=(WARMUP_COSINE_LR,))
override_params = partial(_override, kinds=(*_CLASSES,))


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

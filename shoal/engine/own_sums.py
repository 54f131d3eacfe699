"""The plan of an optimizer that chooses what the ranks sum (``SumsValues``): values in 1 bit, with error feedback."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from shoal.build.settings import WireSettings
from shoal.comm.formats import format_named
from shoal.config import Config
from shoal.config.optimizer import sums_format, sums_stage
from shoal.engine.settings import Plan
from shoal.errors import ConfigError, OptimizerError
from shoal.optim.sums_values import SumsValues


def with_own_sums(plan: Plan, optimizer: Any, settings: Config) -> tuple[Plan, list[str]]:
    """The plan, with the formats of such an optimizer, and notes for start-up; of another one as it is.

    Raises: ConfigError, OptimizerError: a stage that shards, another format of gradients, or narrow optimizer state.
    """
    if not isinstance(optimizer, SumsValues) or not isinstance(optimizer, torch.optim.Optimizer):
        return plan, []
    name, zero, wire = type(optimizer).__name__, plan.zero, plan.zero.wire
    if zero.stage:
        what, do = sums_stage(name, zero.stage)
        raise ConfigError(f"zero_optimization.stage is {what}", do=do, code="optimizer-sums")
    if wire.reduce is not None or wire.between is not None or any(each for _, each in wire.units.values()):
        what, do = sums_format(name, "the section wire names formats of gradients")
        raise ConfigError(what, do=do, code="optimizer-sums")
    if plan.precision.state is not None:
        raise OptimizerError(
            f"{name} keeps its state in the format of fp32 main parameters, and the config asks for another.",
            do="leave precision.state_dtype and 16-bit main parameters out.",
            code="optimizer-sums",
        )
    own = WireSettings(
        reduce=format_named("1bit", settings.wire.block),
        has_error=True,
        is_by_optimizer=True,
        is_local=optimizer.has_local_steps,
    )
    masked = [index for index, group in enumerate(optimizer.param_groups) if "exp_avg_mask" in group]
    notes = [
        f"exp_avg_mask of optimizer group {index} has no effect: a momentum stays 0 where the variance is 0."
        for index in masked
    ]
    return replace(plan, zero=replace(zero, wire=own)), notes

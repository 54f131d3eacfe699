"""``deepspeed.runtime.zero.config``: the section ``zero_optimization`` as DeepSpeed's users read it, and its stages."""

from __future__ import annotations

from enum import Enum
from typing import Any

from shoal.compat.deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    OffloadDeviceEnum,
)
from shoal.config import ConfigProblems, examine
from shoal.config.tree import names_of
from shoal.config.zero import ZeroOptimization

ZERO_OPTIMIZATION = "zero_optimization"


class ZeroStageEnum(int, Enum):
    """ZeRO's stages."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3  # noqa: PIE796 - another name of the last, as in DeepSpeed


class DeepSpeedZeroConfig:
    """The section, read and checked by Shoal; its keys are attributes, by any of their names.

    As in DeepSpeed, ``overlap_comm`` is never None, and an offload section that was not given is.

    Raises: ConfigError: every problem at once.

    >>> DeepSpeedZeroConfig(stage=3, stage3_prefetch_bucket_size=1000).prefetch_bucket_size
    1000
    """

    def __init__(self, **keys: Any) -> None:
        self.given = dict(keys)
        seen = examine({"train_micro_batch_size_per_gpu": 1, ZERO_OPTIMIZATION: keys}, check_supported=False)
        known = names_of(ZeroOptimization)
        # Keys and values are checked one by one here; contradictions between keys are found in the whole config.
        if seen.config is None or any(problem.path.split(".")[1] not in known for problem in seen.problems):
            raise ConfigProblems(seen.problems, seen.name)
        self.checked: ZeroOptimization = seen.config.zero_optimization

    @property
    def overlap_comm(self) -> bool:
        """Would DeepSpeed reduce gradients during the backward pass?"""
        return self.checked.stage == 3 if self.checked.overlap_comm is None else self.checked.overlap_comm

    @property
    def offload_param(self) -> DeepSpeedZeroOffloadParamConfig | None:
        """The tier of the sharded parameters; None where the section does not set it."""
        if self.given.get("offload_param") is None and not self.given.get("cpu_offload_param"):
            return None
        return DeepSpeedZeroOffloadParamConfig(**self.checked.offload_param.model_dump())

    @property
    def offload_optimizer(self) -> DeepSpeedZeroOffloadOptimizerConfig | None:
        """The tier of the optimizer state; None where the section does not set it."""
        if self.given.get("offload_optimizer") is None and not self.given.get("cpu_offload"):
            return None
        return DeepSpeedZeroOffloadOptimizerConfig(**self.checked.offload_optimizer.model_dump())

    def __getattr__(self, name: str) -> Any:
        key = names_of(ZeroOptimization).get(name)
        if key is None:
            raise AttributeError(f"zero_optimization has no key {name!r}")
        return getattr(self.checked, key.name)


__all__ = [
    "DeepSpeedZeroConfig",
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum",
    "ZERO_OPTIMIZATION",
    "ZeroStageEnum",
]

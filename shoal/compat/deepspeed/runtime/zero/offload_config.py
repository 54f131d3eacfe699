"""``deepspeed.runtime.zero.offload_config``: the names of tiers and of kinds of state."""

from __future__ import annotations

from enum import Enum

from shoal.config.zero import OffloadOptimizer
from shoal.config.zero import OffloadParam as DeepSpeedZeroOffloadParamConfig


class DeepSpeedZeroOffloadOptimizerConfig(OffloadOptimizer):
    """The tier of optimizer state."""

    @property
    def pipeline(self) -> bool:
        """Is pipelined reading or writing enabled?"""
        return self.pipeline_read or self.pipeline_write


class OffloadDeviceEnum(str, Enum):  # noqa: UP042 - its text is the member's, as in DeepSpeed
    """The tier of state."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):  # noqa: UP042 - likewise
    """What ``engine.offload_states`` moves."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


__all__ = [
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
]

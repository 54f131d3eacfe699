"""``deepspeed.runtime.precision_config``: the sections ``fp16`` and ``bf16``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from shoal.config.precision import Bf16 as DeepSpeedBF16Config
from shoal.config.precision import Fp16

FP16, BFLOAT16, BFLOAT16_OLD = "fp16", "bf16", "bfloat16"


class DeepSpeedFP16Config(Fp16):
    """The section ``fp16``, checked when it is made.

    Raises: pydantic.ValidationError: unknown keys, and values that cannot be.
    """

    loss_scale: float = Field(0.0, ge=0, allow_inf_nan=False)

    def initial_dynamic_scale(self) -> int:
        """Where the adaptive scale starts."""
        return 1 << self.initial_scale_power


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    """The section ``bf16`` of a configuration, under either of its names.

    Raises: pydantic.ValidationError: unknown keys, and values that cannot be.
    """
    return DeepSpeedBF16Config(**(param_dict.get(BFLOAT16) or param_dict.get(BFLOAT16_OLD) or {}))


__all__ = ["BFLOAT16", "BFLOAT16_OLD", "DeepSpeedBF16Config", "DeepSpeedFP16Config", "FP16", "get_bfloat16_config"]

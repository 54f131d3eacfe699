"""``deepspeed.runtime.precision_config``: the sections ``fp16`` and ``bf16``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationInfo, field_validator

from shoal.config.precision import Bf16 as DeepSpeedBF16Config
from shoal.config.precision import Fp16

FP16, BFLOAT16, BFLOAT16_OLD = "fp16", "bf16", "bfloat16"


class DeepSpeedFP16Config(Fp16):
    """The section ``fp16``, checked when it is made.

    Raises: pydantic.ValidationError: unknown keys, and values that cannot be.
    """

    @field_validator("loss_scale", "loss_scale_window", "min_loss_scale", mode="before")
    @classmethod
    def _as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Text is read as a number, as in a file."""
        try:
            number = None if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = None
        if number is None:
            raise ValueError(f"fp16.{info.field_name} must be a number, got {value!r}")
        return int(number) if number.is_integer() and info.field_name == "loss_scale_window" else number

    def initial_dynamic_scale(self) -> int:
        """Where the adaptive scale starts."""
        return 1 << self.initial_scale_power


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    """The section ``bf16`` of a configuration, under either of its names.

    Raises: pydantic.ValidationError: unknown keys, and values that cannot be.
    """
    return DeepSpeedBF16Config(**(param_dict.get(BFLOAT16) or param_dict.get(BFLOAT16_OLD) or {}))


__all__ = ["BFLOAT16", "BFLOAT16_OLD", "DeepSpeedBF16Config", "DeepSpeedFP16Config", "FP16", "get_bfloat16_config"]

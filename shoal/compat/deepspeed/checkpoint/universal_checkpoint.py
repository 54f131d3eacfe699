"""``deepspeed.checkpoint.universal_checkpoint``: how a client describes a tensor that contains several parameters."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.compat.absent import absent_function

_DO = "leave it out: engine.load_checkpoint() loads any layout in any other, universal folders of DeepSpeed's too."


@dataclass
class SubparamShape:
    """One parameter that contains several, as a client saves it under ``UNIVERSAL_CHECKPOINT_INFO``.

    Args:
        patterns: regular expressions of the parameters' names.
        shape: with a tuple of sizes at the dim along which they are concatenated.
        partition_dim: that dim.
    """

    patterns: list[str]
    shape: tuple[tuple[int, ...] | int, ...]
    partition_dim: int


enable_universal_checkpoint = absent_function(
    "deepspeed.checkpoint.universal_checkpoint.enable_universal_checkpoint", _DO
)
load_hp_checkpoint_state = absent_function("deepspeed.checkpoint.universal_checkpoint.load_hp_checkpoint_state", _DO)

__all__ = ["SubparamShape", "enable_universal_checkpoint", "load_hp_checkpoint_state"]

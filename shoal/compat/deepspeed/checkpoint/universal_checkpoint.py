"""``deepspeed.checkpoint.universal_checkpoint``: what a client says of parameters that are several in one tensor."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.compat.absent import absent_function

_DO = "leave it out: engine.load_checkpoint() loads any layout in any other, universal folders of DeepSpeed's too."


@dataclass
class SubparamShape:
    """One parameter that holds several, as a client saves it under ``UNIVERSAL_CHECKPOINT_INFO``.

    Args:
        patterns: regular expressions of the parameters' names.
        shape: with a tuple of sizes in the place of the dim along which they lie one after the other.
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

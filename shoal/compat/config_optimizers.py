"""Optimizers that the config names are instances of the classes that DeepSpeed would have built.

    "type"         on the device     with offload_optimizer
    Adam, AdamW    FusedAdam         DeepSpeedCPUAdam
    Lion           FusedLion         DeepSpeedCPULion
    Adagrad        (torch's)         DeepSpeedCPUAdagrad
    Lamb           FusedLamb         FusedLamb

Shoal builds torch's own; scripts ask ``isinstance(optimizer, FusedAdam)`` and read ``adam_w_mode``.
"""

from __future__ import annotations

from typing import Any

import torch

from shoal.config import Config
from shoal.running.optimizer import ShardedOptimizer

_STANDS_FOR = "stands_for"  # the name of a class of DeepSpeed's, on the optimizer
ON_DEVICE = {"adam": "FusedAdam", "adamw": "FusedAdam", "lion": "FusedLion", "lamb": "FusedLamb"}
ON_HOST = {
    "adam": "DeepSpeedCPUAdam",
    "adamw": "DeepSpeedCPUAdam",
    "lion": "DeepSpeedCPULion",
    "adagrad": "DeepSpeedCPUAdagrad",
    "lamb": "FusedLamb",
}


class CountsOptimizers(type):
    """A class of DeepSpeed's, whose instances are also the optimizers that were marked as it."""

    def __instancecheck__(cls, instance: Any) -> bool:
        if super().__instancecheck__(instance):
            return True
        held = instance.optimizer if isinstance(instance, ShardedOptimizer) else instance
        return isinstance(held, torch.optim.Optimizer) and vars(held).get(_STANDS_FOR) == cls.__name__


def mark(optimizer: ShardedOptimizer, config: Config) -> None:
    """Mark an optimizer that the config named as an instance of DeepSpeed's class."""
    section = config.optimizer
    if section is None or not section.type or dict(section.params).get("torch_adam"):
        return
    is_on_host = config.zero_optimization.offload_optimizer.device != "none"
    name = (ON_HOST if is_on_host else ON_DEVICE).get(section.type.lower())
    if name is None:
        return
    setattr(optimizer.optimizer, _STANDS_FOR, name)
    if name in ("FusedAdam", "DeepSpeedCPUAdam"):
        is_decoupled = isinstance(optimizer.optimizer, torch.optim.AdamW)
        # Scripts read it; torch's own class has no such attribute.
        optimizer.optimizer.adam_w_mode = is_decoupled  # type: ignore[attr-defined]

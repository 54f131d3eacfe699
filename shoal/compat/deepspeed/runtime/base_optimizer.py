"""``deepspeed.runtime.base_optimizer``: the class of every optimizer that ``initialize`` returns."""

from __future__ import annotations

from shoal.zero.optimizer import DeepSpeedOptimizer
from shoal.zero.optimizer import ShardedOptimizer as ZeROOptimizer

__all__ = ["DeepSpeedOptimizer", "ZeROOptimizer"]

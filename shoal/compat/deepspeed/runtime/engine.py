"""``deepspeed.runtime.engine``: Shoal's engine under DeepSpeed's name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from shoal.compat.engine import DeepSpeedEngine

DeepSpeedOptimizerCallable = Callable[[Iterable[Any]], torch.optim.Optimizer]
DeepSpeedSchedulerCallable = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]

__all__ = ["DeepSpeedEngine", "DeepSpeedOptimizerCallable", "DeepSpeedSchedulerCallable"]

"""``deepspeed.monitor.config``: the sections of a configuration that say where values are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.compat.absent import not_built
from shoal.config.watching import CsvMonitor as CSVConfig
from shoal.config.watching import Tensorboard as TensorBoardConfig
from shoal.config.watching import Wandb as WandbConfig


@dataclass(frozen=True)
class DeepSpeedMonitorConfig:
    """Where values are written."""

    tensorboard: TensorBoardConfig
    wandb: WandbConfig
    csv_monitor: CSVConfig


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """Of a configuration's dict. Raises: NotBuiltError: Comet."""
    if param_dict.get("comet", {}).get("enabled"):
        raise not_built("the monitor of Comet", "use tensorboard, wandb or csv_monitor.")
    return DeepSpeedMonitorConfig(
        TensorBoardConfig(**param_dict.get("tensorboard", {})),
        WandbConfig(**param_dict.get("wandb", {})),
        CSVConfig(**param_dict.get("csv_monitor", {})),
    )


__all__ = ["CSVConfig", "DeepSpeedMonitorConfig", "TensorBoardConfig", "WandbConfig", "get_monitor_config"]

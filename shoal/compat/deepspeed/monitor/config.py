"""``deepspeed.monitor.config``: the sections of a config that name the writers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.config.watching import Comet as CometConfig
from shoal.config.watching import CsvMonitor as CSVConfig
from shoal.config.watching import Tensorboard as TensorBoardConfig
from shoal.config.watching import Wandb as WandbConfig


@dataclass(frozen=True)
class DeepSpeedMonitorConfig:
    """The writers' sections; all of them are disabled by default."""

    tensorboard: TensorBoardConfig = field(default_factory=TensorBoardConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    csv_monitor: CSVConfig = field(default_factory=CSVConfig)
    comet: CometConfig = field(default_factory=CometConfig)

    @property
    def enabled(self) -> bool:
        """Is any writer enabled?"""
        return any(each.enabled for each in (self.tensorboard, self.wandb, self.csv_monitor, self.comet))


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """The sections of a config's dict."""
    return DeepSpeedMonitorConfig(
        TensorBoardConfig(**param_dict.get("tensorboard", {})),
        WandbConfig(**param_dict.get("wandb", {})),
        CSVConfig(**param_dict.get("csv_monitor", {})),
        CometConfig(**param_dict.get("comet", {})),
    )


__all__ = [
    "CSVConfig",
    "CometConfig",
    "DeepSpeedMonitorConfig",
    "TensorBoardConfig",
    "WandbConfig",
    "get_monitor_config",
]

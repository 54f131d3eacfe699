"""One monitor for each kind of writer, under DeepSpeed's class names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.compat.deepspeed.monitor.config import (
    CometConfig,
    CSVConfig,
    DeepSpeedMonitorConfig,
    TensorBoardConfig,
    WandbConfig,
)
from shoal.compat.deepspeed.monitor.monitor import MonitorMaster
from shoal.observe.monitor import Event


class OneMonitor:
    """Writes on rank 0 where its section is enabled. The section's keys are its attributes.

    Args:
        config: the section.
        whole: a configuration that has nothing but that section.
    """

    def __init__(self, config: Any, whole: DeepSpeedMonitorConfig) -> None:
        self.config = config
        self._master = MonitorMaster(whole)

    def __getattr__(self, name: str) -> Any:
        if name == "config":
            raise AttributeError(name)
        return getattr(self.config, name)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Each event: name, value, number of samples or step."""
        self._master.write_events(event_list)


class TensorBoardMonitor(OneMonitor):
    """Writes TensorBoard's event files."""

    def __init__(self, tensorboard_config: TensorBoardConfig) -> None:
        super().__init__(tensorboard_config, DeepSpeedMonitorConfig(tensorboard=tensorboard_config))


class WandbMonitor(OneMonitor):
    """Logs to Weights & Biases."""

    def __init__(self, wandb_config: WandbConfig) -> None:
        super().__init__(wandb_config, DeepSpeedMonitorConfig(wandb=wandb_config))


class csvMonitor(OneMonitor):
    """Writes CSV files."""

    def __init__(self, csv_config: CSVConfig) -> None:
        super().__init__(csv_config, DeepSpeedMonitorConfig(csv_monitor=csv_config))


class CometMonitor(OneMonitor):
    """Logs to Comet."""

    def __init__(self, comet_config: CometConfig) -> None:
        super().__init__(comet_config, DeepSpeedMonitorConfig(comet=comet_config))

    @property
    def experiment(self) -> Any:
        """Comet's experiment; None while the section is off, and on every rank but 0."""
        return self._master.comet_experiment

"""``deepspeed.monitor``: the sections of a config that name the writers, and the monitors that write to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.comm.world import current_world
from shoal.config.schema import Comet as CometConfig
from shoal.config.schema import CsvMonitor as CSVConfig
from shoal.config.schema import MlflowMonitor as MLflowConfig
from shoal.config.schema import PrometheusSection
from shoal.config.schema import Tensorboard as TensorBoardConfig
from shoal.config.schema import Wandb as WandbConfig
from shoal.observe.monitor import CometWriter, Event, is_monitored, make_monitor


@dataclass(frozen=True)
class DeepSpeedMonitorConfig:
    """The writers' sections; all of them are disabled by default."""

    tensorboard: TensorBoardConfig = field(default_factory=TensorBoardConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    csv_monitor: CSVConfig = field(default_factory=CSVConfig)
    comet: CometConfig = field(default_factory=CometConfig)
    mlflow: MLflowConfig = field(default_factory=MLflowConfig)
    prometheus: PrometheusSection = field(default_factory=PrometheusSection)  # Shoal's

    @property
    def enabled(self) -> bool:
        """True if any writer is enabled."""
        return is_monitored(self)


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """The sections of a config's dict."""
    return DeepSpeedMonitorConfig(
        TensorBoardConfig(**param_dict.get("tensorboard", {})),
        WandbConfig(**param_dict.get("wandb", {})),
        CSVConfig(**param_dict.get("csv_monitor", {})),
        CometConfig(**param_dict.get("comet", {})),
        MLflowConfig(**param_dict.get("mlflow", {})),
        PrometheusSection(**param_dict.get("prometheus", {})),
    )


class MonitorMaster:
    """Writes on rank 0 by what ``get_monitor_config`` returned, or a whole configuration."""

    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config
        self._monitor = make_monitor(monitor_config, current_world().rank)
        self.enabled = is_monitored(monitor_config)

    @property
    def comet_experiment(self) -> Any:
        """Comet's experiment; None without one, and on every rank but 0."""
        writers = self._monitor.writers if self._monitor is not None else ()
        return next((writer.experiment for writer in writers if isinstance(writer, CometWriter)), None)

    def write_events(self, event_list: Sequence[Event]) -> None:
        """Each event: name, value, number of samples or step."""
        if self._monitor is not None:
            self._monitor.write_events(event_list)

    def close(self) -> None:
        """Write out what is held back, and close the files; done at the end of the process too."""
        if self._monitor is not None:
            self._monitor.close()

"""``deepspeed.monitor.monitor``: writes values over steps to every place that a configuration names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.comm.world import current_world
from shoal.observe.monitor import CometWriter, Event, Monitor, make_monitor


class MonitorMaster:
    """Writes on rank 0; elsewhere it does nothing.

    Args:
        monitor_config: what ``deepspeed.monitor.config.get_monitor_config`` gave, or a whole configuration.
    """

    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config
        self._monitor = make_monitor(monitor_config, current_world().rank)
        sections = monitor_config.tensorboard, monitor_config.csv_monitor, monitor_config.wandb, monitor_config.comet
        self.enabled = any(section.enabled for section in sections)

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


__all__ = ["Monitor", "MonitorMaster"]

"""What the engine says after a step: the line of ``steps_per_print``, timers, monitors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.config import Config
from shoal.config.watching import Comet
from shoal.engine.log import logger
from shoal.observe.monitor import CometWriter, CsvWriter, Monitor, MonitorWriter, TensorBoardWriter, WandbWriter
from shoal.observe.timers import StepTimers, ThroughputTimer
from shoal.parallel.segment_times import as_table
from shoal.text import format_bytes

if TYPE_CHECKING:
    from shoal.engine.engine import Engine


class Progress:
    """Called after each step. Says nothing unless the config asks.

    Args:
        monitor: gets learning rate, loss and loss scale by samples seen; or None.
    """

    def __init__(self, config: Config, timers: StepTimers, monitor: Monitor | None) -> None:
        every = config.steps_per_print
        self._every = int(every) if every is not None and math.isfinite(every) and every > 0 else None
        self._shows_memory = bool(config.memory_breakdown)
        self._timers = timers
        self._throughput = ThroughputTimer()
        self.monitor = monitor

    def after_step(self, engine: Engine, loss: float | None) -> None:
        """Rank 0 logs and writes; the other ranks do nothing. Reads no tensor."""
        if engine.global_rank != 0:
            return
        rates = engine.get_lr()
        if self.monitor is not None:
            events = [("Train/Samples/lr", rates[0], engine.global_samples)] if rates else []
            if loss is not None:
                events.append(("Train/Samples/train_loss", loss, engine.global_samples))
            if engine.loss_scale != 1.0:
                events.append(("Train/Samples/loss_scale", engine.loss_scale, engine.global_samples))
            self.monitor.write_events(events)
        if self._every is None or engine.global_steps % self._every:
            return
        norm = engine.get_global_grad_norm()
        words = [f"step {engine.global_steps}"]
        if loss is not None:
            words.append(f"loss {loss:.4f}")
        words.append(f"lr {', '.join(f'{rate:.3g}' for rate in rates)}")
        if norm is not None:
            words.append(f"gradient norm {norm:.4g}")
        if engine.skipped_steps:
            words.append(f"skipped {engine.skipped_steps}")
        words.append(f"{self._throughput.take(engine.global_samples):.4g} samples/s")
        phases = self._timers.take()
        if phases:
            words.append(" ".join(f"{name} {ms / self._every:.1f} ms" for name, ms in phases.items()))
        if self._shows_memory:
            words.append(f"memory {format_bytes(engine.memory_report().reading.allocated)}")
        logger.info(", ".join(words))
        times = engine.recompute.times.take() if engine.recompute is not None else {}
        if times:
            logger.info("recomputed segments\n%s", as_table(times))


def make_monitor(config: Config, rank: int) -> Monitor | None:
    """The monitor that the config's sections ask for; None where there is none, and on every rank but 0."""
    if rank != 0:
        return None
    writers: list[MonitorWriter] = []
    if config.tensorboard.enabled:
        writers.append(TensorBoardWriter(_folder(config.tensorboard, "tensorboard")))
    if config.csv_monitor.enabled:
        writers.append(CsvWriter(_folder(config.csv_monitor, "csv")))
    if config.wandb.enabled:
        writers.append(WandbWriter(config.wandb.project, group=config.wandb.group, team=config.wandb.team))
    if config.comet.enabled:
        writers.append(comet_writer(config.comet))
    return Monitor(writers) if writers else None


def comet_writer(section: Comet) -> CometWriter:
    """The writer of a section ``comet``."""
    return CometWriter(
        every=section.samples_log_interval,
        name=section.experiment_name,
        api_key=section.api_key,
        project=section.project,
        workspace=section.workspace,
        experiment_key=section.experiment_key,
        mode=section.mode,
        online=section.online,
    )


def _folder(section: Any, kind: str) -> Path:
    return Path(str(section.output_path or Path("runs") / kind), str(section.job_name))

"""What monitoring costs: of the ring of collectives, which is always on, and of all that ``shoal train`` logs.

    shoal run -n 2 benchmarks/monitoring.py --model mini --seconds 70

Blocks of 50 steps with monitoring and without run in turn. With: the log of goodput, one step in 50 measured by phase
on every rank, and loss, norm, rate and memory of each step as JSON lines, CSV and for TensorBoard.

``ring_percent`` and ``monitoring_percent`` are CPU time of the thread that trains, in what monitoring calls, per cent
of that thread's CPU time of a step without monitoring: other programs change them little. The goals are below 0.5 and
below 1. ``ratio`` is the median over pairs of blocks of the time with monitoring over the time without; the goal is
below 1.01, and only a machine that does nothing else tells it.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

import shoal
from shoal.comm.recorder import Group, Recorder
from shoal.comm.world import current_world
from shoal.device import Device
from shoal.engine.parts.rank_times import RankTimes
from shoal.models import GPT, named_config
from shoal.observe.goodput import GoodputLog
from shoal.observe.monitor import CsvWriter, JsonLinesWriter, Monitor, TensorBoardWriter

STEPS = 50  # of a block: as of goodput.rank_times_every


class Contender:
    """An engine, with monitoring or without."""

    def __init__(self, model: str, stage: int, micro: int, folder: Path | None) -> None:
        torch.manual_seed(0)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": micro,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": stage},
        }
        if folder is not None:
            config["goodput"] = {"file": str(folder / "goodput.jsonl"), "rank_times_every": STEPS}
        network = GPT(named_config(model))
        self.engine = shoal.initialize(model=network, config=config)[0]
        self.device = Device(self.engine.device)
        self.tokens = torch.zeros(micro, network.config.sequence_length, dtype=torch.long, device=self.engine.device)
        writers = []
        if folder is not None and current_world().rank == 0:
            writers = [
                JsonLinesWriter(folder / "metrics.jsonl"),
                CsvWriter(folder),
                TensorBoardWriter(folder / "board"),
            ]
        self.monitor = Monitor(writers)

    def block(self, steps: int) -> tuple[float, float]:
        """Seconds of so many steps, and CPU seconds of this thread.

        The loss is read in each, as ``shoal train`` does to log and to stop.
        """
        self.device.synchronize()
        began, cpu = time.perf_counter(), time.thread_time()
        for _ in range(steps):
            loss = self.engine(self.tokens, self.tokens)
            self.engine.backward(loss)
            self.engine.step()
            value, step = float(loss.detach()), self.engine.global_steps
            if self.monitor.enabled:
                memory = self.device.memory()
                norm = self.engine.get_global_grad_norm() or 0.0
                values = {
                    "train/loss": value,
                    "train/gradient_norm": norm,
                    "train/learning_rate": self.engine.get_lr()[0],
                }
                values |= {"memory/allocated_bytes": memory.allocated, "memory/peak_bytes": memory.peak}
                self.monitor.write_events([(name, float(each), step) for name, each in values.items()])
        self.device.synchronize()
        return time.perf_counter() - began, time.thread_time() - cpu


class CpuTime:
    """CPU seconds of this thread inside some functions, which are replaced until ``close``."""

    def __init__(self, *functions: tuple[type, str]) -> None:
        self.seconds = 0.0
        self._is_inside = False
        self._replaced = [(owner, name, getattr(owner, name)) for owner, name in functions]
        for owner, name, function in self._replaced:
            setattr(owner, name, self._measured(function))

    def _measured(self, function: Any) -> Any:
        @functools.wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return function(*args, **kwargs)
            self._is_inside, began = True, time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - began
                self._is_inside = False

        return measured

    def close(self) -> None:
        for owner, name, function in self._replaced:
            setattr(owner, name, function)


def ring_seconds(calls: int = 20_000) -> float:
    """CPU seconds of recording one collective."""
    recorder, group = Recorder(heartbeat=current_world().heartbeat), Group("dp", (0, 1))
    began = time.thread_time()
    for _ in range(calls):
        recorder.add("dp", "all_reduce", "blocks.0", 1 << 20, torch.float32, "data", group, (1 << 18, 1 << 18))
    return (time.thread_time() - began) / calls


def measure(
    folder: Path, *, model: str, stage: int, micro: int, seconds: float, steps: int = STEPS, pairs_at_least: int = 3
) -> dict[str, Any]:
    """Run pairs of blocks, each second one in the opposite order, until ``seconds`` have passed on rank 0.

    Returns: milliseconds of a step, ratios, and the CPU time of monitoring.
    """
    until = time.perf_counter() + seconds
    monitoring = CpuTime((RankTimes, "after_step"), (GoodputLog, "enter"), (Monitor, "write_events"))
    try:
        without = Contender(model, stage, micro, None)  # first: a later engine ends the log of an earlier one
        with_it = Contender(model, stage, micro, folder)
        world, ranks = current_world(), without.engine.axes.world
        for each in (without, with_it):
            each.block(2)
        monitoring.seconds = 0.0
        issued, pairs = world.recorder.num_issued, []
        while len(pairs) < pairs_at_least or ranks.gather_objects(time.perf_counter() < until, label="time")[0]:
            order = (with_it, without) if len(pairs) % 2 else (without, with_it)
            found = {each: each.block(steps) for each in order}
            pairs.append((found[with_it], found[without]))
    finally:
        monitoring.close()
    num_steps = steps * len(pairs)
    calls = (world.recorder.num_issued - issued) / (2 * num_steps)
    step_cpu = median(cpu for _, (_, cpu) in pairs) / steps
    for each in (with_it, without):
        each.monitor.close()
        each.engine.destroy()
    ratios = sorted(mine / other for (mine, _), (other, _) in pairs)
    ring, all_of_it = calls * ring_seconds(), monitoring.seconds / num_steps
    return {
        "ring_us": 1e6 * ring,
        "ring_percent": 100 * ring / step_cpu,
        "monitoring_us": 1e6 * all_of_it,
        "monitoring_percent": 100 * all_of_it / step_cpu,
        "collectives_of_a_step": calls,
        "with_ms": 1e3 * median(mine for (mine, _), _ in pairs) / steps,
        "without_ms": 1e3 * median(other for _, (other, _) in pairs) / steps,
        "ratio": median(ratios),
        "least": ratios[0],
        "greatest": ratios[-1],
        "pairs": len(pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/monitoring"), help="for the logs, the same of all ranks"
    )
    parser.add_argument("--model", default="mini", help="a size of shoal train")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--micro", type=int, default=1, help="sequences of a rank")
    parser.add_argument("--seconds", type=float, default=70, help="after which no further pair of blocks begins")
    arguments = parser.parse_args()
    found = measure(**vars(arguments))
    if current_world().rank == 0:
        print(json.dumps({"ranks": current_world().size, **vars(arguments), **found}, default=str))


if __name__ == "__main__":
    main()

"""What monitoring costs: blocks of steps with all that ``shoal train`` logs, and blocks without, in turn in one run.

    shoal run -n 2 benchmarks/monitoring.py --model mini --blocks 20

With: the log of goodput, one step in 50 measured by phase on every rank, and loss, norm, rate and memory of each step
as JSON lines, CSV and for TensorBoard. A block has 50 steps, of which one is measured. ``ratio`` is the median over
pairs of blocks of the time with monitoring over the time without; the goal is below 1.01. Only a machine that does
nothing else tells such a ratio.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

import shoal
from shoal.comm.world import current_world
from shoal.device import Device
from shoal.models import GPT, named_config
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

    def block(self, steps: int) -> float:
        """Seconds of so many steps. The loss is read in each, as ``shoal train`` does to log and to stop."""
        self.device.synchronize()
        began = time.perf_counter()
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
        return time.perf_counter() - began


def measure(folder: Path, *, model: str, stage: int, micro: int, blocks: int, steps: int = STEPS) -> dict[str, Any]:
    """Run pairs of blocks, each second one in the opposite order. Returns: milliseconds of a step, and ratios."""
    without = Contender(model, stage, micro, None)  # first: a later engine ends the log of an earlier one
    with_it = Contender(model, stage, micro, folder)
    for each in (without, with_it):
        each.block(2)
    pairs = []
    for number in range(blocks):
        order = (with_it, without) if number % 2 else (without, with_it)
        seconds = {each: each.block(steps) for each in order}
        pairs.append((seconds[with_it], seconds[without]))
    for each in (with_it, without):
        each.monitor.close()
        each.engine.destroy()
    ratios = sorted(mine / other for mine, other in pairs)
    return {
        "with_ms": 1e3 * median(mine for mine, _ in pairs) / steps,
        "without_ms": 1e3 * median(other for _, other in pairs) / steps,
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
    parser.add_argument("--blocks", type=int, default=20, help="pairs of blocks")
    arguments = parser.parse_args()
    found = measure(**vars(arguments))
    if current_world().rank == 0:
        print(json.dumps({"ranks": current_world().size, **vars(arguments), **found}, default=str))


if __name__ == "__main__":
    main()

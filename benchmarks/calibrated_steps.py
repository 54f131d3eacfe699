"""Steps of CPU ranks here: measured, and predicted by a dry run on the machine that `shoal calibrate` writes.

python -m benchmarks.calibrated_steps                     # measures the machine first
python -m benchmarks.calibrated_steps --machine here.yaml
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import shoal
from shoal.launch import LocalJob, run_local
from shoal.models import GPT, GPTConfig
from shoal.planner.calibrate import calibrate
from shoal.planner.dry_model import dry_run_model

RANKS, STEPS, WARM = 2, 5, 2
SHAPES = {
    "narrow": GPTConfig(vocab_size=1024, sequence_length=256, num_layers=8, hidden_size=256, num_heads=4),
    "wide": GPTConfig(vocab_size=4096, sequence_length=256, num_layers=4, hidden_size=768, num_heads=12),
}


def config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }


def worker(shape: str, stage: int, out: str) -> None:
    """One rank: the median time of a step, by rank 0."""
    torch.set_num_threads(1)
    engine = shoal.initialize(model=GPT(SHAPES[shape]), config=config(stage))[0]
    tokens = torch.zeros(2, SHAPES[shape].sequence_length, dtype=torch.long)
    taken = []
    for _ in range(WARM + STEPS):
        began = time.perf_counter()
        engine.backward(engine(tokens, tokens))
        engine.step()
        taken.append(time.perf_counter() - began)
    if engine.world.rank == 0:
        Path(out).write_text(json.dumps(statistics.median(taken[WARM:])))
    engine.destroy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", help="the file of shoal calibrate; without it, this machine is measured")
    parser.add_argument("--worker", nargs=3, metavar=("SHAPE", "STAGE", "OUT"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        shape, stage, out = given.worker
        worker(shape, int(stage), out)
        return
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        machine = given.machine or calibrate(Path(folder) / "here.yaml", RANKS)
        print("| model | stage | measured ms | predicted ms | off |\n|---|---|---|---|---|")
        for shape in SHAPES:
            for stage in (0, 1, 2, 3):
                out = str(Path(folder) / "seconds.json")
                program = [sys.executable, "-m", "benchmarks.calibrated_steps", "--worker", shape, str(stage), out]
                outcome = run_local(LocalJob(program, RANKS))
                if outcome.exit_code:
                    raise SystemExit(outcome.report)
                measured = json.loads(Path(out).read_text())
                dry = dry_run_model(lambda shape=shape: GPT(SHAPES[shape]), config(stage), RANKS, machine=machine)
                off = dry.seconds / measured - 1
                print(
                    f"| {shape} | {stage} | {1e3 * measured:.0f} | {1e3 * dry.seconds:.0f} | {off:+.0%} |", flush=True
                )


if __name__ == "__main__":
    main()

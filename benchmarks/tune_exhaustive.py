"""`shoal tune` against an exhaustive list: does a fifth of the runs find the best of 24 to 30 configurations?

python -m benchmarks.tune_exhaustive --machine here.yaml      # without --machine, this computer is measured first

Every configuration of a list takes steps on two CPU ranks, round after round, so that a slow minute hits all alike; its
time is the median of all steps. Then `tune` is given the same list, and a fifth as many runs. What it chooses and the
three fastest of the list are timed once more together: the fastest of many noisy times is too fast.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.comm.world import current_world
from shoal.launch import LocalJob, run_local
from shoal.models import GPT, GPTConfig
from shoal.planner.calibrate import calibrate
from shoal.planner.facts import facts_of
from shoal.planner.space import PlanRequest, candidates, with_savings
from shoal.planner.tune import step_times, tune
from shoal.simulation.machines import machine_of

RANKS, SEQUENCE, BATCH, ROUNDS, STEPS = 2, 64, 16, 2, 3
BASE: dict[str, Any] = {"bf16": {"enabled": False}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
ONE = dict.fromkeys(("pp", "virtual", "tp", "sp", "cp", "ep"), (1,)) | {"shards": ("all",)}
STATE = ONE | {"micro": (2, 8), "offload": ("none", "optimizer")}  # stages x micro x recomputation x offload
AXES = ONE | {"micro": (1, 2, 4, 8), "tp": (1, 2), "recompute": ("none",), "offload": ("none",)}
# Vocabulary, layers, width, heads, and the list.
MODELS: dict[str, tuple[int, int, int, int, dict[str, tuple[Any, ...]]]] = {
    "narrow": (1024, 6, 128, 4, STATE),
    "wide": (1024, 2, 384, 8, STATE),
    "words": (8192, 2, 128, 4, STATE),
    "deep": (512, 16, 64, 2, AXES),
    "middle": (2048, 4, 256, 4, AXES),
    "large": (1024, 2, 320, 4, AXES),
}


def model(name: str) -> nn.Module:
    vocabulary, layers, width, heads, _ = MODELS[name]
    shape = GPTConfig(vocabulary, SEQUENCE, num_layers=layers, hidden_size=width, num_heads=heads)
    return GPT(shape)


def __getattr__(name: str) -> Any:
    """``benchmarks.tune_exhaustive:narrow`` builds the model of that name."""
    if name not in MODELS:
        raise AttributeError(name)
    return lambda: model(name)


def list_of(name: str, machine: Any) -> dict[str, dict[str, Any]]:
    """The configurations, by name."""
    request = PlanRequest(RANKS, machine, SEQUENCE, BATCH, BASE, MODELS[name][-1])
    facts = facts_of(lambda: model(name), SEQUENCE, machine)
    possible = [one for each, why in candidates(request, facts) if not why for one in with_savings(each, request)]
    return {str(one): one.config(request, facts) for one in possible}


def worker(name: str, listed: Path, clock: Callable[[], float]) -> None:
    """One rank: the times of all configurations, round after round."""
    torch.set_num_threads(1)
    configs = json.loads(listed.read_text())
    taken: dict[str, list[float]] = {key: [] for key in configs}
    for _ in range(ROUNDS):
        for key, config in configs.items():
            taken[key] += step_times(f"benchmarks.tune_exhaustive:{name}", config, SEQUENCE, STEPS, clock=clock)[0]
            if current_world().rank == 0:
                times = {each: statistics.median(values) for each, values in taken.items() if values}
                listed.with_suffix(".times").write_text(json.dumps(times))


def timed(name: str, configs: dict[str, Any], listed: Path, *, counts_cpu: bool) -> dict[str, float]:
    """Seconds of a step of each configuration; kept next to the list."""
    if not (times := listed.with_suffix(".times")).is_file():
        listed.write_text(json.dumps(configs))
        program = [sys.executable, "-m", "benchmarks.tune_exhaustive", "--worker", name, str(listed)]
        program += ["--cpu-time"] if counts_cpu else []
        if (outcome := run_local(LocalJob(program, RANKS))).exit_code:
            raise SystemExit(outcome.report)
    found: dict[str, float] = json.loads(times.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", help="the file of shoal calibrate")
    parser.add_argument("--out", help="folder for what was measured; a second run goes on there")
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of the ranks: other programs run, too")
    parser.add_argument("--worker", nargs=2, metavar=("MODEL", "LIST"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    if given.worker:
        worker(given.worker[0], Path(given.worker[1]), time.process_time if given.cpu_time else time.perf_counter)
        return
    folder = Path(given.out or tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    file = given.machine or calibrate(folder / "here.yaml", RANKS)
    print("| model | listed | runs | best of the list | s | tune's | s | slower |\n|" + "---|" * 8, flush=True)
    for name in given.models:
        configs = list_of(name, machine_of(file))
        times = timed(name, configs, folder / f"{name}.json", counts_cpu=given.cpu_time)
        runs = len(times) // 5
        tuned = tune(
            f"benchmarks.tune_exhaustive:{name}",
            RANKS,
            folder / name,
            machine=file,
            sequence=SEQUENCE,
            global_batch=BATCH,
            config=BASE,
            space=MODELS[name][-1],
            num_trials=runs,
            steps=2 * STEPS,
            counts_cpu=given.cpu_time,
        )
        assert tuned.best is not None
        chosen, first = tuned.best.name, sorted(times, key=times.__getitem__)[:3]
        last = {key: configs[key] for key in {*first, chosen}}
        times = timed(name, last, folder / f"{name}-last.json", counts_cpu=given.cpu_time)
        best = min(times, key=times.__getitem__)
        cells = [name, len(configs), runs, best, f"{times[best]:.4f}", chosen, f"{times[chosen]:.4f}"]
        print(f"| {' | '.join(map(str, cells))} | {times[chosen] / times[best] - 1:+.1%} |", flush=True)


if __name__ == "__main__":
    main()

"""What fewer bits cost in loss: the same training on text, plain and with each format, one after the other.

    python -m benchmarks.fewer_bits_on_text --model small-34m --steps 400 --out runs/fewer_bits_on_text.json

Each run is ``shoal train`` on two ranks with the same seed, so that only what the configuration adds differs. The table
has the validation loss at the end, and how far it is from the plain run's of the same stage.
Runs that ``--out`` has already are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.arena import ROOT, machine, table


@dataclass(frozen=True)
class Run:
    """A training, and the plain one that it is compared with."""

    more: dict[str, Any] = field(default_factory=dict)
    stage: int = 2
    of: str = "plain"


def _wire(**keys: Any) -> Run:
    return Run({"wire": keys})


def _local(**keys: Any) -> Run:
    return Run({"local_steps": keys, "parallel": {"dp_replicate": 2}})


RUNS: dict[str, Run] = {
    "plain": Run(),
    "reduce fp32": Run({"communication_data_type": "fp32"}),  # other rounding: how far apart equal runs end
    "gather and reduce int8": _wire(gather="int8", reduce="int8"),
    "gather fp8, reduce int8": _wire(gather="fp8", reduce="int8"),
    "gather int4": _wire(gather="int4"),
    "gather int4, difference": _wire(gather="int4", difference=True),
    "reduce int4_hadamard": _wire(reduce="int4_hadamard"),
    "gather int8, reduce int4_hadamard": _wire(gather="int8", reduce="int4_hadamard"),
    "reduce int4": _wire(reduce="int4"),
    "gather and reduce int4": _wire(gather="int4", reduce="int4"),
    "gather int4, difference, reduce int4_hadamard": _wire(gather="int4", difference=True, reduce="int4_hadamard"),
    "reduce 1bit": _wire(reduce="1bit"),
    "local steps, every 10": _local(every=10),
    "local steps, every 10, means": _local(every=10, outer_lr=1.0, outer_momentum=0.0),
    "local steps, every 30, means": _local(every=30, outer_lr=1.0, outer_momentum=0.0),
    "local steps, every 30": _local(every=30),
    "local steps, every 30, 3 fragments": _local(every=30, fragments=3),
    "local steps, every 30, int4_hadamard": _local(every=30, wire="int4_hadamard"),
    "local steps, every 10, means, int4_hadamard": _local(
        every=10, outer_lr=1.0, outer_momentum=0.0, wire="int4_hadamard"
    ),
    "1-bit Adam, freeze_step 80": Run(
        {
            "optimizer": {
                "type": "OneBitAdam",
                "params": {"freeze_step": 80, "betas": [0.9, 0.95], "weight_decay": 0.1},
            }
        },
        stage=0,
    ),
    "fp8 tensorwise": Run({"fp8": {"recipe": "tensorwise"}}),
    "fp8 rowwise": Run({"fp8": {"recipe": "rowwise"}}),
    "optimizer state int8": Run({"precision": {"state_dtype": "int8"}}),
    "optimizer state fp8": Run({"precision": {"state_dtype": "fp8"}}),
}


def train(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """Losses of one run by step, and the median time of a step in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(run.more))
        out = Path(folder) / "run"
        words = {
            "model": options.model,
            "ranks": 2,
            "stage": run.stage,
            "precision": options.precision,
            "micro-batch": options.micro_batch,
            "steps": options.steps,
            "validate-every": options.every,
            "seed": options.seed,
            "sample-tokens": 0,
            "save-every": 0,
            "config": config,
            "out": out,
        }
        if options.learning_rate is not None:
            words["learning-rate"] = options.learning_rate
        command = [sys.executable, "-m", "shoal", "train", *(w for k, v in words.items() for w in (f"--{k}", str(v)))]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            return {"error": (done.stderr or done.stdout).strip().splitlines()[-8:]}
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {
        "validation": {str(line["step"]): line["validation/loss"] for line in lines if "validation/loss" in line},
        "training": {str(line["step"]): line["train/loss"] for line in lines if "train/loss" in line},
    }


def show(results: dict[str, Any]) -> str:
    lines = [["run", "validation loss", "to plain"]]
    for name, result in results.items():
        if "error" in result:
            lines.append([name, "failed", result["error"][-1][:60]])
            continue
        last = list(result["validation"].values())[-1]
        plain = results.get(RUNS[name].of, {}).get("validation")
        ratio = f"{100 * (last / list(plain.values())[-1] - 1):+.2f} %" if plain else ""
        lines.append([name, f"{last:.4f}", ratio])
    return table(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="small-34m", help="a shape of shoal train (default: small-34m)")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=100, help="steps between two validations")
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, help="default: the usual one of the model's size")
    parser.add_argument("--runs", nargs="+", default=list(RUNS), metavar="NAME", help="; ".join(RUNS))
    parser.add_argument("--out", type=Path, required=True, help="JSON file that results are added to")
    options = parser.parse_args()
    unknown = [name for name in options.runs if name not in RUNS]
    if unknown:
        parser.error(f"--runs {unknown[0]!r}: there are {'; '.join(RUNS)}.")
    results: dict[str, Any] = json.loads(options.out.read_text())["results"] if options.out.exists() else {}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for name in options.runs:
        if name not in results or "error" in results[name]:
            results[name] = train(RUNS[name], options)
            given = {key: value for key, value in vars(options).items() if key not in ("out", "runs")}
            options.out.write_text(json.dumps({"machine": machine(), "options": given, "results": results}, indent=1))
            print(show(results), "\n", flush=True)


if __name__ == "__main__":
    main()

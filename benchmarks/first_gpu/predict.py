"""What a dry run predicts of the steps that are measured, on this machine's host, without the GPU.

    python -m benchmarks.first_gpu.predict --machine h200 --out runs/predicted.json

Writes {key: {"ms": of the step, "copies ms": that computing waits for copies, ...}}. Another predictor is a callable
``(stage, places, machine) -> dict`` named as ``--by module:function``; without one the page has no predictions.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import shoal
from shoal.models.gpt import GPT, GPTConfig

SHAPE = GPTConfig(
    vocab_size=50_304, sequence_length=1024, num_layers=48, hidden_size=1600, num_heads=25, tied=False
)  # as benchmarks.contenders builds it
ROWS = 4  # sequences of a micro-batch
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    **{f"shoal-{stage}": (stage, ()) for stage in range(4)},
    "shoal-2-optimizer": (2, ("optimizer",)),
    "shoal-3-param": (3, ("param",)),
    "shoal-3-param-optimizer": (3, ("param", "optimizer")),
}
Predictor = Callable[[int, tuple[str, ...], str], dict[str, float]]


def zero_of(stage: int, places: tuple[str, ...]) -> dict[str, Any]:
    return {"stage": stage, **{f"offload_{place}": {"device": "cpu", "pin_memory": True} for place in places}}


def by_dry_run(stage: int, places: tuple[str, ...], machine: str) -> dict[str, float]:
    """A step of ``SHAPE`` on one simulated GPU, in milliseconds."""
    settings = {
        "train_micro_batch_size_per_gpu": ROWS,
        "bf16": {"enabled": True},
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "zero_optimization": zero_of(stage, places),
    }
    dry_run: Any = getattr(shoal, "dry_run", None)
    if dry_run is None:
        raise NotImplementedError("shoal.dry_run is not part of this version")
    with dry_run(1, machine=machine) as run:
        engine = shoal.initialize(model=GPT(SHAPE), config=settings)[0]
        batch = torch.zeros(ROWS, SHAPE.sequence_length, dtype=torch.long)
        for _ in range(3):
            with run.step():
                engine.backward(engine(batch, batch))
                engine.step()
        engine.destroy()
    step = run.steps[-1]
    return {"ms": 1e3 * step.seconds, **{f"{kind} ms": 1e3 * seconds for kind, seconds in step.by_kind.items()}}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--by", default="", metavar="MODULE:FUNCTION")
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    predict: Predictor = by_dry_run
    if given.by:
        module, _, name = given.by.partition(":")
        predict = getattr(importlib.import_module(module), name)
    found: dict[str, Any] = {}
    for key in given.cases:
        try:
            found[key] = predict(*CASES[key], given.machine)
        except Exception as error:
            found[key] = {"missing": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

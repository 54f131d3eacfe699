"""Steps of large models on simulated H100s: what each rank waits for. No GPU, no values, a few minutes on one core.

python -m benchmarks.simulated_steps                # the table of benchmarks/README.md
python -m benchmarks.simulated_steps --only 7b-8-3 --trace runs/7b.json
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import shoal
from shoal.comm.world import fake_world
from shoal.models.gpt import GPT, GPTConfig
from shoal.simulation.dry_run import DryRun, StepTime
from shoal.simulation.times import COMMUNICATION, COMPUTE, COPY, HOST, UPDATE

SHAPES = {
    "1.5b": GPTConfig(vocab_size=50_304, sequence_length=1024, num_layers=48, hidden_size=1600, num_heads=25),
    "7b": GPTConfig(vocab_size=32_000, sequence_length=4096, num_layers=32, hidden_size=4096, num_heads=32),
    "70b": GPTConfig(vocab_size=32_000, sequence_length=4096, num_layers=80, hidden_size=8192, num_heads=64),
}
WARM_STEPS = 2  # the first learns the order of the units, the second has optimizer state


@dataclass(frozen=True)
class Case:
    """One row: a model on some ranks."""

    model: str
    num_ranks: int
    stage: int
    micro_batch: int
    offload: str = ""  # "", "optimizer", "all"
    overlap: bool = False  # updates on the host and gathers after the step, with the next forward
    recompute: bool = False
    accumulation: int = 1
    zenflow: str = ""  # "", "seen at once", "late" (overlap_step)

    @property
    def num_steps(self) -> int:
        """Steps whose mean is the row: with ZenFlow those of an interval."""
        return 4 if self.zenflow else 1

    @property
    def name(self) -> str:
        overlap = "overlap" if self.overlap else ""
        flow = self.zenflow and f"zenflow {self.zenflow}"
        parts = (self.model, self.num_ranks, self.stage, self.offload, overlap, flow)
        return "-".join(str(part) for part in parts if part != "")

    def config(self) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.stage}
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if self.offload == "all":
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
        if self.zenflow:
            zero["zenflow"] = {"topk_ratio": 0.1, "update_interval": 4, "overlap_step": self.zenflow == "late"}
        if self.stage in (1, 2):
            zero["overlap_param_gather"] = self.overlap
        return {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "zero_optimization": zero,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        }


CASES = [
    *(Case("1.5b", 1, stage, 8) for stage in range(4)),
    *(Case("1.5b", 8, stage, 8) for stage in range(4)),
    *(Case("7b", 8, stage, 2) for stage in range(1, 4)),
    Case("7b", 8, 2, 2, overlap=True),
    *(Case("70b", 512, 3, 1, recompute=recompute) for recompute in (False, True)),
    Case("1.5b", 1, 2, 16, "optimizer", recompute=True),
    Case("1.5b", 1, 2, 16, "optimizer", overlap=True, recompute=True),
    Case("1.5b", 8, 3, 8, "optimizer"),
    Case("7b", 1, 2, 8, "optimizer", recompute=True),
    Case("7b", 1, 2, 8, "optimizer", overlap=True, recompute=True),
    Case("7b", 1, 3, 8, "all", recompute=True),
    *(Case("7b", 1, 2, 1, "optimizer", overlap=overlap, recompute=True) for overlap in (False, True)),
    *(Case("7b", 1, 2, 1, "optimizer", True, True, zenflow=flow) for flow in ("seen at once", "late")),
    Case("7b", 8, 2, 2, "optimizer"),
    Case("7b", 8, 2, 2, "optimizer", overlap=True),
    Case("7b", 8, 3, 2, "optimizer"),
    Case("7b", 8, 3, 2, "all"),
]


def run(case: Case, machine: str, num_steps: int = 1) -> DryRun:
    """Run a case dry. Returns: it, with its last steps."""
    shape = SHAPES[case.model]
    with shoal.dry_run(case.num_ranks, machine=machine) as dry:
        model = GPT(shape)
        if case.recompute:
            for block in model.blocks:
                block.forward = _recomputed(block.forward)
        engine, *_ = shoal.initialize(model=model, config=case.config())
        tokens = torch.zeros(case.micro_batch, shape.sequence_length, dtype=torch.long)
        for _ in range((8 if case.zenflow else WARM_STEPS) + num_steps):
            with dry.step():
                for _ in range(case.accumulation):
                    engine.backward(engine(tokens, tokens))
                    engine.step()
        engine.destroy()
    return dry


def mean_of(steps: Sequence[StepTime]) -> StepTime:
    """The last step, with the mean times of all."""
    count = len(steps)
    by_kind = {kind: sum(step.by_kind[kind] for step in steps) / count for kind in steps[-1].by_kind}
    return replace(steps[-1], seconds=sum(step.seconds for step in steps) / count, by_kind=by_kind)


def _recomputed(forward: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        return shoal.checkpointing.checkpoint(forward, *args, **kwargs)

    return call


def host_seconds(stage: int | None, num_steps: int = 6) -> float:
    """Processor time of a step of a model of 32 small layers, on rank 0 of 8 that do not exist: the median.

    Args:
        stage: None: forward and backward without Shoal.
    """
    shape = GPTConfig(vocab_size=64, sequence_length=8, num_layers=32, hidden_size=16, num_heads=2)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    with fake_world(8):
        model = GPT(shape)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        if stage is None:

            def step() -> None:
                model(tokens, tokens).backward()
                model.zero_grad()

        else:
            zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
            config = {
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": zero,
                "precision": {"nonfinite": "warn"},  # other ranks' parameters are whatever the memory held
            }
            engine, *_ = shoal.initialize(model=model, optimizer=optimizer, config=config)

            def step() -> None:
                engine.backward(engine(tokens, tokens))
                engine.step()

        found = []
        for _ in range(num_steps + 3):
            began = time.process_time()
            step()
            found.append(time.process_time() - began)
        if stage is not None:
            engine.destroy()
    return statistics.median(found[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="h100")
    parser.add_argument("--only", default="", help="run the cases whose name begins so")
    parser.add_argument("--trace", default="", help="write the last case's Chrome trace to this file")
    parser.add_argument("--host", action="store_true", help="measure Shoal's Python instead")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    if arguments.host:
        plain = host_seconds(None)
        print(f"forward and backward of 32 small layers without Shoal: {1e3 * plain:.1f} ms")
        for stage in range(4):
            with contextlib.redirect_stdout(io.StringIO()):
                own = host_seconds(stage) - plain
            print(f"stage {stage}: {1e3 * own:+.1f} ms with hooks, collectives and the optimizer's step")
        return
    kinds = (COMPUTE, COMMUNICATION, COPY, UPDATE, HOST)
    print(
        "| model, GPUs, stage, offload | micro-batch | step ms |",
        *(f"{kind} |" for kind in kinds),
        "host ms | took s |",
    )
    print("|---" * (len(kinds) + 5) + "|")
    for case in CASES:
        if not case.name.startswith(arguments.only):
            continue
        began = time.monotonic()
        with contextlib.redirect_stdout(io.StringIO()):
            dry = run(case, arguments.machine, case.num_steps)
        last = mean_of(dry.steps[-case.num_steps :])
        name = case.name + (" recomputed" if case.recompute else "")
        shares = " | ".join(f"{1e3 * last.by_kind[kind]:.1f} ({100 * last.share(kind):.1f} %)" for kind in kinds)
        print(
            f"| {name} | {case.micro_batch} | {1e3 * last.seconds:.0f} | {shares} "
            f"| {1e3 * last.host_seconds:.1f} | {time.monotonic() - began:.0f} |",
            flush=True,
        )
        if arguments.trace:
            dry.write_trace(arguments.trace)


if __name__ == "__main__":
    main()

"""A training step of a model under a configuration, dry: what it takes, for whoever chooses configurations.

step = shoal.planner.dry_model.dry_run_model("6.7b", {"zero_optimization": {"stage": 3}, ...}, 64, machine="h100")
step.seconds, step.memory.reserved, step.received
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.config import load
from shoal.config.ranks import model_degrees
from shoal.engine.entry import initialize
from shoal.planner.model_of import Batch, as_builder, loss_of, token_batch
from shoal.simulation.dry_run import DryRun, PipelineDryRun, StepTime, dry_run, dry_run_pipeline
from shoal.simulation.machines import GpuNode, machine_of
from shoal.simulation.memory import MemoryPeak
from shoal.simulation.times import COMMUNICATION, STAGES

_NUM_STEPS = 3  # the first learns the order of the units, the second makes the optimizer's state


@dataclass(frozen=True)
class PlannedStep:
    """A step as it is when it has settled.

    Attributes: ``seconds``: of the whole step, accumulation included. ``stages``: of the first rank of each pipeline
    stage; one without a pipeline.
    """

    num_ranks: int
    machine: GpuNode
    seconds: float
    stages: tuple[StepTime, ...]

    @property
    def worst(self) -> int:
        """The pipeline stage that needs most memory."""
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage].memory.reserved)

    @property
    def memory(self) -> MemoryPeak:
        """Of the rank that needs most."""
        return self.stages[self.worst].memory

    @property
    def fits(self) -> bool:
        """True if no rank needs more memory than its device has."""
        return not any(step.memory.is_beyond for step in self.stages)

    @property
    def received(self) -> dict[str, int]:
        """Bytes by collective, each of the rank that receives most."""
        ops = dict.fromkeys(op for step in self.stages for op in step.received)
        return {op: max(step.received.get(op, 0) for step in self.stages) for op in ops}

    @property
    def exposed_communication(self) -> float:
        """Seconds that a rank waits for communication within its stage; of the rank that waits longest."""
        return max(step.by_kind[COMMUNICATION] for step in self.stages)

    @property
    def bubble(self) -> float:
        """The part of the step in which a rank waits for other pipeline stages: the mean over the stages."""
        return sum(step.share(STAGES) for step in self.stages) / len(self.stages)


def dry_run_model(
    model: str | Callable[[], nn.Module],
    config: Mapping[str, Any],
    num_ranks: int,
    *,
    machine: str | Path | GpuNode = "h100",
    sequence: int | None = None,
    batch: Callable[[int], Batch] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> PlannedStep:
    """Run steps of ``config`` dry, as the first rank of each pipeline stage, and return the last one.

    Args:
        model: as of ``build_model``: "6.7b", a Hugging Face folder, "module:function"; or a function that builds it.
        config: the JSON file's content; it makes the optimizer.
        machine: as of ``shoal.dry_run``.
        sequence: tokens of a whole row, of a language model; None: as many as it takes, at most 4096.
        batch: gets the rows of a micro-batch, returns the arguments of the model's forward on a rank: a tuple, or a
            dict of keywords. None: token ids for a language model, its part of the row under ``sp`` and ``cp``.
        loss: of what the model returns; None: a tensor of one number, or its attribute ``loss``. Not in a pipeline.

    Raises: UsageError: no batch is known for the model; an unknown machine. What ``initialize`` and the model raise.
    Memory: that of the model's objects; tensors have none.
    """
    settings = load(dict(config), world_size=num_ranks, warns=False)
    degrees = model_degrees(settings)
    num_stages = degrees.get("pp", 1)
    num_micro, num_rows = int(settings.gradient_accumulation_steps), int(settings.train_micro_batch_size_per_gpu)
    node, build = machine_of(machine), as_builder(model, sequence)

    def arguments(made: nn.Module) -> Batch:
        if batch is not None:
            return batch(num_rows)
        parts = degrees.get("sp", 1) * degrees.get("cp", 1)
        return token_batch(made, num_rows, sequence, parts)

    def train(run: DryRun) -> None:
        made = build()
        given = arguments(made)
        engine = initialize(model=made, config=dict(config))[0]
        for _ in range(_NUM_STEPS):
            with run.step():
                if num_stages > 1:
                    engine.train_batch(repeat(given))
                    continue
                for _ in range(num_micro):
                    output = engine(**given) if isinstance(given, dict) else engine(*given)
                    engine.backward((loss or loss_of)(output))
                    del output
                    engine.step()
        engine.destroy()

    if num_stages > 1:
        pipeline = dry_run_pipeline(train, num_ranks, num_stages, machine=node)
        return _planned(pipeline, num_ranks, node)
    with dry_run(num_ranks, machine=node) as run:
        train(run)
    return _planned(PipelineDryRun([run]), num_ranks, node)


def _planned(pipeline: PipelineDryRun, num_ranks: int, node: GpuNode) -> PlannedStep:
    return PlannedStep(num_ranks, node, pipeline.seconds, tuple(run.steps[-1] for run in pipeline.stages))

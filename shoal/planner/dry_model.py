"""A training step of a model under a configuration, dry: what it takes, as ``plan`` needs it.

step = shoal.planner.dry_model.dry_run_model("6.7b", {"zero_optimization": {"stage": 3}, ...}, 64, machine="h100")
step.seconds, step.memory.reserved, step.received
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice, repeat
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.config import Config, load
from shoal.config.parallel import SCHEDULES
from shoal.config.ranks import mesh_of, model_degrees
from shoal.device import fake_tensors
from shoal.engine.entry import initialize
from shoal.engine.parts.activations import SavedActivations
from shoal.errors import ModelError
from shoal.parallel.recompute_blocks import choose
from shoal.pipeline.blocks import find_blocks, find_outside
from shoal.pipeline.cut import cut_bounds
from shoal.pipeline.schedule import build_schedule
from shoal.pipeline.stage import StageModule
from shoal.planner.model_of import Batch, as_builder, attend_by_ranks, token_batch
from shoal.planner.repeated_blocks import Repeats, RunGrid, RunKey
from shoal.planner.short_training import take_step
from shoal.simulation.dry_run import DryRun, PipelineDryRun, StepTime, dry_run, dry_run_pipeline
from shoal.simulation.machines import GpuNode, machine_of
from shoal.simulation.memory import MemoryPeak
from shoal.simulation.modes import WithoutInitialValues
from shoal.simulation.times import COLLECTIVE_WAYS, COMMUNICATION, STAGES
from shoal.text import parse_bytes

_NO_BUDGET = 1 << 62  # bytes, with which no block is recomputed
_FEW_MICRO = (2, 3)  # micro-batches: one after which gradients are reduced, one before it, and one more
_IN_CALLS = ("lamb", "muon", "onebitlamb")  # optimizers that update several units in a call


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
    def links(self) -> dict[str, int]:
        """Bytes by link, each of the rank that receives most over it."""
        return {way: max(step.links.get(way, 0) for step in self.stages) for way in COLLECTIVE_WAYS}

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
    repeats: bool = True,
) -> PlannedStep:
    """Run steps of ``config`` dry, as the first rank of each pipeline stage, and return the last one.

    Args:
        model: as of ``build_model``: "6.7b", a Hugging Face folder, "module:function", which attends over the ranks of
            ``sp`` and ``cp``; or a function that builds it.
        config: the JSON file's content; it makes the optimizer.
        machine: as of ``shoal.dry_run``.
        sequence: tokens of a whole row, of a language model; None: as many as it takes, at most 4096.
        batch: gets the rows of a micro-batch, returns the arguments of the model's forward on a rank: a tuple, or a
            dict of keywords. None: token ids for a language model, its part of the row under ``sp`` and ``cp``.
        loss: of what the model returns; None: a tensor of one number, or its attribute ``loss``. Not in a pipeline.
        repeats: run a few of equal blocks and micro-batches, and extend what they take to all of them (see
            ``repeated_blocks``); False: run all.

    Raises: UsageError: no batch is known for the model; an unknown machine. What ``initialize`` and the model raise.
    Memory: that of the model's objects; tensors have none.
    """
    settings = load(dict(config), world_size=num_ranks, warns=False)
    run = _ModelRun(as_builder(model, sequence), dict(config), settings, num_ranks, machine_of(machine))
    run.attends_by_ranks = isinstance(model, str) and run.num_parts > 1
    run.batch, run.loss, run.sequence = batch, loss, sequence
    num_micro = int(settings.gradient_accumulation_steps)
    fewer = _fewer(run, num_micro) if repeats else None
    if fewer is None:
        return run.steps([num_micro])[0]
    grid, removal, num_recomputable = fewer
    steps: dict[RunKey, PlannedStep] = {}
    asked = settings.activation_checkpointing.memory_budget
    budget = parse_bytes(asked) if isinstance(asked, str) else asked
    budgets = (None,) if budget is None or grid.blocks[0] == grid.num_blocks else (0, _NO_BUDGET)
    for at in budgets:
        for blocks in dict.fromkeys(grid.blocks):
            micro = tuple(dict.fromkeys(grid.micro))
            made = run.steps(micro, None if removal is None else removal(grid.num_blocks - blocks), at)
            steps |= {(blocks, num, at): step for num, step in zip(micro, made, strict=True)}
    if budget is not None and len(budgets) > 1:
        part = _part_kept(run.saved, num_recomputable, budget)
        grid = replace(grid, budgets=dict(zip(budgets, (1 - part, part), strict=True)))
    largest = steps[grid.largest]
    stages = tuple(
        grid.step({at: step.stages[number] for at, step in steps.items()}, run.node.gpu_nbytes)
        for number in range(len(largest.stages))
    )
    seconds = grid.extended({at: {("seconds",): step.seconds} for at, step in steps.items()})["seconds",]
    return replace(largest, stages=stages, seconds=stages[0].seconds if len(stages) == 1 else seconds)


def _part_kept(saved: Sequence[tuple[int, int]], num_blocks: int, budget: int) -> float:
    """The part of ``num_blocks`` blocks, each like one of ``saved`` in turn, that a budget lets run as they are."""
    each = dict(enumerate(islice(cycle(saved), num_blocks)))
    inputs, whole = ({str(at): pair[which] for at, pair in each.items()} for which in (0, 1))
    return list(choose(inputs, whole, budget).values()).count("keep") / num_blocks


Removal = Callable[[nn.Module], list[str]]


class _ModelRun:
    """Dry runs of one model and config."""

    batch: Callable[[int], Batch] | None
    loss: Callable[[Any], torch.Tensor] | None
    sequence: int | None
    attends_by_ranks = False
    saved: Sequence[tuple[int, int]] = ()  # by block of the last run with a memory_budget, as ``BudgetedRecompute``'s

    def __init__(
        self,
        build: Callable[[], nn.Module],
        config: dict[str, Any],
        settings: Config,
        num_ranks: int,
        node: GpuNode,
    ) -> None:
        self.build, self.config, self.settings, self.num_ranks, self.node = build, config, settings, num_ranks, node
        self.degrees = model_degrees(settings)
        self.num_stages = self.degrees.get("pp", 1)
        # The first step learns the order of the units, and makes the optimizer state; with an optimizer on the host the
        # second one is the first whose updates the next forward waits for.
        self.num_warm = 1 if settings.zero_optimization.offload_optimizer.device == "none" else 2
        self.num_parts = self.degrees.get("sp", 1) * self.degrees.get("cp", 1)  # of a row
        self.steps_in_calls = settings.optimizer is not None and str(settings.optimizer.type).lower() in _IN_CALLS

    def steps(
        self, num_micro: Sequence[int], remove: Removal | None = None, budget: int | None = None
    ) -> list[PlannedStep]:
        """A step that has settled, of each of these numbers of micro-batches.

        Args:
            remove: blocks of the model; it returns where pipeline stages begin.
            budget: in place of the config's ``memory_budget``.
        """

        def train(run: DryRun) -> None:
            config = dict(self.config)
            with run.building():
                model = self.build()
                if self.attends_by_ranks:
                    attend_by_ranks(model)
                starts = None if remove is None else remove(model)
            given = self._arguments(model)
            if starts:
                config["pipeline"] = {**config.get("pipeline", {}), "split_points": starts}
            if budget is not None:
                config["activation_checkpointing"] = {**config["activation_checkpointing"], "memory_budget": budget}
            if num_micro[0] != self.settings.gradient_accumulation_steps:
                config.pop("train_batch_size", None)
                config["train_micro_batch_size_per_gpu"] = self.settings.train_micro_batch_size_per_gpu
                config["gradient_accumulation_steps"] = num_micro[0]
            engine = initialize(model=model, config=config)[0]
            per_micro = engine.train_batch_size() // num_micro[0]
            for num in (*[num_micro[0]] * self.num_warm, *num_micro):
                engine.set_train_batch_size(num * per_micro)
                with run.step():
                    take_step(engine, repeat(given, num), self.loss)
            activations = engine.part(SavedActivations)
            if activations is not None and activations.budget is not None:
                self.saved = tuple(activations.budget.saved.values())
            engine.destroy()

        if self.num_stages > 1:
            stride = mesh_of(self.settings, self.num_ranks).ranks_along("pp", 0)[1]
            pipeline = dry_run_pipeline(train, self.num_ranks, self.num_stages, stride=stride, machine=self.node)
        else:
            with dry_run(self.num_ranks, machine=self.node) as run:
                train(run)
            pipeline = PipelineDryRun([run])
        return [
            PlannedStep(
                self.num_ranks,
                self.node,
                pipeline.seconds_of(number),
                tuple(each.steps[number] for each in pipeline.stages),
            )
            for number in range(self.num_warm, self.num_warm + len(num_micro))
        ]

    def _arguments(self, model: nn.Module) -> Batch:
        num_rows = int(self.settings.train_micro_batch_size_per_gpu)
        if self.batch is not None:
            return self.batch(num_rows)
        return token_batch(model, num_rows, self.sequence, self.num_parts)


def _fewer(run: _ModelRun, num_micro: int) -> tuple[RunGrid, Callable[[int], Removal] | None, int] | None:
    """How many blocks and micro-batches to run, what removes repetitions, and the number of blocks; None: all."""
    micro, fills = (num_micro, num_micro), run.num_stages > 1 and run.settings.pipeline.schedule == "gpipe"
    if run.num_stages > 1:
        low = run.num_stages + num_micro % run.num_stages
        is_periodic = run.settings.pipeline.schedule in SCHEDULES
        micro = (low, low + run.num_stages) if is_periodic and num_micro > low + run.num_stages else micro
    elif num_micro > _FEW_MICRO[1]:
        micro = _FEW_MICRO
    with fake_tensors(), WithoutInitialValues():
        model = run.build()
        bounds = _bounds(run, model, num_micro)
    found = None if bounds is None else Repeats.of(model)
    if found is None or bounds is None:
        return (RunGrid((1, 1), micro, 1, num_micro, fills), None, 0) if micro[0] != num_micro else None
    count = min(num for _, num in found.spans(bounds))
    low = 1 if run.num_stages > 1 else 3
    if run.settings.zero_optimization.stage == 3:  # units that are gathered ahead, or kept for their next use
        zero = run.settings.zero_optimization
        live = int(zero.stage3_max_live_parameters)
        numel = live if zero.stage3_prefetch_bucket_size else min(int(zero.stage3_max_reuse_distance), live)
        low += -(-numel // max(found.numel // run.degrees.get("tp", 1), 1))
    # Of blocks that do not do the same; an optimizer's call has as many units as come out even.
    is_part = run.settings.zero_optimization.offload_optimizer.ratio < 1
    has_pattern = run.settings.activation_checkpointing.offload_every > 0 or run.steps_in_calls or is_part
    blocks = (low, low + 1) if count > 2 * low + 1 and not has_pattern else (count, count)
    if blocks[0] == count and micro[0] == num_micro:
        return None

    def removal(num: int) -> Removal:
        return lambda model: found.remove(model, bounds, num)

    return RunGrid(blocks, micro, count, num_micro, fills), removal, bounds[-1]


def _bounds(run: _ModelRun, model: nn.Module, num_micro: int) -> list[int] | None:
    """The first block of each pipeline stage, and their number; None: blocks must not be removed."""
    section, zero = run.settings.pipeline, run.settings.zero_optimization
    try:
        blocks = find_blocks(model)
    except ModelError:
        return None
    names_a_block = re.search(rf"\b{re.escape(blocks.container)}\.\d", json.dumps(run.config))
    if names_a_block or isinstance(model, StageModule):
        return None
    if run.num_stages == 1:
        return [0, len(blocks.names)]
    if zero.stage == 3 or section.partition not in ("best", "parameters", "uniform"):
        return None
    partition: Any = section.partition
    schedule = build_schedule(section.schedule, run.num_stages, num_micro, virtual_stages=section.virtual_stages)
    outside = find_outside(model, blocks, section.first_stage, section.last_stage, section.every_stage)
    return list(cut_bounds(model, blocks, outside, schedule.num_stages, None, partition))

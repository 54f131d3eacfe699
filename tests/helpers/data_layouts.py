"""Runs over a token stream that change their layout, are killed and resume, and the same run on one process.

Each leg of a run has a layout of its own: ranks, degrees, schedule, ZeRO stage, micro-batches, workers. It resumes
from the checkpoint of the leg before, takes its steps, saves, and goes on for some micro-batches that are lost: so it
ends as a run that is killed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from shoal.comm.threads import run_ranks
from shoal.data import InMemorySource, TokenStream
from shoal.data.stream import PackedBatch
from shoal.engine.pipeline import PipelineEngine
from shoal.models.gpt import GPT, GPTConfig
from shoal.parallel.loss import count_tokens, linear_cross_entropy

LENGTH, ROWS, LAYERS = 16, 8, 4  # ROWS: of each step
PACKINGS = ("concatenate", "first_fit", "greedy", "none")

Rows = list[tuple[int, ...]]  # of the samples of a step, without regard to ranks
Step = tuple[float, Rows]  # the mean loss of its tokens


@dataclass(frozen=True)
class Layout:
    """How some steps are divided over ranks and in time."""

    ranks: int = 1
    degrees: dict[str, int] = field(default_factory=dict)
    micro_batch: int = ROWS
    accumulation: int = 1
    stage: int = 0
    schedule: str = "1f1b"
    recomputes: bool = False
    num_workers: int = 0

    def config(self) -> dict[str, Any]:
        virtual = 2 if self.schedule in ("interleaved_1f1b", "zbv") else 1
        return {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation,
            "loss_reduction": "token",
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": self.stage},
            "parallel": self.degrees,
            "pipeline": {"schedule": self.schedule, "virtual_stages": virtual} if "pp" in self.degrees else {},
            "activation_checkpointing": {"modules": ["Block"]} if self.recomputes else {},
            "data": {"num_workers": self.num_workers},
        }


@dataclass(frozen=True)
class Leg:
    layout: Layout
    num_steps: int
    num_lost: int = 0  # micro-batches that are read after the checkpoint


def random_layout(draw: random.Random, *, most_ranks: int, most_workers: int) -> Layout:
    """Any degrees that fit the ranks; ``ROWS`` rows a step."""
    degrees: dict[str, int] = {}
    for axis in draw.sample(["pp", "cp", "sp", "tp"], 4):
        spread = 2 * int(np.prod(list(degrees.values()), dtype=int))
        # The loss of a part without a target is 0 with the fused loss alone, which split logits do not have.
        is_possible = axis != "tp" or not {"cp", "sp"} & set(degrees)
        is_possible &= axis not in ("cp", "sp") or "tp" not in degrees
        if spread <= most_ranks and is_possible and draw.random() < 0.5:
            degrees[axis] = 2
    model = int(np.prod(list(degrees.values()), dtype=int))
    dp = draw.choice([size for size in (1, 2, 4) if model * size <= most_ranks])
    schedule = draw.choice(["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv"]) if "pp" in degrees else "1f1b"
    accumulation = draw.choice([each for each in (1, 2, 4) if dp * each <= ROWS])
    return Layout(
        ranks=model * dp,
        degrees=degrees,
        micro_batch=ROWS // dp // accumulation,
        accumulation=accumulation,
        stage=draw.choice([0, 1, 2, 3]),
        schedule=schedule,
        recomputes=draw.random() < 0.3,
        num_workers=draw.randint(0, most_workers),
    )


def random_legs(seed: int, num_legs: int, *, most_ranks: int = 4, most_workers: int = 0) -> list[Leg]:
    draw = random.Random(seed)
    return [
        Leg(
            random_layout(draw, most_ranks=most_ranks, most_workers=most_workers),
            draw.randint(1, 2),
            draw.choice([0, 0, 1, 3]),
        )
        for _ in range(num_legs)
    ]


def stream(packing: Any) -> TokenStream:
    sources = [
        InMemorySource(
            [np.random.default_rng(100 * each + n).integers(1, 64, 2 + 3 * n) for n in range(10)], f"s{each}"
        )
        for each in range(2)
    ]
    return TokenStream(sources, LENGTH, packing=packing, weights=[3, 1], epochs=None, seed=1)


def gpt(degrees: dict[str, int]) -> GPT:
    model = GPT(GPTConfig(64, LENGTH, LAYERS, 16, 2), loss=None if "tp" in degrees else linear_cross_entropy)
    generator = torch.Generator().manual_seed(0)  # ranks that are threads share torch's own
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2, generator=generator)
    model.attend_by(shoal.attention)
    return model


def _rows(batch: PackedBatch) -> Rows:
    begins = [[*row, *([-1] * (LENGTH + 1 - len(row)))] for row in batch.documents.begins]
    parts = (batch.tokens, batch.targets, batch.positions, torch.tensor(begins))
    return [] if batch.tokens.is_meta else list(map(tuple, torch.cat(parts, dim=1).tolist()))


def _train(layout: Layout, packing: Any, first: int, num_steps: int, num_lost: int, folder: Path) -> tuple[int, Any]:
    """Steps of one rank from a checkpoint of step ``first``, and a checkpoint after them."""
    engine, _, loader, _ = shoal.initialize(
        model=gpt(layout.degrees), config=layout.config(), training_data=stream(packing)
    )
    if first:
        engine.load_checkpoint(folder)
    assert engine.global_steps == first
    context = engine.sequence_context

    def batches() -> Any:
        while True:
            yield from loader

    source = batches()
    steps = []
    for _ in range(num_steps):
        total, count = 0.0, 0
        together = [next(source) for _ in range(layout.accumulation)]
        mine = [batch.shard(context) for batch in together]
        if isinstance(engine, PipelineEngine):
            total, count = float(engine.train_batch(iter(mine))), 1
        else:
            for batch in mine:
                num_tokens = int(count_tokens(batch.targets))
                loss = engine(*batch)
                engine.backward(loss, num_tokens=num_tokens)
                engine.step()
                total, count = total + float(loss.detach()) * num_tokens, count + num_tokens
            sums = engine.axes.world.gather_objects((total, count), label="losses")
            total, count = (sum(each) for each in zip(*sums, strict=True))
        steps.append((total / count, [row for batch in together for row in _rows(batch)]))
    engine.save_checkpoint(folder)
    for _ in range(num_lost):
        next(source)
    rank, reads = engine.axes.batch.rank, not isinstance(engine, PipelineEngine) or engine.reads(has_forms=True)
    engine.destroy()
    return rank if reads else -1, steps


def run(legs: list[Leg], packing: Any, folder: Path) -> list[Step]:
    first, result = 0, []
    for leg in legs:
        of_ranks = run_ranks(leg.layout.ranks, _train, leg.layout, packing, first, leg.num_steps, leg.num_lost, folder)
        by_part = {rank: steps for rank, steps in of_ranks if rank >= 0}
        # Ranks of one coordinate on the batch axis have read the same.
        assert all(steps == by_part[rank] for rank, steps in of_ranks if rank >= 0)
        for number in range(leg.num_steps):
            rows = sorted(row for steps in by_part.values() for row in steps[number][1])
            result.append((of_ranks[0][1][number][0], rows))
        first += leg.num_steps
    return result


def check(legs: list[Leg], packing: Any, folder: Path) -> None:
    """Assert that each step of a run has the rows and the loss of the same step on one process without a break."""
    total = sum(leg.num_steps for leg in legs)
    same = partial(run, packing=packing)
    alone, changed = same([Leg(Layout(), total)], folder=folder / "one"), same(legs, folder=folder / "many")
    for step, ((loss, rows), (expected, expected_rows)) in enumerate(zip(changed, alone, strict=True)):
        assert len(rows) == ROWS and rows == expected_rows, (legs, step)
        assert loss == pytest.approx(expected, rel=2e-5), (legs, step)
    assert len({loss for loss, _ in alone}) == total  # each step has trained

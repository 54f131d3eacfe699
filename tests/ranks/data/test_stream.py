"""Runs over a token stream that change their layout again and again: the tokens and the losses of one process."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from shoal.comm.threads import run_ranks
from shoal.data import InMemorySource, RepeatingLoader, TokenStream
from shoal.engine.pipeline import PipelineEngine
from shoal.models.gpt import GPT, GPTConfig
from shoal.parallel.loss import count_tokens, linear_cross_entropy

Step = tuple[float, list[tuple[int, ...]]]  # the mean loss of its tokens, and its rows
Layout = tuple[
    int, dict[str, int], int, int, int
]  # ranks, degrees, micro-batch, accumulation steps, ZeRO stage: 8 rows

LENGTH = 16
ONE: Layout = (1, {}, 8, 1, 0)
MASKED: list[Layout] = [
    (2, {}, 2, 2, 3),
    (4, {}, 1, 2, 1),
    (2, {"cp": 2}, 2, 4, 2),
    (4, {"cp": 2}, 4, 1, 3),
    (2, {"sp": 2}, 4, 2, 1),
    (2, {"tp": 2}, 2, 4, 0),
    (4, {"tp": 2}, 2, 2, 3),
]
UNMASKED: list[Layout] = [(2, {}, 4, 1, 2), (2, {"pp": 2}, 2, 4, 1), (4, {"pp": 2}, 2, 2, 0), (4, {"tp": 2}, 4, 1, 1)]


def stream(packing: Any, *, with_documents: bool) -> TokenStream:
    sources = [
        InMemorySource(
            [np.random.default_rng(100 * each + n).integers(1, 64, 2 + 3 * n) for n in range(10)], f"s{each}"
        )
        for each in range(2)
    ]
    options: dict[str, Any] = {"weights": [3, 1], "epochs": None, "seed": 1, "packing": packing}
    return TokenStream(sources, LENGTH, with_documents=with_documents, **options)


def gpt(documents: list[Any], degrees: dict[str, int]) -> GPT:
    loss = None if "tp" in degrees else linear_cross_entropy  # of a part without a target it is 0
    model = GPT(GPTConfig(64, LENGTH, 2, 16, 2), loss=loss)
    generator = torch.Generator().manual_seed(0)  # ranks that are threads share torch's own
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2, generator=generator)

    def attention(*given: Any, **options: Any) -> torch.Tensor:
        return shoal.attention(*given, documents=documents[0], **options)

    model.attend_by(attention)
    return model


def train(
    layout: Layout, packing: Any, with_documents: bool, first: int, num_steps: int, folder: Path
) -> tuple[int, list[Step]]:
    """Steps of one rank from a checkpoint of step ``first``, and a checkpoint after them."""
    _, degrees, micro_batch, num_micro, stage = layout
    documents: list[Any] = [None]
    config = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": num_micro,
        "loss_reduction": "token",
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "parallel": degrees,
    }
    data = stream(packing, with_documents=with_documents)
    engine, _, loader, _ = shoal.initialize(model=gpt(documents, degrees), config=config, training_data=data)
    if first:
        engine.load_checkpoint(folder)
    assert engine.global_steps == first
    batches, context = RepeatingLoader(loader), engine.sequence_context
    steps = []
    for _ in range(num_steps):
        rows: list[tuple[int, ...]] = []
        total, count = 0.0, 0
        together = [next(batches) for _ in range(num_micro)]
        for tokens, targets, *_ in together:
            rows += map(tuple, torch.cat([tokens, targets], dim=1).tolist())
        if isinstance(engine, PipelineEngine):
            total, count = float(engine.train_batch(iter(together))), 1
        else:
            for tokens, targets, *more in together:
                documents[0] = more[1] if more else None
                given = [tokens, targets]
                if context is not None:
                    given = [*(context.shard(part) for part in given), context.positions(LENGTH)]
                num_tokens = int(count_tokens(given[1]))
                with shoal.sequence_parallel(context):
                    loss = engine(*given)
                    engine.backward(loss, num_tokens=num_tokens)
                engine.step()
                total, count = total + float(loss.detach()) * num_tokens, count + num_tokens
            sums = engine.axes.world.gather_objects((total, count), label="losses")
            total, count = (sum(each) for each in zip(*sums, strict=True))
        steps.append((total / count, rows))
    engine.save_checkpoint(folder)
    rank = engine.axes.batch.rank
    engine.destroy()
    return rank, steps


def run(legs: list[tuple[Layout, int]], packing: Any, with_documents: bool, folder: Path) -> list[Step]:
    first, result = 0, []
    for layout, num_steps in legs:
        of_ranks = run_ranks(layout[0], train, layout, packing, with_documents, first, num_steps, folder)
        by_part = dict(of_ranks)
        assert all(steps == by_part[rank] for rank, steps in of_ranks) or "pp" in layout[1]
        for number in range(num_steps):
            rows = sorted(row for steps in by_part.values() for row in steps[number][1])
            result.append((of_ranks[0][1][number][0], rows))
        first += num_steps
    return result


@pytest.mark.parametrize(
    ("with_documents", "packing", "seed"),
    [(True, "first_fit", 0), (True, "concatenate", 1), (True, "none", 2), (False, "concatenate", 3)],
)
def test_changes_of_the_layout_change_no_token_and_no_loss(
    with_documents: bool, packing: str, seed: int, tmp_path: Path
) -> None:
    draw = random.Random(seed)
    layouts = draw.sample(MASKED if with_documents else UNMASKED, 3)
    legs = [(layout, draw.randint(1, 2)) for layout in layouts]
    total = sum(num_steps for _, num_steps in legs)
    same = partial(run, packing=packing, with_documents=with_documents)
    alone, changed = same([(ONE, total)], folder=tmp_path / "one"), same(legs, folder=tmp_path / "many")
    for step, ((loss, rows), (expected, expected_rows)) in enumerate(zip(changed, alone, strict=True)):
        assert len(rows) == 8 and rows == expected_rows, (legs, step)
        assert loss == pytest.approx(expected, rel=2e-5), (legs, step)
    assert len({loss for loss, _ in alone}) == total  # each step has trained

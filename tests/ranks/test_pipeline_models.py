"""Whole models, cut by the JSON file alone, in pipelines beside tensor, sequence and data parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shoal
from shoal.comm.threads import run_ranks
from shoal.errors import NotBuiltError
from tests.ranks.test_tensor_parallel_engine import ROWS, assert_equal, config, gpt, tokens
from tests.ranks.training import make, sgd

STEPS, MICRO = 3, 3


def alone(dp: int, *, tied: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    model = make(lambda: gpt(tied=tied))
    optimizer = sgd(model.parameters())
    losses = []
    for step in range(STEPS):
        total = 0.0
        for micro in range(MICRO):
            batch = tokens(10 * step + micro, dp)
            loss = model(batch[:, :-1], batch[:, 1:]) / MICRO
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, losses


@pytest.mark.parametrize(
    ("size", "stage", "tied", "parallel", "more"),
    [
        (2, 1, True, {"pp": 2}, {}),
        (2, 3, False, {"pp": 2}, {"pipeline": {"schedule": "zb_h1"}}),
        (4, 2, True, {"pp": 2, "tp": 2}, {}),
        (8, 1, True, {"pp": 2, "tp": 2}, {}),
        (8, 2, True, {"pp": 2, "tp": 2}, {}),
        (8, 3, True, {"pp": 2, "tp": 2}, {}),
        (4, 3, True, {"pp": 2, "tp": 2, "tp_sequence_parallel": True, "tp_loss_parallel": True}, {}),
        (4, 2, True, {"pp": 2, "sp": 2}, {}),
        (4, 3, True, {"pp": 2, "cp": 2}, {}),
        (4, 3, True, {"pp": 2}, {"activation_checkpointing": {"modules": ["blocks.*"]}}),
        (2, 2, True, {"pp": 2}, {"loss_reduction": "token"}),
    ],
)
def test_a_gpt_trains_as_in_one_process(
    size: int, stage: int, tied: bool, parallel: dict[str, Any], more: dict[str, Any]
) -> None:
    dp = size // parallel["pp"] // parallel.get("tp", 1) // parallel.get("sp", 1) // parallel.get("cp", 1)
    expected, losses = alone(dp, tied=tied)

    def job() -> Any:
        model = make(lambda: gpt(tied=tied))
        if {"sp", "cp"} & set(parallel):
            model.attend_by(shoal.attention)
        settings = config(stage, 1, MICRO, **more) | {"parallel": parallel}
        engine = shoal.initialize(model=model, optimizer=sgd(model.parameters()), config=settings)[0]
        found = []
        for step in range(STEPS):
            rank, micros = engine.axes.batch.rank, []
            for micro in range(MICRO):
                rows = tokens(10 * step + micro, dp)[ROWS * rank : ROWS * (rank + 1)]
                inputs, labels, context = rows[:, :-1], rows[:, 1:], engine.sequence_context
                if context is None:
                    micros.append((inputs, labels))
                else:
                    positions = context.positions(inputs.shape[1], inputs.device)
                    micros.append((context.shard(inputs), context.shard(labels), positions))
            found.append(float(engine.train_batch(iter(micros))))
        return found, engine.module_state_dict()

    for found, values in run_ranks(size, job):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-6, atol=1e-6)
        assert_equal(values, expected)


def test_an_interval_recomputes_each_block() -> None:
    expected, _ = alone(1, tied=True)

    def job() -> Any:
        model = make(gpt)
        settings = config(1, 1, MICRO) | {
            "parallel": {"pp": 2},
            "pipeline": {"schedule": "zb_h1", "activation_checkpoint_interval": 1},
        }
        engine = shoal.initialize(model=model, optimizer=sgd(model.parameters()), config=settings)[0]
        assert engine._activations.num_recomputed == 1
        for step in range(STEPS):
            batches = (tokens(10 * step + micro, 1) for micro in range(MICRO))
            engine.train_batch((batch[:, :-1], batch[:, 1:]) for batch in batches)
        return engine.module_state_dict()

    for values in run_ranks(2, job):
        assert_equal(values, expected)


def test_settings_that_the_model_cannot_follow_are_refused() -> None:
    def job() -> None:
        for key, value, match in (
            ("seed_layers", True, "pipeline-seeds"),
            ("activation_checkpoint_interval", 2, "recomp"),
        ):
            model, settings = make(gpt), config(1, 1, MICRO) | {"parallel": {"pp": 2}, "pipeline": {key: value}}
            with pytest.raises(NotBuiltError, match=match):
                shoal.initialize(model=model, optimizer=sgd(model.parameters()), config=settings)

    run_ranks(2, job)

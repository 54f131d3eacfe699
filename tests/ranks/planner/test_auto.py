"""``"auto"`` for the stage and the mesh: ranks take rank 0's plan, and train by it."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.config import load
from shoal.errors import ConfigError
from shoal.models import GPT, named_config
from shoal.planner import auto
from shoal.sharding.placement import Tier
from shoal.simulation.machines import machine_of

MODEL = GPT(named_config("nano"))


@pytest.fixture(autouse=True)
def _one_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "_NUM_TRIALS", 1)


def settings(**sections: Any) -> dict[str, Any]:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    return {"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, **sections}


def trained(config: dict[str, Any]) -> tuple[int, int, torch.Tensor]:
    """Stage, tensor-parallel ranks, and a weight after two steps."""
    engine = shoal.initialize(model=copy.deepcopy(MODEL), config=config)[0]
    tokens = torch.arange(128).reshape(2, 64)
    for _ in range(2):
        engine.backward(engine(tokens, tokens))
        engine.step()
    name = "blocks.0.feed_forward.up.weight"
    made = engine.zero_optimization_stage(), engine.properties.plan.mesh.tp, engine.module_state_dict()[name].clone()
    engine.destroy()
    return made


def test_ranks_train_by_the_plan_as_by_a_configuration_that_says_the_same(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="shoal"):
        planned = run_ranks(2, trained, settings(zero_optimization={"stage": "auto"}))
    assert "for 2 ranks (CPU ranks)" in caplog.text
    stages = {stage for stage, _, _ in planned}
    assert len(stages) == 1
    said = run_ranks(2, trained, settings(zero_optimization={"stage": stages.pop()}))
    torch.testing.assert_close(planned[1][2], said[1][2], rtol=0, atol=0)


def test_a_device_without_room_for_state_gets_stage_3_or_an_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of each parameter 4 bytes whole and 3 sharded do not fit, nor do 2 whole, 3.5 sharded and gradients in flight.
    shape = replace(named_config("nano"), hidden_size=512, num_heads=8, num_layers=6)
    capacity = int(GPT(shape).config.num_parameters() * 6.3)
    node = replace(machine_of("l40s"), gpu_nbytes=capacity, gpus_per_node=4)
    monkeypatch.setattr(auto, "_machine", lambda world: node)

    def placed() -> tuple[int, Tier]:
        config = settings(zero_optimization={"stage": "auto"}, bf16={"enabled": True})
        engine = shoal.initialize(model=GPT(shape), config=config)[0]
        engine.destroy()
        return engine.zero_optimization_stage(), engine.properties.plan.zero.state_tier

    (made,) = set(run_ranks(4, placed))
    assert made[0] == 3 or made[1] is Tier.HOST
    node = replace(node, gpu_nbytes=4 * capacity)
    ((_, tier),) = set(run_ranks(4, placed))  # which stage is the fastest is a matter of the machine
    assert tier is Tier.DEVICE


def test_the_mesh_may_be_planned_and_the_stage_said() -> None:
    made = run_ranks(2, trained, settings(zero_optimization={"stage": 1}, parallel="auto"))
    assert [stage for stage, _, _ in made] == [1, 1]
    assert made[0][1] == made[1][1]


def test_a_mesh_that_the_file_says_is_kept() -> None:
    config = settings(zero_optimization={"stage": "auto"}, parallel={"tp": 2}, train_batch_size=4)
    made = run_ranks(4, trained, config)
    assert [tp for _, tp, _ in made] == [2] * 4


def test_without_a_language_model_there_is_no_plan() -> None:
    def start() -> None:
        shoal.initialize(model=nn.Linear(4, 4), config=settings(zero_optimization={"stage": "auto"}))

    with pytest.raises(ConfigError, match=r"no plan can be made: .*config.vocab_size"):
        run_ranks(2, start)
    notes = load(settings(zero_optimization={"stage": "auto"}), world_size=2).notes()
    assert 'zero_optimization.stage = "auto": shoal.initialize plans it for its model and the machine.' in notes

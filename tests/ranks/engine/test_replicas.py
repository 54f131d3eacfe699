"""``debug.replica_check_steps``: a bit that flips on one of several ranks that hold the same is found and named."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import ModelError
from tests.helpers.models import SEQUENCE, VOCABULARY, Plain

EVERY_SHARD: dict[str, Any] = {"stage3_param_persistence_threshold": 0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "stage 0": {"zero_optimization": {"stage": 0}},
    "stage 0, bf16": {"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}},
    "stage 1": {"zero_optimization": {"stage": 1}},
    "stage 2, main parameters on the host": {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "bf16": {"enabled": True},
    },
    "hybrid": {"zero_optimization": {"stage": 3, "mics_shard_size": 2, **EVERY_SHARD}},
    "hybrid, int8 state": {
        "zero_optimization": {"stage": 3, "mics_shard_size": 2, **EVERY_SHARD},
        "precision": {"state_dtype": "int8"},
    },
    "stage 3": {"zero_optimization": {"stage": 3, **EVERY_SHARD}},
}


def flip(values: torch.Tensor) -> None:
    """Turn a bit of the first element, too high a one for the next update to round it away."""
    integers, bit = {2: (torch.int16, 5), 4: (torch.int32, 20)}[values.element_size()]
    values.view(-1)[:1].view(integers).bitwise_xor_(1 << bit)


def train(layout: dict[str, Any], victim: int | None, what: str) -> None:
    """Four steps with a comparison after each second one; a bit of the victim's turns after the third."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "debug": {"replica_check_steps": 2},
        **layout,
    }
    engine, *_ = shoal.initialize(model=Plain(), config=config)
    rank = current_world().rank
    tokens = torch.randint(VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(rank))
    for step in range(4):
        engine.backward(engine(tokens, tokens))
        engine.step()
        if step == 2 and rank == victim:
            engine.sharding.wait()
            (group,) = {
                g for g in engine.sharded.groups for p in g.buffer.layout.specs if p.name == "blocks.1.up.weight"
            }
            if what == "parameter":
                flip(group.buffer.stored_values if not group.has_own_main else group.main)
            else:
                flip(group.state_of(group.ranges[0])[what])
    engine.destroy()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_ranks_that_hold_the_same_agree(layout: dict[str, Any]) -> None:
    run_ranks(4, train, layout, None, "")


@pytest.mark.parametrize("what", ["parameter", "exp_avg"])
@pytest.mark.parametrize("name", ["stage 0", "stage 0, bf16", "hybrid"])
def test_a_flipped_bit_is_found_and_its_rank_is_named(name: str, what: str) -> None:
    with pytest.raises(ModelError, match="replicas-differ") as caught:
        run_ranks(4, train, LAYOUTS[name], 1, what)
    text = str(caught.value)
    # Of the flat buffer the first element was changed: of the first parameter of the group.
    named = re.compile(rf"in {'parameter' if what == 'parameter' else 'exp_avg of'} '[a-z0-9.]+'")
    assert "step 4; they were alike after step 2" in text and named.search(text), text
    if name == "hybrid":  # two ranks hold the range, so neither is the majority
        assert "along axis 'dp_replicate'" in text and "ranks 1, 3 do not agree" in text
    else:
        assert "along axis 'dp'" in text and "1 rank of 4 (1) has others than the rest" in text


def test_a_replica_of_a_parameter_that_its_owner_updates_is_compared_after_the_gather() -> None:
    def job() -> None:
        torch.manual_seed(0)
        config = {
            "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": 1}, "debug": {"replica_check_steps": 1},
        }  # fmt: skip
        engine, *_ = shoal.initialize(model=Plain(), config=config)
        tokens = torch.zeros(2, SEQUENCE, dtype=torch.long)
        if current_world().rank == 2:
            engine.on_step.append(lambda *_: flip(engine.module.norm.weight.data))
        engine.backward(engine(tokens, tokens))
        engine.step()

    with pytest.raises(ModelError, match=r"parameter 'norm.weight', 1 rank of 4 \(2\) has others"):
        run_ranks(4, job)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_replica_that_the_gather_would_set_right_again_is_found_before_the_step(stage: int) -> None:
    def job() -> list[float]:
        torch.manual_seed(0)
        config = {
            "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": stage}, "debug": {"replica_check_steps": 2},
        }  # fmt: skip
        engine, *_ = shoal.initialize(model=Plain(), config=config)
        tokens = torch.zeros(2, SEQUENCE, dtype=torch.long)
        for step in range(2):
            if step and current_world().rank == 1:
                flip(engine.module.embedding.weight.data)  # which rank 0 owns
            engine.backward(engine(tokens, tokens))
            if not step:
                engine.step()
        before = engine.module.norm.weight.tolist()
        with pytest.raises(ModelError, match=r"parameter 'embedding.weight'.*\n.* step 2; .* alike after step 0"):
            engine.step()
        assert engine.module.norm.weight.tolist() == before
        return before

    run_ranks(2, job)

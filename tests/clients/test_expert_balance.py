"""Balance of Transformers' mixture-of-experts models: the router's own bias, loads, experts that change ranks."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.parallel.expert.bias import BIAS_NAMES
from tests.clients.test_expert_models import TOKENS, build
from tests.clients.test_expert_training import settings, train

pytestmark = pytest.mark.filterwarnings("default")

COEFF = 0.02


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral"])
def test_the_bias_of_the_router_is_updated_and_moved_or_copied_experts_change_nothing(family: str) -> None:
    model = build(family)
    for name, buffer in model.named_buffers():
        if name.endswith(BIAS_NAMES):
            buffer[:2] += 1  # experts that one rank has
    copies = [copy.deepcopy(model) for _ in range(2 * len(TOKENS))]

    def job(every: int) -> tuple[dict[str, torch.Tensor], dict[str, list[int]], bool]:
        section = {"enabled": True, "autoep_size": 2, "load_balance_coeff": COEFF}
        section |= {"rebalance_every": every, "hot_experts": every}
        own = copies[current_world().rank + 2 * every]
        engine, *_ = shoal.initialize(model=own, config=settings(2, expert_parallel=section))
        with engine.world.recorder.recording() as entries:
            values = train(engine)
        return values, engine.expert_load(), any(entry.label.endswith((": experts", "copies")) for entry in entries)

    still, moving = run_ranks(2, partial(job, 0)), run_ranks(2, partial(job, 1))
    biases = {name: value for name, value in still[0][0].items() if name.endswith(BIAS_NAMES)}
    assert len(biases) == len(still[0][1]) > 0
    for (values, load, has_moved), (expected, fixed, _) in zip(moving, still, strict=True):
        assert has_moved
        assert load == fixed
        for name, value in expected.items():
            torch.testing.assert_close(values[name], value, rtol=1e-5, atol=2e-6, msg=name)
    for name, bias in biases.items():
        steps = (bias - model.state_dict().get(name, torch.zeros_like(bias))) / COEFF
        assert steps.abs().max() > 0
        torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-3)
    chosen: Any = model.config.num_experts_per_tok
    assert {sum(counts) for counts in still[0][1].values()} == {TOKENS.numel() * chosen}

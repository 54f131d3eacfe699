"""Runs of models with experts that DeepSpeed began go on with Shoal's MoE layer, whatever ``ep_size`` is."""

from __future__ import annotations

import json

import pytest
import torch

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.compat.experts import split_params_into_different_moe_groups_for_optimizer
from shoal.parallel.expert.layer import MoE
from tests.fixtures.deepspeed.make_experts import WithExperts
from tests.fixtures.deepspeed.model import groups_of, tokens_of
from tests.helpers.places import FIXTURES
from tests.helpers.training import make

MADE = FIXTURES / "deepspeed"


def go_on(case: str, ep: int, stage: int, *, has_own_groups: bool) -> list[float]:
    model = make(lambda: WithExperts(MoE, ep))
    groups = [{"name": f"group {index}", **group} for index, group in enumerate(groups_of(model))]
    if has_own_groups:
        groups = split_params_into_different_moe_groups_for_optimizer(groups)
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    # Rates and decay come from the checkpoint.
    optimizer = torch.optim.AdamW(groups, lr=1.0, weight_decay=1.0)
    engine = shoal.initialize(model=model, optimizer=optimizer, config=config)[0]
    engine.load_checkpoint(MADE / case / "checkpoint")
    losses = []
    for step in range(3, 6):
        loss = engine(tokens_of(step, current_world().rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


@pytest.mark.parametrize(
    ("case", "ep", "stage", "has_own_groups"),
    [
        ("ep1-stage1-fp32", 2, 3, False),
        ("ep2-stage0-fp32", 2, 2, True),
        ("ep2-stage2-fp32", 1, 0, False),
        ("ep2-stage2-fp32", 2, 1, True),
    ],
)
def test_losses_are_deepspeeds(case: str, ep: int, stage: int, has_own_groups: bool) -> None:
    recorded = json.loads((MADE / case / "run.json").read_text())["losses"][3:]
    found = run_ranks(2, lambda: go_on(case, ep, stage, has_own_groups=has_own_groups))
    for step, expected in enumerate(recorded):
        assert [losses[step] for losses in found] == pytest.approx(expected, abs=1e-5)

"""``load_checkpoint`` of what DeepSpeed saved of a model with experts, into any layout: its own losses go on."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.parallel.expert.layer import MoE
from tests.fixtures.deepspeed.make_experts import EXPERT_CASES, WithExperts
from tests.fixtures.deepspeed.model import groups_of, tokens_of
from tests.ranks.training import make
from tests.unit.deepspeed_made import MADE


def go_on(case: str, ep_size: int, stage: int, saved_by: int, has_own_groups: bool) -> dict[str, Any]:
    """Load on this rank, and train three steps. Of ``saved_by`` ranks' batches, fewer ranks take several each."""
    rank, size = current_world().rank, current_world().size
    model = make(lambda: WithExperts(MoE, ep_size))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": saved_by // size,
        "gradient_clipping": 0.0,
        "units": {"classes": ["ExpertBlock"]},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **({"bf16": {"enabled": True}} if "bf16" in case else {}),
    }
    groups = groups_of(model)
    if has_own_groups:
        split = split_groups([{"name": f"group {index}", **group} for index, group in enumerate(groups)])
        groups = split if isinstance(split, list) else [split]
    engine = shoal.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1.0), config=config)[0]
    _, client_state = engine.load_checkpoint(MADE / case / "checkpoint")
    assert client_state == {"epoch": 2}
    assert [group["lr"] for group in engine.optimizer.param_groups] == [0.01, 0.02] * (2 if has_own_groups else 1)
    full = engine.module_state_dict()
    losses = []
    for step in range(3, 6):
        own = []
        for each in range(rank, saved_by, size):
            loss = engine(tokens_of(step, each))
            engine.backward(loss)
            engine.step()
            own.append(loss.item())
        losses.append(own)
    engine.destroy()
    return {"full": full, "losses": losses}


def split_groups(groups: list[dict[str, Any]]) -> Any:
    from shoal.compat.deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    return split_params_into_different_moe_groups_for_optimizer(groups)


@pytest.mark.parametrize(
    ("case", "size", "ep_size", "stage", "has_own_groups"),
    [
        ("ep2-stage0-fp32", 2, 2, 1, False),
        ("ep1-stage0-fp32", 2, 2, 3, False),
        ("ep1-stage0-fp32", 2, 2, 1, True),
        ("ep2-stage0-fp32", 1, 1, 3, True),
        ("ep2-stage0-bf16", 2, 1, 2, True),
        ("ep1-stage2-fp32", 2, 1, 3, False),
        ("ep1-stage1-fp32", 2, 2, 2, True),
        ("ep2-stage2-fp32", 1, 1, 0, False),
        ("ep2-stage1-fp32", 2, 2, 3, True),
        ("ep2-stage2-fp32-4-ranks", 4, 2, 2, False),
        ("ep2-stage2-fp32-4-ranks", 2, 2, 3, True),
        ("ep2-stage1-fp32-data-first", 4, 2, 1, False),
        ("ep2-stage2-bf16", 2, 2, 2, True),
    ],
)
def test_a_run_goes_on_in_any_layout_with_deepspeeds_losses(
    case: str, size: int, ep_size: int, stage: int, has_own_groups: bool
) -> None:
    run = json.loads((MADE / case / "run.json").read_text())["losses"][3:]
    saved_by = len(run[0])
    held = load_file(MADE / case / "held.safetensors")
    found = run_ranks(size, go_on, case, ep_size, stage, saved_by, has_own_groups)
    for name, value in held.items():
        if name.startswith("model/") and not re.search("seen|gain", name):
            of_rank = found[0]["full"][name.removeprefix("model/")]
            assert torch.equal(value.to(of_rank.dtype).view(-1), of_rank.view(-1)), name
    for step in range(3):
        for rank in range(size):
            expected = [run[step][each] for each in range(rank, saved_by, size)]
            assert found[rank]["losses"][step] == pytest.approx(expected, abs=4e-3 if "bf16" in case else 1e-5)
    assert case in EXPERT_CASES

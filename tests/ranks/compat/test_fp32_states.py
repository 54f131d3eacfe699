"""``DeepSpeedCPUAdam`` on bf16 weights without main parameters: fp32 state, at every stage, through a checkpoint."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.compat.deepspeed.ops.adam import DeepSpeedCPUAdam
from tests.helpers.models import Plain
from tests.helpers.training import STAGES, config, make, micro_step, start_with

NARROW: dict[str, Any] = {"enabled": True, "bf16_master_weights_and_grads": True}


@pytest.mark.parametrize(
    ("stage", "is_offloaded"), [*((stage, False) for stage in STAGES), *((stage, True) for stage in STAGES if stage)]
)
def test_state_stays_in_fp32_through_steps_and_a_checkpoint(stage: int, is_offloaded: bool, tmp_path: Path) -> None:
    zero = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}} if is_offloaded else {}
    models = [make(Plain) for _ in range(3)]

    def job(rank_models: list[Any]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        def begin(model: Any) -> Any:
            return start_with(model, config(stage, bf16=NARROW, **zero), DeepSpeedCPUAdam)

        def end(engine: Any) -> dict[str, torch.Tensor]:
            kept = [state for state in engine.optimizer.state.values() if state]
            assert kept
            assert {state[key].dtype for state in kept for key in ("exp_avg", "exp_avg_sq")} == {torch.float32}
            engine.destroy()
            return {name: p.detach().clone() for name, p in engine.module.named_parameters()}

        whole, part = begin(rank_models[0]), begin(rank_models[1])
        for step in range(3):
            micro_step(whole, step)
        for step in range(2):
            micro_step(part, step)
        part.save_checkpoint(str(tmp_path))
        part.destroy()
        later = begin(rank_models[2])
        later.load_checkpoint(str(tmp_path))
        micro_step(later, 2)
        return end(whole), end(later)

    per_rank = [copy.deepcopy(models) for _ in range(2)]
    for whole, later in run_ranks(2, lambda: job(per_rank[current_world().rank])):
        for name, value in whole.items():
            assert value.dtype == torch.bfloat16
            assert torch.equal(value, later[name]), name

"""After a checkpoint is loaded the learning rate stays in the hand of the client's own schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.compat.deepspeed import initialize
from shoal.compat.deepspeed.ops.adam import DeepSpeedCPUAdam
from tests.helpers.models import Plain
from tests.helpers.training import batch, config, make

STEPS = 4


def rate(step: int) -> float:
    return 1.0 / (1 + step)


# Torch says so of a schedule whose optimizer is not the one that steps; with DeepSpeed it does too.
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("device", ["none", "cpu"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_clients_schedule_sets_the_rate_after_a_resume(tmp_path: Path, stage: int, device: str) -> None:
    """As Accelerate does it: the schedule has the client's optimizer, the engine an optimizer of the same groups."""

    def run(*, loads: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        rank = current_world().rank
        model = make(Plain)
        clients = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(clients, rate)
        made: Any = DeepSpeedCPUAdam(clients.param_groups, lr=0.01, adamw_mode=True) if device == "cpu" else clients
        offload = {"offload_optimizer": {"device": device}} if device == "cpu" else {}
        engine, optimizer, *_ = initialize(
            model=model, optimizer=made, config=config(stage, zero_optimization=offload), dist_init_required=False
        )
        first = 0
        if loads:
            _, client = engine.load_checkpoint(tmp_path)
            schedule.load_state_dict(client["schedule"])
            first = engine.global_steps
        rates = []
        for step in range(first, STEPS):
            rates.append(engine.get_lr()[0])
            engine.backward(engine(*batch(step, rank, 2)))
            engine.step()
            schedule.step()
            assert (
                optimizer.param_groups[0]["lr"] == clients.param_groups[0]["lr"] == pytest.approx(0.01 * rate(step + 1))
            )
            if step == 1 and not loads:
                engine.save_checkpoint(tmp_path, client_state={"schedule": schedule.state_dict()})
        values = engine.module_state_dict()
        engine.destroy()
        return rates, values

    whole = run_ranks(2, lambda: run(loads=False))[0]
    resumed = run_ranks(2, lambda: run(loads=True))[0]
    assert whole[0] == pytest.approx([0.01 * rate(step) for step in range(STEPS)])
    assert resumed[0] == pytest.approx(whole[0][2:])
    assert all(torch.equal(value, whole[1][name]) for name, value in resumed[1].items())

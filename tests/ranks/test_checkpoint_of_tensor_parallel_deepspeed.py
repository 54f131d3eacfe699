"""A tensor-parallel run that DeepSpeed began goes on in Shoal, in any layout: step 3 to step 6, against DeepSpeed's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from tests.fixtures.deepspeed.make_tensor_parallel import LAYERS
from tests.fixtures.deepspeed.model import WithFused, fill, groups_of, tokens_of

MADE = Path(__file__).resolve().parent.parent / "fixtures" / "deepspeed"


def go_on(saved: int, stage: int, tp: int) -> dict[str, Any]:
    """Load what DeepSpeed saved at stage ``saved`` on this rank, and train on the batches of all its ranks."""
    world = current_world()
    num_batches = 2 if saved > 1 else 1
    size = world.size // tp
    model = fill(WithFused())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)  # all of it has to come from the checkpoint
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 3 * num_batches // size,
        "gradient_clipping": 0.0,
        "units": {"classes": ["FusedBlock"]},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    if tp > 1:
        partition = {"use_default_specs": False, "layer_specs": LAYERS}
        config["tensor_parallel"] = {"autotp_size": tp, "partition_config": partition}
    optimizer = torch.optim.AdamW(groups_of(model), lr=1.0, weight_decay=1.0)
    engine, *_ = shoal.initialize(model=model, optimizer=optimizer, config=config)
    _, client_state = engine.load_checkpoint(MADE / f"tp2-stage{saved}" / "checkpoint")
    full = {n: engine.access.full_parameter(p).clone() for n, p in model.named_parameters() if p.requires_grad}
    losses = []
    for step in range(3, 6):
        batch = torch.cat([tokens_of(step, each) for each in range(world.rank // tp, num_batches, size)])
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    found = {"losses": losses, "full": full, "client": client_state, "steps": engine.global_steps}
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("saved", "stage", "tp", "ranks"),
    [
        (0, 1, 1, 1), (1, 0, 1, 1), (1, 3, 2, 2), (2, 3, 1, 2), (2, 1, 2, 2), (3, 0, 1, 2), (3, 2, 2, 4), (3, 3, 2, 2),
    ],
)  # fmt: skip
def test_losses_and_weights_are_those_of_deepspeed_going_on(saved: int, stage: int, tp: int, ranks: int) -> None:
    run = json.loads((MADE / f"tp2-stage{saved}" / "run.json").read_text())
    found: list[dict[str, Any]] = run_ranks(ranks, go_on, saved, stage, tp)
    for step, expected in enumerate(run["losses"][3:]):
        for rank, of_rank in enumerate(found):
            mine = expected[rank // tp :: ranks // tp]
            assert of_rank["losses"][step] == pytest.approx(sum(mine) / len(mine), abs=1e-5), (step, rank)
    held = load_file(MADE / f"tp2-stage{max(1, saved)}" / "held.safetensors")
    for name, value in found[0]["full"].items():
        # DeepSpeed's converter takes no checkpoint of stage 0, whose weights are those of stage 1 but for rounding.
        torch.testing.assert_close(value, held[f"model/{name}"].view(value.shape), rtol=0 if saved else 1e-5, atol=0)
    assert found[0]["client"]["epoch"] == 2
    assert found[0]["steps"] == 6

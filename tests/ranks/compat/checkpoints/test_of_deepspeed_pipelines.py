"""A pipeline that DeepSpeed began goes on in Shoal, in any number of stages: step 3 to step 6, against DeepSpeed's."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.pipeline.layers import LayerSpec, TiedLayerSpec
from shoal.pipeline.module import PipelineModule
from tests.fixtures.deepspeed.pipeline_model import (
    NUM_MICRO,
    ROWS,
    fill_pipeline,
    loss_fn,
    pipeline_batch,
    pipeline_groups,
    pipeline_layers,
)
from tests.helpers.places import FIXTURES

MADE = FIXTURES / "deepspeed"


class WithLoss(nn.Sequential):
    def forward(self, batch: Any) -> Any:
        return loss_fn(super().forward(batch[0]), batch[1])


def go_on(case: str, stage: int, pp: int, is_sequential: bool) -> dict[str, Any]:
    """Load what DeepSpeed saved, and train on the batches of its data-parallel ranks."""
    world, saved_dp = current_world(), 1 if "stage0" in case or "tp2" in case else 2
    size = world.size // max(pp, 1)
    layers = pipeline_layers(LayerSpec, TiedLayerSpec, tied="tied" in case)
    model: Any = PipelineModule(layers, num_stages=pp or None, loss_fn=loss_fn, partition_method="uniform")
    if is_sequential:
        made = [layer.build() if isinstance(layer, LayerSpec) else layer for layer in layers]
        model = WithLoss(*(layer if isinstance(layer, nn.Module) else _Function(layer) for layer in made))
    fill_pipeline(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)  # all of it has to come from the checkpoint
    num_micro = NUM_MICRO * saved_dp // size
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": num_micro,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **({"bf16": {"enabled": True}} if "bf16" in case else {}),
        **({"pipeline": {"stages": pp}} if pp else {}),
    }
    optimizer = torch.optim.AdamW(pipeline_groups(model), lr=1.0, weight_decay=1.0)
    engine = shoal.initialize(model=model, optimizer=optimizer, config=config)[0]
    _, client_state = engine.load_checkpoint(MADE / case / "checkpoint")
    access, own = engine.access, [(n, p) for n, p in engine.module.named_parameters() if engine.access.knows(p)]
    full = {f"model/{n}": access.full_parameter(p).clone() for n, p in own}
    for kind in ("exp_avg", "exp_avg_sq"):
        full |= {f"optimizer/{kind}/{n}": access.full_optimizer_state(p, kind).clone() for n, p in own}
    losses = []
    rank = engine.axes.batch.rank if pp else world.rank
    for step in range(3, 6):
        todo = [(data, micro) for data in range(saved_dp) for micro in range(NUM_MICRO)]
        batches = [pipeline_batch(step, data, micro) for data, micro in todo[rank * num_micro : (rank + 1) * num_micro]]
        if not is_sequential:
            losses.append(float(engine.train_batch(iter(batches))))
            continue
        total = torch.zeros(())
        for batch in batches:
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / num_micro
        losses.append(float(total))
    return {"losses": losses, "full": full, "client": client_state, "steps": engine.global_steps}


class _Function(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.forward = function


@pytest.mark.parametrize(
    ("case", "stage", "pp", "ranks"),
    [
        ("pp2-stage0", 1, 2, 2), ("pp2-stage0", 0, 3, 3), ("pp2-stage1", 1, 2, 4), ("pp2-stage1", 3, 1, 2),
        ("pp2-tied-stage0", 1, 2, 2), ("pp2-tied-stage0", 0, 1, 1), ("pp2-tied-stage1", 2, 2, 2),
        ("pp2-tied-stage1", 1, 4, 4), ("pp2-tied-stage0-bf16", 1, 2, 2), ("pp2-tied-stage1-bf16", 1, 2, 4),
        ("pp2-tp2-stage1", 3, 2, 2), ("pp2-tp2-stage1", 0, 1, 1),
    ],
)  # fmt: skip
def test_losses_and_states_are_those_of_deepspeed_going_on(case: str, stage: int, pp: int, ranks: int) -> None:
    _compare(case, run_ranks(ranks, go_on, case, stage, pp, False))


@pytest.mark.parametrize("case", ["pp2-stage0", "pp2-tp2-stage1"])
def test_a_model_that_is_no_pipeline_goes_on_too(case: str) -> None:
    _compare(case, run_ranks(1, go_on, case, 0, 0, True))


def _compare(case: str, found: list[dict[str, Any]]) -> None:
    run = json.loads((MADE / case / "run.json").read_text())
    held, seen = load_file(MADE / case / "held.safetensors"), set()
    tolerance = 3e-3 if "bf16" in case else 1e-5
    for of_rank in found:
        assert of_rank["losses"] == pytest.approx(run["losses"][3:], abs=tolerance)
        for name, value in of_rank["full"].items():
            torch.testing.assert_close(value, held[name], rtol=0, atol=0, msg=name)
        seen |= set(of_rank["full"])
        assert (of_rank["client"]["epoch"], of_rank["steps"]) == (2, 6)
    assert seen == {name for name in held if not name.endswith("seen")}

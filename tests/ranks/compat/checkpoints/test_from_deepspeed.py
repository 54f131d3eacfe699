"""A run that DeepSpeed began goes on in Shoal: from its checkpoint after 3 steps to step 6, against DeepSpeed's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import shoal
from shoal.checkpoint.native import ShoalSource, write_shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.compat.checkpoints.deepspeed import DeepSpeedSource
from shoal.compat.checkpoints.writing import write_deepspeed
from tests.fixtures.deepspeed.make import CASES
from tests.fixtures.deepspeed.model import build_model, groups_of, tokens_of
from tests.helpers.places import FIXTURES

MADE = FIXTURES / "deepspeed"
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": CASES["stage1-fp16"]["fp16"]},
}


def go_on(
    folder: Path, precision: str, stage: int, steps: int, more: dict[str, Any], saved_by: int = 2
) -> dict[str, Any]:
    """Load on this rank, and train. Of ``saved_by`` ranks' batches, fewer ranks take several."""
    rank, size = current_world().rank, current_world().size
    model = build_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)  # all of it has to come from the checkpoint
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 3 * saved_by // size,
        "gradient_clipping": 0.0,
        "units": {"classes": ["Block"]},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **PRECISIONS[precision],
        **more,
    }
    given: dict[str, Any] = {"model_parameters": groups_of(model)}
    if "optimizer" not in config:
        given = {"optimizer": torch.optim.AdamW(groups_of(model), lr=1.0, weight_decay=1.0)}
    engine, *_ = shoal.initialize(model=model, config=config, **given)
    _, client_state = engine.load_checkpoint(folder)
    losses = []
    loaded = engine.global_steps, engine.global_samples, engine.skipped_steps, engine.loss_scale
    full = {n: engine.access.full_parameter(p).clone() for n, p in model.named_parameters() if p.requires_grad}
    for step in range(3, 3 + steps):
        batch = torch.cat([tokens_of(step, each) for each in range(rank, saved_by, size)])
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    found = {"losses": losses, "loaded": loaded, "full": full, "client": client_state, "seen": int(model.seen)}
    engine.destroy()
    return found


def convert(case: str, folder: Path) -> dict[str, Any]:
    assert write_shoal(DeepSpeedSource(MADE / case / "checkpoint"), folder) == "global_step3"
    run: dict[str, Any] = json.loads((MADE / case / "run.json").read_text())
    return run


def goes_on(case: str, stage: int, bound: float, tmp_path: Path, **more: Any) -> list[dict[str, Any]]:
    run = convert(case, tmp_path)
    found: list[dict[str, Any]] = run_ranks(2, go_on, tmp_path, case.split("-")[1], stage, 3, more)
    for step, expected in enumerate(run["losses"][3:]):
        for rank in range(2):
            assert found[rank]["losses"][step] == pytest.approx(expected[rank], abs=bound), (step, rank)
    held = load_file(MADE / case / "held.safetensors")
    for name, value in found[0]["full"].items():
        assert torch.equal(value.float().view(-1), held[f"model/{name}"]), name
    assert found[0]["seen"] == 6
    assert found[0]["client"]["epoch"] == 2
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("saved", [0, 1, 2, 3])
def test_losses_in_fp32_are_those_of_deepspeed_going_on(saved: int, stage: int, tmp_path: Path) -> None:
    found = goes_on(f"stage{saved}-fp32", stage, 1e-5, tmp_path)
    assert found[0]["loaded"] == (3, 18, 0, 1.0)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_state_that_deepspeeds_own_optimizer_counted_goes_on_in_torchs(stage: int, tmp_path: Path) -> None:
    goes_on("stage2-fp32-offload", stage, 1e-5, tmp_path)


@pytest.mark.parametrize(("case", "stage"), [("stage1-bf16", 3), ("stage3-bf16", 2), ("stage2-bf16-round-robin", 1)])
def test_losses_in_bf16_are_those_of_deepspeed_but_for_rounding(case: str, stage: int, tmp_path: Path) -> None:
    goes_on(case, stage, 4e-3, tmp_path)


@pytest.mark.parametrize(("case", "stage"), [("stage2-fp16", 3), ("stage3-fp16", 1)])
def test_the_loss_scale_goes_on_in_fp16(case: str, stage: int, tmp_path: Path) -> None:
    found = goes_on(case, stage, 4e-3, tmp_path)
    assert found[0]["loaded"] == (3, 18, 0, 128.0)


def test_a_schedule_and_an_optimizer_from_the_config_go_on(tmp_path: Path) -> None:
    sections = {name: CASES["stage2-bf16-schedule"][name] for name in ("optimizer", "scheduler")}
    goes_on("stage2-bf16-schedule", 2, 4e-3, tmp_path, **sections)


@pytest.mark.parametrize("saved", [2, 3])
def test_one_rank_goes_on_with_what_two_saved(saved: int, tmp_path: Path) -> None:
    run = convert(f"stage{saved}-fp32", tmp_path)
    (found,) = run_ranks(1, go_on, tmp_path, "fp32", 3, 3, {})
    for loss, expected in zip(found["losses"], run["losses"][3:], strict=True):
        assert loss == pytest.approx(sum(expected) / 2, abs=1e-5)


def test_without_the_optimizers_state_the_losses_are_others(tmp_path: Path) -> None:
    """What the bounds above are worth."""
    run = convert("stage2-fp32", tmp_path)

    def forget() -> list[float]:
        model = build_model()
        config = {"train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0.0}
        engine, *_ = shoal.initialize(
            model=model, config=config, optimizer=torch.optim.AdamW(groups_of(model), betas=(0.9, 0.95))
        )
        engine.load_checkpoint(tmp_path, load_module_only=True)
        losses = []
        for step in range(3, 6):
            loss = engine(tokens_of(step, current_world().rank))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.destroy()
        return losses

    losses = run_ranks(2, forget)[0]
    assert losses[0] == pytest.approx(run["losses"][3][0], abs=1e-5)  # the same weights
    assert abs(losses[2] - run["losses"][5][0]) > 1e-3


def test_the_way_back_keeps_the_order_that_parameters_have_in_the_optimizer(tmp_path: Path) -> None:
    """DeepSpeed's flat tensors name no parameters: their order is that of the optimizer's groups."""
    model = build_model()
    groups = [{**group, "params": group["params"][::-1]} for group in reversed(groups_of(model))]
    config = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 2}}
    engine, *_ = shoal.initialize(model=model, optimizer=torch.optim.AdamW(groups), config=config)
    engine.backward(engine(tokens_of(0, 0)))
    engine.step()
    engine.save_checkpoint(tmp_path / "shoal")
    engine.destroy()
    write_deepspeed(ShoalSource(tmp_path / "shoal"), tmp_path / "out")
    shapes = DeepSpeedSource(tmp_path / "out").about.group_of
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert list(shapes.items()) == [(names[id(p)], at) for at, group in enumerate(groups) for p in group["params"]]

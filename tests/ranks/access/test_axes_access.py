"""What scripts read and write beside the model's axes: gathered parameters, full values, exports, zero.Init."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.access.engine_parameters import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
)
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.compat.deepspeed.utils import groups
from shoal.models.gpt import GPT, GPTConfig
from tests.helpers.training import make

VOCABULARY, LENGTH, ROWS, HIDDEN = 50, 8, 2, 56
SPLIT, WHOLE = "blocks.1.attention.qkv.weight", "blocks.0.attention_norm.weight"
TP: dict[str, Any] = {"tp": 2, "tp_sequence_parallel": True}
LAYOUTS: list[dict[str, Any]] = [TP, {"sp": 2}, {"cp": 2}, {"tp": 2, "sp": 2}]
STAGES = (1, 3)


def gpt() -> GPT:
    """Seven heads: tensor-parallel ranks have parts of other sizes."""
    model = GPT(GPTConfig(VOCABULARY, LENGTH, 2, HIDDEN, 7, True))
    model.attend_by(shoal.attention)
    return model


def batch(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(rank))
    return rows[:, :-1], rows[:, 1:], torch.arange(LENGTH)


def engine_on(parallel: dict[str, Any], stage: int, model: GPT) -> Any:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    optimizer = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-3}}
    settings = {"train_micro_batch_size_per_gpu": ROWS, "zero_optimization": zero, "optimizer": optimizer}
    settings |= {"gradient_clipping": 0.0, "parallel": parallel}
    return shoal.initialize(model=model, config=settings)[0]


def backward(engine: Any) -> None:
    context = engine.sequence_context or shoal.SequenceContext()
    tokens, targets, positions = batch(engine.axes.batch.rank)
    engine.backward(engine(context.shard(tokens), context.shard(targets), context.shard(positions, 0)))


def alone(num_rows: int) -> tuple[GPT, torch.optim.Optimizer]:
    """The model with the gradients of one process that sees all samples, and its optimizer."""
    model = make(gpt)
    for rank in range(num_rows):
        tokens, targets, positions = batch(rank)
        (model(tokens, targets, positions) / num_rows).backward()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-3)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_full_values_gradients_and_states_are_those_of_one_process(
    parallel: dict[str, Any], stage: int, tmp_path: Path
) -> None:
    whole, optimizer = alone(4 // (parallel.get("tp", 1) * parallel.get("sp", 1) * parallel.get("cp", 1)))
    gradients = {name: p.grad.clone() for name, p in whole.named_parameters() if p.grad is not None}
    optimizer.step()
    expected = dict(whole.named_parameters())

    def job() -> None:
        engine = engine_on(parallel, stage, make(gpt))
        backward(engine)
        named = dict(engine.module.named_parameters())
        for name, gradient in gradients.items():
            torch.testing.assert_close(safe_get_full_grad(named[name]), gradient, rtol=1e-5, atol=1e-7, msg=name)
        engine.step()
        for name, value in expected.items():
            torch.testing.assert_close(safe_get_full_fp32_param(named[name]), value.detach(), rtol=1e-5, atol=1e-6)
            state = safe_get_full_optimizer_state(named[name], "exp_avg")
            torch.testing.assert_close(state, optimizer.state[value]["exp_avg"], rtol=1e-5, atol=1e-7)
        new = torch.randn(expected[SPLIT].shape, generator=torch.Generator().manual_seed(3))
        safe_set_full_fp32_param(named[SPLIT], new)
        assert torch.equal(engine.module_state_dict()[SPLIT], new)
        engine.save_16bit_model(tmp_path, "model.bin")
        engine.destroy()

    run_ranks(4, job)
    saved = torch.load(tmp_path / "model.bin", weights_only=True)
    assert {name: value.shape for name, value in saved.items()} == {k: v.shape for k, v in whole.state_dict().items()}
    torch.testing.assert_close(saved[WHOLE], expected[WHOLE].detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_changes_of_gathered_parameters_reach_all_ranks(parallel: dict[str, Any], stage: int) -> None:
    """A split parameter is this rank's part: the modifier's neighbours along tp change theirs."""

    def job() -> dict[str, Any]:
        engine, world = engine_on(parallel, stage, make(gpt)), current_world()
        named = dict(engine.module.named_parameters())
        with shoal.zero.GatheredParameters([named[SPLIT], named[WHOLE]], modifier_rank=0):
            if world.rank == 0:
                named[WHOLE].data.fill_(7.0)
            else:
                named[WHOLE].data.fill_(8.0)  # lost
            if engine.axes.data.rank == 0:
                named[SPLIT].data.mul_(2.0)
            else:
                named[SPLIT].data.fill_(8.0)
        found = {name: safe_get_full_fp32_param(named[name]).clone() for name in (SPLIT, WHOLE)}
        assert torch.equal(engine.module_state_dict()[SPLIT], found[SPLIT])
        engine.destroy()
        return found

    expected = make(gpt).state_dict()
    for found in run_ranks(4, job):
        assert torch.equal(found[WHOLE], torch.full((HIDDEN,), 7.0))
        assert torch.equal(found[SPLIT], expected[SPLIT] * 2)


@pytest.mark.parametrize("axis", ["sp", "cp", "tp"])
def test_a_model_built_sharded_trains_beside_another_axis(axis: str) -> None:
    whole, optimizer = alone(2)
    optimizer.step()

    def job() -> dict[str, Any]:
        with shoal.zero.Init():
            model = gpt()
        engine = engine_on({axis: 2}, 3, model)
        engine.load_module_state_dict(make(gpt).state_dict())
        backward(engine)
        engine.step()
        found: dict[str, Any] = engine.module_state_dict()
        engine.destroy()
        return found

    for found in run_ranks(4, job):
        for name, value in whole.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_deepspeeds_groups_are_those_of_the_last_engine() -> None:
    def job() -> list[tuple[int, ...]]:
        found = []
        for parallel in ({"tp": 2, "sp": 2}, {"cp": 2}):
            engine = engine_on(parallel, 1, make(gpt))
            sizes = (
                groups.get_tensor_model_parallel_world_size(),
                groups._get_sequence_parallel_world_size(),
                groups.get_data_parallel_world_size(),
                groups._get_sequence_data_parallel_world_size(),
            )
            ranks = (
                groups.get_tensor_model_parallel_rank(),
                groups._get_sequence_parallel_rank(),
                groups.get_data_parallel_rank(),
                groups.get_tensor_model_parallel_src_rank(),
            )
            found += [sizes, ranks]
            engine.destroy()
        return found

    found = run_ranks(8, job)
    assert found[5] == [(2, 2, 2, 4), (1, 0, 1, 4), (1, 2, 4, 8), (0, 1, 2, 5)]

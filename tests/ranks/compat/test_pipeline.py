"""``deepspeed.PipelineModule`` and ``deepspeed.initialize``: a script of DeepSpeed's runs as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shoal.comm.threads import run_ranks
from shoal.compat import deepspeed
from shoal.compat.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from shoal.errors import UsageError
from tests.helpers.training import make

DATA = [(torch.randn(8, generator=torch.Generator().manual_seed(i)), torch.full((8,), float(i % 3))) for i in range(64)]
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
}


def layers(*, tied: bool) -> list[Any]:
    inner = [LayerSpec(nn.Linear, 8, 8), nn.Tanh(), LayerSpec(nn.Linear, 8, 8), lambda value: 2 * value]
    if not tied:
        return [LayerSpec(nn.Linear, 8, 8), *inner, LayerSpec(nn.Linear, 8, 8)]

    def transposed(module: nn.Module, value: torch.Tensor) -> torch.Tensor:
        return value @ module.weight

    ends = [TiedLayerSpec("ends", nn.Linear, 8, 8, bias=False) for _ in range(2)]
    ends[1].forward_fn = transposed
    return [ends[0], *inner, ends[1]]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("size", "stages", "zero"), [(2, 2, 0), (4, 2, 1), (4, 4, 2), (4, 2, 3)])
def test_a_script_trains_saves_and_evaluates(size: int, stages: int, zero: int, tied: bool, tmp_path: Any) -> None:
    def job(num_stages: int = stages, folder: Any = tmp_path / "a") -> Any:
        net = make(lambda: PipelineModule(layers(tied=tied), num_stages=num_stages, loss_fn=nn.MSELoss()))
        engine, _, loader, _ = deepspeed.initialize(
            model=net,
            model_parameters=[p for p in net.parameters() if p.requires_grad],
            training_data=DATA,
            config={**CONFIG, "zero_optimization": {"stage": zero}},
        )
        assert isinstance(engine, deepspeed.PipelineEngine)
        losses = [float(engine.train_batch()) for _ in range(3)]
        engine.save_checkpoint(folder)
        engine.load_checkpoint(folder)
        stage = engine.grid.get_stage_id()
        assert (engine.is_first_stage(), engine.is_last_stage()) == (stage == 0, stage == num_stages - 1)
        assert (engine.micro_batches, engine.stage_id, engine.num_stages) == (4, stage, num_stages)
        return losses, float(engine.eval_batch(iter(loader))), engine.module_state_dict()

    found = run_ranks(size, job)
    assert all(losses == found[0][0] and loss == found[0][1] for losses, loss, _ in found)
    if size == stages:  # one data-parallel rank sees the data in the order of one process
        losses, loss, values = run_ranks(1, lambda: job(1, tmp_path / "b"))[0]
        torch.testing.assert_close(torch.tensor(found[0][0]), torch.tensor(losses), rtol=1e-6, atol=1e-7)
        assert found[0][1] == pytest.approx(loss, rel=1e-5)
        for name, value in values.items():
            torch.testing.assert_close(found[0][2][name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_stage_may_be_a_function_without_parameters(zero: int, tmp_path: Any) -> None:
    def job() -> Any:
        made = [LayerSpec(nn.Linear, 8, 8), LayerSpec(nn.Linear, 8, 8), torch.tanh]
        net = make(lambda: PipelineModule(made, num_stages=3, partition_method="uniform", loss_fn=nn.MSELoss()))
        settings = {**CONFIG, "zero_optimization": {"stage": zero}}
        engine, _, _, _ = deepspeed.initialize(model=net, training_data=DATA, config=settings)
        losses = [float(engine.train_batch()) for _ in range(2)]
        engine.save_checkpoint(tmp_path)
        losses.append(float(engine.train_batch()))
        engine.load_checkpoint(tmp_path)
        return losses, sorted(engine.module_state_dict())

    for losses, names in run_ranks(3, job):
        assert losses[0] != losses[1] != losses[2]
        assert names == ["0.bias", "0.weight", "1.bias", "1.weight"]


@pytest.mark.parametrize("zero", [1, 3])
def test_layer_files_of_an_engine_hold_its_values_and_sharded_ones_are_refused(zero: int, tmp_path: Any) -> None:
    def job() -> Any:
        net = make(lambda: PipelineModule(layers(tied=False), num_stages=2, loss_fn=nn.MSELoss()))
        settings = {**CONFIG, "zero_optimization": {"stage": zero, "stage3_param_persistence_threshold": 0}}
        engine, _, _, _ = deepspeed.initialize(model=net, training_data=DATA, config=settings)
        engine.train_batch()
        with pytest.raises(UsageError, match="after initialize"):
            net.load_state_dir(str(tmp_path), torch)
        if zero == 3 and net.mpu().data_parallel_id == 0:
            with pytest.raises(UsageError, match="is sharded"):
                net.save_state_dict(str(tmp_path), torch)
        elif zero < 3:
            net.save_state_dict(str(tmp_path), torch)
        return engine.module_state_dict()

    expected = run_ranks(4, job)[0]
    if zero < 3:
        whole = PipelineModule(layers(tied=False))
        whole.load_state_dir(str(tmp_path), torch)
        assert all(torch.equal(value, expected[name]) for name, value in whole.state_dict().items())

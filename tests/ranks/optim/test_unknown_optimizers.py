"""Optimizers that Shoal does not know: whole parameters are stepped where a rank has them, else a trial decides."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import CheckpointError, OptimizerError
from shoal.pipeline.module import PipelineModule
from tests.helpers.training import are_bit_equal, largest_difference, make

DELAY = 5


class Shampoo(torch.optim.Optimizer):
    """Preconditions each dim of up to ``block`` elements, from the fifth step on."""

    def __init__(self, params: Iterable[Any], lr: float = 0.05, block: int = 32, delay: int = DELAY) -> None:
        super().__init__(params, {"lr": lr, "block": block, "delay": delay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, update = self.state[param], param.grad.clone()
                state["count"] = state.get("count", 0) + 1
                dims = [dim for dim, size in enumerate(param.shape) if size <= group["block"]]
                factors = state.setdefault("factors", {dim: torch.eye(param.shape[dim]) for dim in dims})
                for dim in dims:
                    rows = param.grad.movedim(dim, 0).reshape(param.shape[dim], -1)
                    factors[dim] += rows @ rows.T
                    if state["count"] >= group["delay"]:
                        update = torch.tensordot(torch.linalg.inv(factors[dim]), update.movedim(dim, 0), dims=1)
                        update = update.movedim(0, dim)
                param.sub_(update, alpha=group["lr"])


class Late(torch.optim.Optimizer):
    """Divides by the norm of small tensors, from the tenth step on, and counts without a tensor."""

    def __init__(self, params: Iterable[Any], lr: float = 0.05, largest: int = 5000) -> None:
        super().__init__(params, {"lr": lr, "largest": largest})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["n"] = n = self.state[param].get("n", 0) + 1
                is_whole = param.numel() <= group["largest"] and n >= 10
                param.sub_(param.grad / (param.grad.norm() if is_whole else 1.0), alpha=group["lr"])


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 20), nn.Tanh(), nn.Linear(20, 4))


def settings(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "zero_optimization": zero, **more}


def inputs(step: int) -> torch.Tensor:
    return torch.randn(8, 12, generator=torch.Generator().manual_seed(step))


def alone(kind: Any, steps: int) -> dict[str, torch.Tensor]:
    model = make(net)
    optimizer = kind(model.parameters())
    for step in range(steps):
        model(inputs(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def train(kind: Any, steps: int, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    world, model = current_world(), make(net)
    engine = shoal.initialize(model=model, optimizer=kind(model.parameters()), config=config)[0]
    for step in range(steps):
        engine.backward(engine(inputs(step).chunk(world.size)[world.rank]).square().mean())
        engine.step()
    engine.destroy()
    return {name: p.detach().clone().float() for name, p in model.named_parameters()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [Shampoo, Late, torch.optim.Adafactor])
@pytest.mark.parametrize(("world", "stage"), [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0)])
def test_where_a_rank_has_whole_parameters_every_optimizer_is_that_of_plain_pytorch(
    world: int, stage: int, kind: Any
) -> None:
    steps = 12
    expected = alone(kind, steps)
    for found in run_ranks(world, train, kind, steps, settings(stage)):
        if world == 1:
            assert are_bit_equal(found, expected)
        assert largest_difference(found, expected) < 1e-4


@pytest.mark.parametrize("kind", [Shampoo, Late])
def test_in_pipeline_stages_without_sharding_it_is_that_of_plain_pytorch(kind: Any) -> None:
    def job() -> dict[str, torch.Tensor]:
        model = PipelineModule(list(make(net)), loss_fn=lambda out, _: out.square().mean())
        config = settings(0, gradient_accumulation_steps=2, parallel={"pp": 2})
        engine = shoal.initialize(model=model, optimizer=kind(model.parameters()), config=config)[0]
        for step in range(12):
            engine.train_batch(iter([(half, half) for half in inputs(step).chunk(2)]))
        return engine.module_state_dict()

    expected = alone(kind, 12)
    for found in run_ranks(2, job):
        assert largest_difference(dict(zip(expected, found.values(), strict=True)), expected) < 1e-4


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_sparse_adam_trains_on_one_rank_at_every_stage(stage: int) -> None:
    def job() -> torch.Tensor:
        model = make(lambda: nn.Embedding(50, 6, sparse=True))
        engine = shoal.initialize(
            model=model, optimizer=torch.optim.SparseAdam(model.parameters(), lr=0.05), config=settings(stage)
        )[0]
        for step in range(3):
            engine.backward(engine(torch.tensor([[step, 3], [3, 7]])).square().mean())
            engine.step()
        engine.destroy()
        return model.weight.detach().clone()

    model = make(lambda: nn.Embedding(50, 6, sparse=True))
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.05)
    for step in range(3):
        model(torch.tensor([[step, 3], [3, 7]])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(run_ranks(1, job)[0], model.weight.detach())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [Shampoo, Late, partial(Shampoo, delay=1000)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_where_it_steps_ranges_one_that_mixes_elements_later_or_at_some_sizes_is_an_error(
    stage: int, kind: Any
) -> None:
    def job() -> None:
        with pytest.raises(OptimizerError, match=r"is not elementwise.*(?s:.)*stage 0") as caught:
            train(kind, 1, settings(stage))
        assert caught.value.code == "optimizer-not-elementwise"

    run_ranks(2, job)


def test_a_state_that_no_checkpoint_can_hold_is_warned_of_in_the_first_step(
    caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    model = make(net)
    engine = shoal.initialize(model=model, optimizer=Shampoo(model.parameters()), config=settings(0))[0]
    for step in range(2):
        engine.backward(engine(inputs(step)[:4]).square().mean())
        engine.step()
    assert [r.message.split(":")[0] for r in caplog.records if r.levelname == "WARNING"] == [
        "Shampoo keeps state that is neither one number nor one element per element ('factors'"
    ]
    with pytest.raises(CheckpointError, match="the optimizer state of"):
        engine.save_checkpoint(tmp_path)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 2])
def test_a_checkpoint_of_an_unknown_optimizer_loads_at_another_stage(stage: int, tmp_path: Any) -> None:
    class Momentum(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float = 0.1) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for param in group["params"]:
                    speed = self.state[param].setdefault("speed", torch.zeros_like(param))
                    param.sub_(speed.mul_(0.9).add_(param.grad), alpha=group["lr"])

    def start(stage: int) -> Any:
        model = make(net)
        return shoal.initialize(model=model, optimizer=Momentum(model.parameters()), config=settings(stage))[0]

    def steps(engine: Any, first: int) -> None:
        rank, size = current_world().rank, current_world().size
        for step in range(first, first + 2):
            engine.backward(engine(inputs(step).chunk(size)[rank]).square().mean())
            engine.step()

    def job() -> dict[str, torch.Tensor]:
        engine = start(2 - stage)
        steps(engine, 0)
        engine.save_checkpoint(tmp_path)
        engine.destroy()
        engine = start(stage)
        engine.load_checkpoint(tmp_path)
        steps(engine, 2)
        engine.destroy()
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}

    found = run_ranks(2, job)
    assert are_bit_equal(*found)
    assert largest_difference(found[0], alone(Momentum, 4)) < 1e-6

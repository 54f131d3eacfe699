"""A client optimizer that has state continues with it, on shards as without an engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from tests.helpers.training import STAGES, config

Maker = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

MAKERS: dict[str, Maker] = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2, initial_accumulator_value=0.25),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-2, momentum=0.5, centered=True),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1, bias=False))


def loss_of(model: nn.Module, index: int) -> torch.Tensor:
    inputs = torch.randn(4, 7, generator=torch.Generator().manual_seed(index))
    return model(inputs.to(next(model.parameters()).dtype)).float().square().mean()


def plain_steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, stop: int) -> None:
    for index in range(first, stop):
        loss_of(model, index).backward()
        optimizer.step()
        optimizer.zero_grad()


def values(engine: shoal.Engine) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.module_state_dict().items()}


def settings(stage: int, **sections: Any) -> dict[str, Any]:
    return config(stage, **{"units": {"names": ["0", "2", "4"]}, "gradient_clipping": 0.0, **sections})


def goes_on(kind: str, start: nn.Module, stage: int, **sections: Any) -> dict[str, torch.Tensor]:
    """Two steps without an engine, then two with one, on two ranks that see the same batches."""

    def rank() -> dict[str, torch.Tensor]:
        model = copy.deepcopy(start)
        optimizer = MAKERS[kind](model.parameters())
        plain_steps(model, optimizer, 0, 2)
        engine, *_ = shoal.initialize(model=model, optimizer=optimizer, config=settings(stage, **sections))
        own = {id(parameter) for parameter in model.parameters()}
        assert not any(id(parameter) in own for parameter in optimizer.state)  # no rank keeps the whole
        for index in range(2, 4):
            engine.backward(loss_of(engine, index))
            engine.step()
        found = values(engine)
        engine.destroy()
        return found

    return run_ranks(2, rank)[0]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", MAKERS)
def test_steps_before_initialize_count(kind: str, stage: int) -> None:
    start = net()
    model = copy.deepcopy(start)
    plain_steps(model, MAKERS[kind](model.parameters()), 0, 4)
    for name, value in goes_on(kind, start, stage).items():
        assert torch.allclose(value, model.state_dict()[name], rtol=0, atol=1e-7), name


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("kind", ["AdamW", "Adagrad"])
def test_they_count_on_every_tier_of_the_state(kind: str, device: str, tmp_path: Path) -> None:
    section = {"device": device, **({"nvme_path": str(tmp_path)} if device == "nvme" else {})}
    start = net()
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_optimizer": section}
    apart = goes_on(kind, start, 3, zero_optimization=zero)
    here = goes_on(kind, start, 3)
    assert all(torch.equal(apart[name], here[name]) for name in here)


def test_state_in_16_bits_continues_in_the_main_parameters_dtype() -> None:
    start = net().bfloat16()

    def rank() -> None:
        model = copy.deepcopy(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        plain_steps(model, optimizer, 0, 1)
        before = {name: optimizer.state[p]["exp_avg"].clone() for name, p in model.named_parameters()}
        engine, *_ = shoal.initialize(model=model, optimizer=optimizer, config=settings(2, bf16={"enabled": True}))
        for name, parameter in engine.module.named_parameters():
            held = engine.access.full_optimizer_state(parameter, "exp_avg")
            assert held is not None and held.dtype == torch.float32
            assert torch.equal(held, before[name].float())
        engine.destroy()

    run_ranks(2, rank)


@pytest.mark.parametrize("stage", STAGES)
def test_state_of_an_fp32_model_follows_the_parameters_to_bf16_where_there_are_no_main_parameters(stage: int) -> None:
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}

    def rank() -> None:
        model = net()
        optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2, initial_accumulator_value=0.25, fused=True)
        engine, *_ = shoal.initialize(model=model, optimizer=optimizer, config=settings(stage, bf16=bf16))
        engine.backward(loss_of(engine, 0))
        engine.step()
        assert {state["sum"].dtype for state in engine.optimizer.state.values()} == {torch.bfloat16}
        engine.destroy()

    run_ranks(1, rank)


@pytest.mark.parametrize("fused", [False, True], ids=["", "the number of steps is on the parameter's device"])
def test_what_a_constructor_made_on_the_meta_device_begins_with_its_value(fused: bool) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 1))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2, initial_accumulator_value=0.25, fused=fused)
    engine, *_ = shoal.initialize(
        model=model, optimizer=optimizer, config=config(3, units={"names": ["0", "1"]}, gradient_clipping=0.0)
    )
    held = engine.access.full_optimizer_state(model[0].weight, "sum")
    assert held is not None and held.tolist() == [[0.25] * 7] * 5
    engine.backward(engine(torch.ones(2, 7)).square().mean())
    engine.step()
    engine.destroy()


class Scaled(nn.Module):
    """A parameter without dimensions beside one that has some."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.layer = nn.Linear(7, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.layer(x)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", MAKERS)
def test_a_parameter_without_dimensions_goes_on_too(kind: str, stage: int) -> None:
    torch.manual_seed(0)
    start = Scaled()
    model = copy.deepcopy(start)
    plain_steps(model, MAKERS[kind](model.parameters()), 0, 4)
    for name, value in goes_on(kind, start, stage, units={"names": []}).items():
        assert torch.allclose(value, model.state_dict()[name], rtol=0, atol=1e-7), name

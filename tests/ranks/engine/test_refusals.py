"""Models, optimizers, configs and calls that cannot work are errors of Shoal's own, which say what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import ConfigError, ModelError, OptimizerError, ShoalError, UsageError
from tests.helpers.models import Plain
from tests.helpers.training import STAGES, batch, config, make, run_steps, sgd, start, train_ranks


def alone(job: Callable[[], Any]) -> Any:
    return run_ranks(1, job)[0]


def initialize(model: Any, settings: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    return shoal.initialize(model=model, config=settings or config(3), **kwargs)


ADAM = config(3, optimizer={"type": "Adam", "params": {"lr": 1e-3}})


@pytest.mark.parametrize("settings", [config(0), ADAM], ids=["no optimizer", "an optimizer of the config"])
def test_an_empty_model_is_an_error(settings: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="Sequential has no parameters"):
        alone(lambda: initialize(nn.Sequential(), settings))


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_parameters_are_an_error_that_names_them() -> None:
    with pytest.raises(ModelError, match=r"2 parameters without a shape yet: 0\.weight, 0\.bias"):
        alone(lambda: initialize(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3))))


class Rotated(nn.Module):
    def __init__(self, trains: bool) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.ones(3, dtype=torch.complex64), requires_grad=trains)
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.turn).abs().mean()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_complex_parameter_that_is_to_be_trained_is_an_error_and_a_frozen_one_is_none(stage: int) -> None:
    settings = {**config(stage), "optimizer": ADAM["optimizer"], "units": {}}
    with pytest.raises(ModelError, match=r"1 complex parameter to be trained: turn\."):
        alone(lambda: initialize(Rotated(trains=True), settings))

    def job() -> torch.Tensor:
        engine, *_ = initialize(make(lambda: Rotated(trains=False)), settings)
        engine.backward(engine(torch.ones(2, 3)))
        engine.step()
        found = engine.module_state_dict()["turn"]
        engine.destroy()
        return found

    for found in run_ranks(2, job):
        assert torch.equal(found, torch.ones(3, dtype=torch.complex64))


def test_what_is_no_model_is_an_error() -> None:
    with pytest.raises(ModelError, match=r"must be a torch\.nn\.Module, got int"):
        alone(lambda: initialize(3))


def test_no_config_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no config was given"):
        alone(lambda: shoal.initialize(model=Plain()))


def test_a_parameter_in_two_groups_is_an_error_that_names_it() -> None:
    def job() -> None:
        model = Plain()
        groups = [{"params": list(model.parameters())}, {"params": [model.blocks[0].up.weight]}]
        initialize(model, ADAM, model_parameters=groups)

    with pytest.raises(OptimizerError, match=r"'blocks\.0\.up\.weight' is in group 0 and again in group 1"):
        alone(job)


def test_a_parameter_that_is_not_in_the_model_is_an_error() -> None:
    with pytest.raises(OptimizerError, match=r"group 0 holds a parameter \(position 1, shape \(5,\)\)"):
        alone(lambda: initialize(model := Plain(), optimizer=sgd([model.norm.weight, nn.Parameter(torch.zeros(5))])))


def test_an_optimizer_of_another_type_is_an_error() -> None:
    with pytest.raises(OptimizerError, match="got str"):
        alone(lambda: initialize(Plain(), optimizer="adam"))


def test_a_frozen_model_with_an_optimizer_is_an_error() -> None:
    with pytest.raises(OptimizerError, match="no parameter requires a gradient"):
        alone(lambda: initialize(Plain().requires_grad_(False), ADAM))


def test_units_that_are_not_in_the_model_are_an_error_with_a_suggestion() -> None:
    with pytest.raises(ModelError, match=r"'Blok'.*Block"):
        alone(lambda: initialize(Plain(), config(3, units={"classes": ["Blok"], "names": []})))
    with pytest.raises(ModelError, match=r"'block\.\*'"):
        alone(lambda: initialize(Plain(), config(3, units={"names": ["block.*"]})))


def test_different_models_or_configs_are_an_error_that_names_the_ranks() -> None:
    def other_model() -> None:
        start(lambda: Plain(hidden=12 if current_world().rank != 2 else 8), config(2))

    with pytest.raises(ModelError, match="rank 2 has another model than the others"):
        run_ranks(4, other_model)

    def other_config() -> None:
        start(Plain, config(2, gradient_clipping=float(current_world().rank == 1)))

    with pytest.raises(ConfigError, match="rank 1 has another config than the others"):
        run_ranks(4, other_config)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_changed_after_initialize_is_an_error_that_names_the_change(stage: int) -> None:
    def job() -> tuple[str, str]:
        engine = start(Plain, config(stage))
        run_steps(engine, 3)
        messages = []
        engine.module.late = nn.Linear(2, 2)
        with pytest.raises(ModelError) as caught:
            engine(*batch(3, 0, 1))
        messages.append(str(caught.value))
        del engine.module.late
        engine.module.blocks[0].up.weight = nn.Parameter(torch.zeros(24, 12))
        with pytest.raises(ModelError) as caught:
            [engine(*batch(index, 0, 1)) for index in range(64)]  # compared parameter by parameter now and then only
        messages.append(str(caught.value))
        engine.destroy()
        return messages[0], messages[1]

    for first, second in run_ranks(2, job):
        assert "added 'late.weight', added 'late.bias'" in first
        assert "added 'blocks.0.up.weight', removed 'blocks.0.up.weight'" in second


def test_unused_parameters_are_an_error_where_the_config_says_so() -> None:
    for kind in (ModelError, AssertionError):
        with pytest.raises(kind, match=r"2 parameters got no gradient on any rank: unused\.weight, unused\.bias"):
            train_ranks(2, Plain, config(2, zero_optimization={"ignore_unused_parameters": False}))


# The API called in a way that cannot work


def test_wrong_calls_are_usage_errors() -> None:
    def job(stage: int) -> list[str]:
        engine = start(Plain, config(stage))
        inputs = batch(0, current_world().rank, 2)
        codes = []

        def fails(call: Callable[[], Any], kind: type[ShoalError] = UsageError) -> None:
            with pytest.raises(kind) as caught:
                call()
            codes.append(caught.value.code)

        fails(engine.step)
        fails(lambda: engine.backward(engine.module.logits(inputs[0]) if stage < 3 else torch.ones(2)))
        fails(lambda: engine.backward(3.0))
        fails(lambda: engine.backward(torch.zeros(())))
        with torch.no_grad():
            fails(lambda: engine.backward(engine(*inputs)))
        fails(lambda: engine.set_train_batch_size(5), ConfigError)
        engine.backward(engine(*inputs))
        fails(lambda: engine.set_train_batch_size(8))
        engine.step()
        engine.backward(engine(*inputs))
        engine(*inputs).backward()
        fails(engine.step)
        run_steps(engine, 2)
        fails(lambda: engine.optimizer.step(lambda: 0.0), OptimizerError)
        fails(lambda: engine.optimizer.add_param_group({"params": []}), OptimizerError)
        engine.destroy()
        engine.destroy()
        fails(lambda: engine(*inputs))
        fails(lambda: engine.backward(torch.zeros((), requires_grad=True)))
        fails(engine.step)
        return codes

    for stage in STAGES:
        for codes in run_ranks(2, job, stage):
            assert codes == [
                "step-without-backward",
                "loss-shape",
                "loss-shape",
                "loss-detached",
                "loss-detached",
                "batch-size",
                "batch-size-mid-step",
                "mixed-backward",
                "optimizer-closure",
                "optimizer-add-group",
                "engine-destroyed",
                "engine-destroyed",
                "engine-destroyed",
            ]


def test_an_engine_without_an_optimizer_evaluates_but_does_not_train() -> None:
    def job(stage: int) -> tuple[float, float]:
        engine = start(Plain, config(stage), None)
        assert engine.optimizer is None
        with torch.no_grad():
            loss = float(engine(*batch(0, 0, 1)))
        with pytest.raises(UsageError, match="needs an optimizer"):
            engine.backward(engine(*batch(0, 0, 1)))
        engine.destroy()
        return loss, float(make(Plain)(*batch(0, 0, 1)).detach())

    for stage in STAGES:
        for loss, expected in run_ranks(2, job, stage):
            assert loss == expected

"""Full values of parameters, gradients and optimizer states on the ranks of a pipeline stage; compiled stages."""

from __future__ import annotations

import shutil
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.errors import UsageError
from tests.helpers.pipeline_cases import alone, engine_of_layers
from tests.helpers.pipeline_layers import STEPS, WIDTH, batches
from tests.helpers.training import make, sgd
from tests.ranks.parallel.tensor.test_engine import config, gpt


def layers() -> list[nn.Module]:
    made: list[Any] = [nn.Linear(WIDTH, WIDTH) for _ in range(8)]
    made[7].weight = made[0].weight
    return [nn.Sequential(layer, nn.Tanh()) for layer in made]


@pytest.mark.parametrize(("stage", "schedule", "virtual"), [(0, "1f1b", 1), (1, "zbv", 2), (3, "1f1b", 1)])
def test_the_ranks_of_a_stage_read_and_set_its_parameters(stage: int, schedule: str, virtual: int) -> None:
    _, values = alone(layers, 2)

    def job() -> Any:
        engine = engine_of_layers(layers, 2, stage, schedule, virtual)
        for step in range(STEPS):
            engine.train_batch(batches(engine.axes.batch.rank, step, 4))
        found = {}
        for name, parameter in engine.module.named_parameters():
            found[name] = shoal.zero.safe_get_full_fp32_param(parameter)
            momentum = shoal.zero.safe_get_full_optimizer_state(parameter, "momentum_buffer")
            assert momentum.shape == parameter.shape
            shoal.zero.safe_set_full_optimizer_state(parameter, torch.zeros_like(momentum), "momentum_buffer")
            assert not shoal.zero.safe_get_full_optimizer_state(parameter, "momentum_buffer").any()
            assert shoal.zero.safe_get_full_grad(parameter) is None
            shoal.zero.safe_set_full_fp32_param(parameter, 2 * found[name])
        return found, engine.module_state_dict()

    seen = set()
    for found, doubled in run_ranks(4, job):
        for name, value in found.items():
            torch.testing.assert_close(value, values[name], rtol=1e-6, atol=1e-6, msg=name)
            torch.testing.assert_close(doubled[name], 2 * value, rtol=0, atol=0, msg=name)
        seen |= set(found)
    assert seen == set(values)


def gradients_of_one_process() -> dict[str, torch.Tensor]:
    model = nn.Sequential(*make(layers))  # type: ignore[arg-type]
    for rank in range(2):
        for inputs, labels in batches(rank, 0, 4):
            (nn.functional.mse_loss(model(inputs), labels) / 8).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("stage", "more"), [(0, {}), (2, {}), (3, {"zero": {"stage3_max_live_parameters": 50}})])
def test_gradients_are_read_set_and_clipped_before_the_step(stage: int, more: dict[str, Any]) -> None:
    expected = gradients_of_one_process()
    norm = torch.linalg.vector_norm(torch.stack([value.norm() for value in expected.values()]))

    def job() -> Any:
        engine = engine_of_layers(
            layers, 2, stage, gradient_clipping=0.0, optimizer=partial(torch.optim.SGD, lr=1.0), **more
        )
        own = dict(engine.module.named_parameters())
        before = {name: engine.access.full_parameter(p).clone() for name, p in own.items()}
        found: dict[str, Any] = {}

        def double(engine: Any) -> None:
            for name, parameter in own.items():
                found[name] = shoal.zero.safe_get_full_grad(parameter).clone()
                shoal.zero.safe_set_full_grad(parameter, 2 * found[name])
            found["norm"] = engine.clip_grad_norm_(0.1)

        engine.before_step.append(double)
        engine.train_batch(batches(engine.axes.batch.rank, 0, 4))
        return found, {n: before[n] - engine.access.full_parameter(p) for n, p in own.items()}

    for found, moved in run_ranks(4, job):
        torch.testing.assert_close(found.pop("norm"), 2 * norm, rtol=1e-5, atol=0)
        assert set(found) == set(moved)
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)
            torch.testing.assert_close(moved[name], 0.1 * value / norm, rtol=1e-4, atol=1e-6, msg=name)


def test_a_function_that_raises_before_the_step_raises_on_all_ranks_and_the_next_batch_runs() -> None:
    def job() -> Any:
        engine = engine_of_layers(layers, 2, 1)
        before = engine.module_state_dict()

        def fail(engine: Any) -> None:
            if engine.global_rank == 1:
                raise ArithmeticError("out of luck")

        engine.before_step.append(fail)
        with pytest.raises(ArithmeticError if engine.global_rank == 1 else UsageError, match="out of luck"):
            engine.train_batch(batches(engine.axes.batch.rank, 0, 4))
        after = engine.module_state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        engine.before_step.clear()
        with pytest.raises(UsageError, match=r"before_step\.append"):
            engine.clip_grad_norm_(1.0)
        with pytest.raises(UsageError, match="needs reduced gradients"):
            engine.no_sync()
        return float(engine.train_batch(batches(engine.axes.batch.rank, 0, 4)))

    losses, _ = alone(layers, 2)
    assert run_ranks(4, job) == [pytest.approx(losses[0], rel=1e-6)] * 4


def test_a_parameter_of_another_stage_is_an_error_that_says_so() -> None:
    def job() -> str:
        model = make(gpt)
        everything = dict(model.named_parameters())
        settings = config(1, 1, 2) | {"parallel": {"pp": 2}}
        engine = shoal.initialize(model=model, optimizer=sgd(model.parameters()), config=settings)[0]
        own = dict(engine.module.named_parameters())
        assert set(dict(model.named_parameters())) == set(own)
        others = [parameter for name, parameter in everything.items() if name not in own]
        assert others
        for parameter in others:
            with pytest.raises(UsageError, match="is on another pipeline stage") as caught:
                shoal.zero.safe_get_full_fp32_param(parameter)
        return caught.value.code

    assert run_ranks(2, job) == ["access-stage"] * 2


@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_stages_compiled_by_inductor_train_as_one_process() -> None:
    losses, _ = alone(layers, 1)

    def job() -> list[float]:
        engine = engine_of_layers(layers, 2, 1)
        engine.module.compile()
        return [float(engine.train_batch(batches(0, step, 4))) for step in range(STEPS)]

    for found in run_ranks(2, job):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-5, atol=1e-6)

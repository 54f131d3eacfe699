"""The safe accessors: whole values, gradients and states of single parameters, this rank's parts, and setting them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shoal import zero
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import UsageError
from tests.helpers.models import OddParameters, Plain
from tests.helpers.training import BF16, STAGES, adamw, batch, config, largest_difference, make, named, run_steps, start


@pytest.mark.parametrize("sections", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_full_values_are_those_of_one_process(world: int, stage: int, sections: dict[str, Any]) -> None:
    model = make(OddParameters)
    optimizer = adamw(model.parameters())
    for step in range(3):
        for rank in range(world):
            (model(*batch(step, rank, world)) / world).backward()
        if step < 2:
            optimizer.step()
            optimizer.zero_grad()

    def job() -> dict[str, list[torch.Tensor | None]]:
        engine = start(OddParameters, config(stage, **sections), adamw)
        run_steps(engine, 2)
        rank = current_world().rank
        engine.backward(engine(*batch(2, rank, world)))
        found = {
            name: [
                zero.safe_get_full_fp32_param(p),
                zero.safe_get_full_grad(p),
                zero.safe_get_full_optimizer_state(p, "exp_avg"),
                zero.safe_get_full_optimizer_state(p, "exp_avg_sq"),
            ]
            for name, p in named(engine).items()
            if "unused" not in name and p.numel()
        }
        engine.destroy()
        return found

    # fp32: Adam's amplification of rounding; bf16: 8 bits, of gradients up to 4.
    atol = 1e-4 if not sections else 0.2
    for found in run_ranks(world, job):
        for name, parameter in model.named_parameters():
            if name not in found:
                continue
            state = optimizer.state[parameter]
            expected = [parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]]
            for value, of_one_process in zip(found[name], expected, strict=True):
                assert value is not None
                assert value.dtype == torch.float32
                assert value.shape == parameter.shape
                assert largest_difference({"": value}, {"": of_one_process.detach()}) <= atol, name


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 3])
def test_gradients_and_states_are_none_before_there_are_any(world: int, stage: int) -> None:
    def job() -> list[Any]:
        engine = start(Plain, config(stage), adamw)
        weight = named(engine)["blocks.0.up.weight"]
        found = [zero.safe_get_full_grad(weight), zero.safe_get_full_optimizer_state(weight, "exp_avg")]
        engine.destroy()
        return found

    assert run_ranks(world, job) == [[None, None]] * world


@pytest.mark.parametrize("sections", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 3])
def test_what_was_set_is_what_is_got_and_what_the_optimizer_uses(
    world: int, stage: int, sections: dict[str, Any]
) -> None:
    def job() -> dict[str, bool]:
        engine = start(Plain, config(stage, **sections), adamw)
        run_steps(engine, 1)
        weight = named(engine)["blocks.1.up.weight"]
        shape, rank = weight.shape, current_world().rank
        ramp = torch.arange(weight.numel(), dtype=torch.float32).view(shape) / 100
        found = {}
        zero.safe_set_full_optimizer_state(weight, ramp, "exp_avg")
        found["state"] = torch.equal(zero.safe_get_full_optimizer_state(weight, "exp_avg"), ramp)
        zero.safe_set_full_fp32_param(weight, ramp)
        found["parameter"] = torch.equal(zero.safe_get_full_fp32_param(weight), ramp)
        with zero.GatheredParameters(weight):
            found["the model's own"] = torch.equal(weight.detach(), ramp.to(weight.dtype))
        engine.backward(engine(*batch(1, rank, world)))
        zero.safe_set_full_grad(weight, torch.zeros(shape))
        found["gradient"] = bool((zero.safe_get_full_grad(weight) == 0).all())
        zero.safe_set_full_optimizer_state(weight, torch.zeros(shape), "exp_avg")
        engine.step()
        # No gradient and no momentum: only weight decay (0.1 x learning rate 1e-2) is left.
        decayed = ramp * (1 - 1e-3)
        found["step"] = bool((zero.safe_get_full_fp32_param(weight) - decayed).abs().max() < 1e-5)
        engine.destroy()
        return found

    for found in run_ranks(world, job):
        assert found == dict.fromkeys(["state", "parameter", "the model's own", "gradient", "step"], True)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 3])
def test_local_parts_together_are_the_whole(world: int, stage: int) -> None:
    def job() -> list[list[torch.Tensor | None]]:
        engine = start(OddParameters, config(stage), adamw)
        run_steps(engine, 1)
        engine.backward(engine(*batch(1, current_world().rank, world)))
        found = []
        for parameter in (named(engine)["odd"], named(engine)["blocks.2.up.weight"], named(engine)["scalar"]):
            found.append(
                [
                    zero.safe_get_local_fp32_param(parameter),
                    zero.safe_get_local_grad(parameter),
                    zero.safe_get_local_optimizer_state(parameter, "exp_avg"),
                ]
            )
            found[-1] += [
                zero.safe_get_full_fp32_param(parameter),
                zero.safe_get_full_grad(parameter),
                zero.safe_get_full_optimizer_state(parameter, "exp_avg"),
            ]
        found = [[None if t is None else t.clone() for t in row] for row in found]
        engine.destroy()
        return found

    results = run_ranks(world, job)
    for index in range(3):
        for kind in range(3):
            parts = [found[index][kind] for found in results]
            whole = results[0][index][kind + 3]
            assert whole is not None
            if stage == 0:
                assert all(torch.equal(part, whole.reshape(-1)) for part in parts if part is not None)
            else:
                assert torch.equal(torch.cat([part for part in parts if part is not None]), whole.reshape(-1))


def test_local_parts_can_be_set() -> None:
    def job(stage: int) -> tuple[bool, bool]:
        engine = start(Plain, config(stage), adamw)
        run_steps(engine, 1)
        weight = named(engine)["blocks.1.up.weight"]
        part = zero.safe_get_local_fp32_param(weight)
        held = zero.safe_get_local_optimizer_state(weight, "exp_avg")
        if part is not None and held is not None:
            zero.safe_set_local_fp32_param(weight, torch.full_like(part, 2.0))
            zero.safe_set_local_optimizer_state(weight, torch.full_like(held, 3.0), "exp_avg")
        parameter = zero.safe_get_full_fp32_param(weight)
        state = zero.safe_get_full_optimizer_state(weight, "exp_avg")
        engine.destroy()
        return bool((parameter == 2.0).all()), bool((state == 3.0).all())

    for stage in STAGES:
        assert run_ranks(2, job, stage) == [(True, True)] * 2


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("sections", [{}, {"fp16": {"enabled": True, "initial_scale_power": 4}}], ids=["fp32", "fp16"])
def test_each_rank_sets_its_part_of_the_gradient(world: int, sections: dict[str, Any]) -> None:
    def job(stage: int) -> tuple[Any, ...]:
        engine = start(Plain, config(stage, **sections))
        weight = named(engine)["blocks.1.up.weight"]
        engine.backward(engine(*batch(0, current_world().rank, world)))
        part = zero.safe_get_local_fp32_param(weight)
        value = torch.full((0 if part is None else part.numel(),), 0.25)
        before = engine.access.full_parameter(weight).clone()
        zero.safe_set_local_grad(weight, value)
        whole = engine.access.full_gradient(weight)
        engine.step()
        moved = before - engine.access.full_parameter(weight)
        engine.destroy()
        return whole, moved, before

    for stage in STAGES:
        for whole, moved, before in run_ranks(world, job, stage):
            assert torch.equal(whole, torch.full_like(whole, 0.25))
            torch.testing.assert_close(moved, 0.1 * (0.25 + 0.01 * before), atol=1e-6, rtol=1e-4)  # decay and rate


def test_a_part_of_the_gradient_needs_a_gradient_and_its_size() -> None:
    def job(stage: int) -> list[str]:
        engine = start(Plain, config(stage))
        weight = named(engine)["blocks.1.up.weight"]
        part = torch.zeros(10**6)
        said = []
        for _ in range(2):
            with pytest.raises(UsageError) as caught:
                zero.safe_set_local_grad(weight, part)
            said.append(str(caught.value))
            engine.backward(engine(*batch(0, current_world().rank, 2)))
        engine.destroy()
        return said

    for stage in STAGES:
        for before, after in run_ranks(1, job, stage):
            assert "no gradient to replace" in before
            assert "the local value has 1000000 elements" in after


def test_a_wrong_shape_or_a_parameter_of_no_engine_is_a_usage_error() -> None:
    def job() -> list[str]:
        engine = start(Plain, config(3))
        weight = named(engine)["blocks.1.up.weight"]
        calls: list[Callable[[], Any]] = [
            lambda: zero.safe_set_full_fp32_param(weight, torch.zeros(3)),
            lambda: zero.safe_get_full_fp32_param(nn.Parameter(torch.zeros(3))),
            lambda: zero.safe_set_full_grad(weight, torch.zeros_like(make(Plain).blocks[1].up.weight)),
        ]
        codes = []
        for call in calls:
            with pytest.raises(UsageError) as caught:
                call()
            codes.append(caught.value.code)
        engine.destroy()
        return codes

    assert run_ranks(2, job) == [["access-shape", "access-unknown", "access-no-gradient"]] * 2

"""Hooks of the optimizer, registered before or after `initialize`, on either object: once a step, as in PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks

CONFIG: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}


def wide_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))  # several ranges of main parameters


def steps(engine: shoal.Engine, number: int) -> None:
    for _ in range(2 * number):
        engine.backward(engine(torch.ones(2, 256)).square().mean())
        engine.step()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_hooks_of_either_optimizer_run_once_a_step_around_the_update(stage: int) -> None:
    def run() -> None:
        model = wide_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        calls: list[str] = []
        first = optimizer.register_step_post_hook(lambda *_: calls.append("given, before"))
        config = {**CONFIG, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
        engine, returned, _, _ = shoal.initialize(model=model, optimizer=optimizer, config=config)
        assert returned is not None
        values: list[torch.Tensor] = []

        def look(self: Any, args: Any, kwargs: Any) -> None:
            assert self is args[0] is returned
            value = shoal.zero.safe_get_full_fp32_param(next(engine.module.parameters()))
            assert value is not None
            values.append(value)

        returned.register_step_pre_hook(lambda *_: calls.append("pre"))
        looks = returned.register_step_pre_hook(look), returned.register_step_post_hook(look)
        last = optimizer.register_step_post_hook(lambda *_: calls.append("given, after"))
        steps(engine, 2)
        assert calls == ["pre", "given, before", "given, after"] * 2
        before, after, again, _ = values
        assert not torch.equal(before, after)
        assert torch.equal(after, again)
        for handle in (first, last, *looks):
            handle.remove()
        steps(engine, 1)
        assert calls[6:] == ["pre"]
        engine.destroy()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert calls[7:] == ["pre"]  # the hooks are the given optimizer's again

    run_ranks(2, run)


def test_hooks_of_the_state_may_change_it() -> None:
    def run() -> None:
        model = wide_model()
        engine, optimizer, _, _ = shoal.initialize(
            model=model, optimizer=torch.optim.AdamW(model.parameters()), config=CONFIG
        )
        assert optimizer is not None
        calls: list[str] = []
        optimizer.register_state_dict_pre_hook(lambda _: calls.append("saving"))
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, "note": 7})
        optimizer.register_load_state_dict_pre_hook(
            lambda _, state: {**state, "param_groups": [{**group, "lr": 0.25} for group in state["param_groups"]]}
        )
        optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
        steps(engine, 1)
        saved = optimizer.state_dict()
        assert saved["note"] == 7
        optimizer.load_state_dict(saved)
        assert calls == ["saving", "loaded"]
        assert [group["lr"] for group in optimizer.param_groups] == [0.25]
        engine.destroy()

    run_ranks(2, run)

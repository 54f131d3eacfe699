"""State in fp32 for weights in 16 bit, under the names of DeepSpeed's optimizers for the host."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shoal.compat.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from shoal.compat.deepspeed.ops.adam import DeepSpeedCPUAdam
from shoal.compat.deepspeed.ops.lion import DeepSpeedCPULion
from shoal.optim.elementwise import check

BF16, FP32 = torch.bfloat16, torch.float32
CLASSES = {
    "adam": (DeepSpeedCPUAdam, ("exp_avg", "exp_avg_sq")),
    "adagrad": (DeepSpeedCPUAdagrad, ("sum",)),
    "lion": (DeepSpeedCPULion, ("exp_avg",)),
}


def parameter(dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.linspace(-2, 3, 40).to(dtype))


def gradient(step: int) -> torch.Tensor:
    return (torch.linspace(1, -1, 40) * (step + 1)).to(BF16)


@pytest.mark.parametrize("kind", CLASSES)
def test_each_step_is_the_fp32_step_of_the_rounded_weight(kind: str) -> None:
    make, names = CLASSES[kind]
    bf16_weight, fp32_weight = parameter(BF16), parameter(BF16).float().detach().requires_grad_()
    ours, reference = make([bf16_weight], lr=0.1), make([fp32_weight], lr=0.1)
    for step in range(4):
        bf16_weight.grad, fp32_weight.grad = gradient(step), gradient(step).float()
        ours.step()
        reference.step()
        with torch.no_grad():
            fp32_weight.copy_(fp32_weight.to(BF16))
        torch.testing.assert_close(bf16_weight.float(), fp32_weight.detach(), rtol=0, atol=0)
        for name in names:
            assert ours.state[bf16_weight][name].dtype == FP32
            torch.testing.assert_close(
                ours.state[bf16_weight][name], reference.state[fp32_weight][name], rtol=0, atol=0
            )
    assert [p is bf16_weight for p in ours.param_groups[0]["params"]] == [True]
    assert list(ours.state) == [bf16_weight]


@pytest.mark.parametrize("kind", CLASSES)
def test_state_is_in_the_weights_format_where_that_is_asked_for(kind: str) -> None:
    make, names = CLASSES[kind]
    bf16_weight = parameter(BF16)
    optimizer = make([bf16_weight], fp32_optimizer_states=False)
    bf16_weight.grad = gradient(0)
    optimizer.step()
    assert {optimizer.state[bf16_weight][name].dtype for name in names} == {BF16}


def test_weights_of_both_kinds_are_stepped_once_each_and_one_without_a_gradient_not_at_all() -> None:
    bf16_weight, fp32_weight, alone = parameter(BF16), parameter(FP32), parameter(BF16)
    optimizer = DeepSpeedCPUAdam([{"params": [bf16_weight, alone]}, {"params": [fp32_weight], "lr": 0.5}], lr=0.1)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    bf16_weight.grad, fp32_weight.grad = gradient(0), gradient(0).float()
    loss = optimizer.step(lambda: torch.tensor(3.0))
    assert loss == 3.0
    assert calls == ["before", "after"]
    assert float(optimizer.state[bf16_weight]["step"]) == float(optimizer.state[fp32_weight]["step"]) == 1.0
    assert torch.equal(alone, parameter(BF16))
    assert alone not in optimizer.state
    assert len(optimizer.param_groups[0]["params"]) == 2


def test_a_copy_has_fp32_state_too() -> None:
    bf16_weight = parameter(BF16)
    optimizer = DeepSpeedCPUAdam([bf16_weight])
    bf16_weight.grad = gradient(0)
    optimizer.step()
    other = copy.deepcopy(optimizer)
    (twin,) = other.param_groups[0]["params"]
    twin.grad = gradient(1)
    other.step()
    assert other.state[twin]["exp_avg"].dtype == FP32
    assert float(other.state[twin]["step"]) == 2.0


@pytest.mark.parametrize("kind", CLASSES)
def test_they_are_known_to_be_elementwise_without_a_trial(kind: str) -> None:
    make: Callable[[Any], torch.optim.Optimizer] = CLASSES[kind][0]
    assert check(make([parameter(FP32)]), refuse_untested=True) == "elementwise"


def test_a_failure_in_the_step_leaves_the_groups_as_they_were() -> None:
    bf16_weight = parameter(BF16)
    optimizer = DeepSpeedCPUAdam([bf16_weight], lr=0.1)
    bf16_weight.grad = gradient(0)
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        optimizer.step()
    assert optimizer.param_groups[0]["params"] == [bf16_weight]

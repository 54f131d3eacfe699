"""The transforms of torch.func, through the engine and through its module, give what they give of the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import functional_call, grad, grad_and_value, jacrev, vmap
from torch.utils._pytree import tree_leaves

import shoal
from shoal.comm.threads import run_ranks
from shoal.errors import UsageError

Model = Callable[..., torch.Tensor]
TRANSFORMS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "gradient of inputs": lambda model, x: grad(lambda x: model(x).sum())(x),
    "gradient and value": lambda model, x: grad_and_value(lambda x: model(x).square().sum())(x),
    "rows": lambda model, x: vmap(model)(x),
    "gradient of each row": lambda model, x: vmap(grad(lambda x: model(x).sum()))(x),
    # hessian() uses forward-mode differentiation, whose level threads share: rank threads would disturb each other.
    "second derivatives": lambda model, x: jacrev(jacrev(lambda x: model(x).sum()))(x[:2]),
    "gradients of each row's parameters": lambda model, x: vmap(
        grad(lambda parameters, row: functional_call(model, parameters, (row,)).sum()), in_dims=(None, 0)
    )({name: parameter.detach() for name, parameter in model.named_parameters()}, x),
}


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


MODEL = small_model()  # ranks as threads share the generator, so that each must not draw values of its own


def engine_of(stage: int, **zero: Any) -> shoal.Engine:
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
    }
    return shoal.initialize(model=copy.deepcopy(MODEL), config=config)[0]


def assert_equal_to_the_plain_model(model: Any) -> None:
    plain, x = copy.deepcopy(MODEL), torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    for name, transform in TRANSFORMS.items():
        results = zip(tree_leaves(transform(model, x)), tree_leaves(transform(plain, x)), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in results), name


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_transforms_run_through_the_engine_and_its_module_and_training_goes_on(stage: int) -> None:
    def run() -> None:
        engine = engine_of(stage)
        assert_equal_to_the_plain_model(engine)
        assert_equal_to_the_plain_model(engine.module)
        losses = []
        for _ in range(3):
            loss = engine(torch.ones(3, 4)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        assert losses[2] < losses[0]
        engine.destroy()

    run_ranks(2, run)


@pytest.mark.parametrize("zero", [{}, {"offload_optimizer": {"device": "cpu"}}], ids=["device", "host"])
def test_a_transform_waits_for_parameters_that_the_step_has_left_to_their_first_use(zero: dict[str, Any]) -> None:
    def run() -> None:
        engine = engine_of(1, overlap_param_gather=True, **zero)
        for model in (engine, engine.module):
            engine.backward(engine(torch.ones(3, 4)).square().mean())
            engine.step()
            x = torch.ones(2, 4)
            first = grad(lambda x, model=model: model(x).sum())(x)
            assert torch.equal(first, grad(lambda x: engine.module(x).sum())(x))
            assert torch.isfinite(first).all()
        engine.destroy()

    run_ranks(2, run)


def test_at_stage_3_a_transform_needs_gathered_parameters() -> None:
    def run() -> None:
        engine = engine_of(3)
        for model in (engine, engine.module):
            with pytest.raises(UsageError, match="whose parameters are sharded") as refused:
                grad(lambda x, model=model: model(x).sum())(torch.ones(3, 4))
            assert refused.value.code == "transform-sharded"
        with shoal.zero.GatheredParameters(list(engine.module.parameters())):
            assert_equal_to_the_plain_model(engine.module)
        loss = engine(torch.ones(3, 4)).square().mean()
        engine.backward(loss)
        engine.step()
        engine.destroy()

    run_ranks(2, run)

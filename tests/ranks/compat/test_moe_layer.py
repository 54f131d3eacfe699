"""DeepSpeed's MoE layer: trained as by real DeepSpeed, and the same on any number of expert-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import shoal
from shoal.comm.world import current_world
from shoal.errors import NonFiniteError, UsageError
from shoal.parallel.expert.layer import MoE
from tests.fixtures.experts.cases import CONFIG, EXPERTS, VOCABULARY, WIDTH, TwoLinears, build_model, train
from tests.helpers.places import FIXTURES

RECORDED = FIXTURES / "experts"
RANKS, TOKENS = 4, 6


def train_as_recorded(rank: int, size: int, stage: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """This rank's losses of 5 steps, and the weights of the whole model."""
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    engine = shoal.initialize(model=build_model(MoE, size), config=config)[0]
    losses, after = train(engine, rank), dict(engine.module_state_dict())
    engine.destroy()
    return losses, after


def compare(found: list[tuple[list[float], dict[str, torch.Tensor]]], recorded: dict[str, torch.Tensor]) -> None:
    losses = torch.tensor([losses for losses, _ in found], dtype=torch.float64)
    torch.testing.assert_close(losses, recorded["losses"], rtol=1e-6, atol=1e-6)
    after = {name.removeprefix("after/"): value for name, value in recorded.items() if name.startswith("after/")}
    assert found[0][1].keys() == after.keys()
    for name, value in found[0][1].items():
        torch.testing.assert_close(value, after[name], rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank_trains_as_deepspeed_does(stage: int) -> None:
    recorded = load_file(RECORDED / "training-1-0.safetensors")
    for name, value in build_model(MoE).state_dict().items():
        assert torch.equal(value, recorded[f"before/{name}"])
    compare([train_as_recorded(0, 1, stage)], recorded)


@pytest.mark.gloo
@pytest.mark.parametrize(("deepspeeds", "stage"), [(0, 0), (1, 3)])
def test_two_expert_parallel_ranks_train_as_deepspeeds_do(
    deepspeeds: int, stage: int, gloo: Callable[..., list[Any]]
) -> None:
    compare(gloo(2, train_as_recorded, stage), load_file(RECORDED / f"training-2-{deepspeeds}.safetensors"))


# Without random draws: ranks that are threads share one generator.
OPTIONS: dict[str, dict[str, Any]] = {
    "top1": {"k": 1, "capacity_factor": 0.7, "min_capacity": 1, "use_rts": False},
    "top1-residual": {"k": 1, "drop_tokens": False, "use_rts": False, "use_residual": True},
    "top2": {"k": 2, "capacity_factor": 0.5, "min_capacity": 1, "top2_2nd_expert_sampling": False},
    "top2-all": {"k": 2, "drop_tokens": False, "top2_2nd_expert_sampling": False},
    "top3": {"k": 3, "capacity_factor": 0.5, "min_capacity": 1},
}


def layer_of(ep_size: int, options: dict[str, Any]) -> MoE:
    """A layer whose experts differ, each with the values that it has for every ``ep_size``."""
    layer = MoE(WIDTH, TwoLinears(), EXPERTS, ep_size, **options)
    layer.set_deepspeed_parallelism()
    held = layer.deepspeed_moe.experts.deepspeed_experts.experts_held
    with torch.no_grad():
        for number, parameter in enumerate(p for p in layer.parameters() if not hasattr(p, "group_name")):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
        for expert, module in zip(held.ids, layer.deepspeed_moe.experts.deepspeed_experts, strict=True):
            generator = torch.Generator().manual_seed(100 + expert)
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return layer


def input_of(rank: int) -> torch.Tensor:
    x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(50 + rank))
    return x + (3.0 if rank == 1 else 0.0)  # routes that differ from rank to rank


def run(layer: MoE, rank: int) -> dict[str, torch.Tensor]:
    """Output, loss, counts and the gradient of the input, of one rank's tokens."""
    x = input_of(rank).requires_grad_()
    out, l_aux, counts = layer(x)
    ((out * torch.arange(out.numel()).view_as(out) / 50).sum() + l_aux).backward()
    assert x.grad is not None
    return {"out": out.detach(), "l_aux": l_aux.detach(), "counts": counts, "input": x.grad}


def gradients(layer: MoE) -> dict[str, torch.Tensor]:
    """By the name in the whole layer; every parameter has a gradient."""
    held = layer.deepspeed_moe.experts.deepspeed_experts.experts_held
    found = {}
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        if hasattr(parameter, "group_name"):
            before, _, after = name.partition("deepspeed_experts.")
            local, _, rest = after.partition(".")
            name = f"{before}deepspeed_experts.{held.ids[int(local)]}.{rest}"
        found[name] = parameter.grad
    return found


def on_ranks(ep_size: int, options: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    layer = layer_of(ep_size, options)
    return run(layer, current_world().rank), gradients(layer)


def with_all_experts(options: dict[str, Any]) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """What each rank's tokens give on one rank that holds all experts, and the sum of the gradients."""
    layer = layer_of(1, options)
    return [run(layer, rank) for rank in range(RANKS)], gradients(layer)


def summed(found: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    names = {name for each in found for name in each}
    return {name: torch.stack([each[name] for each in found if name in each]).sum(0) for name in names}


@pytest.mark.parametrize("ep_size", [1, 2, 4])
@pytest.mark.parametrize("case", OPTIONS)
def test_outputs_and_gradients_are_those_of_one_rank(case: str, ep_size: int, ranks: Callable[..., Any]) -> None:
    expected, expected_gradients = with_all_experts(OPTIONS[case])
    found = ranks(RANKS, on_ranks, ep_size, OPTIONS[case])
    for (result, _), one in zip(found, expected, strict=True):
        assert torch.equal(result["counts"], one["counts"])  # the same tokens are dropped
        for name in ("out", "l_aux", "input"):
            torch.testing.assert_close(result[name], one[name], rtol=1e-5, atol=1e-5, msg=name)
    total = summed([each for _, each in found])
    assert total.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(total[name], gradient, rtol=1e-5, atol=1e-5, msg=name)


def all_to_the_last(ep_size: int) -> list[float]:
    layer = layer_of(ep_size, {"k": 1, "drop_tokens": False, "use_rts": False})
    with torch.no_grad():
        layer.deepspeed_moe.gate.wg.weight[-1] = 100.0
    x = torch.rand(3, WIDTH)  # positive, so that the last expert has the highest score
    out, _, counts = layer(x)
    assert counts.tolist() == [0, 0, 0, 3]
    out.sum().backward()
    return [float(gradient.abs().sum()) for name, gradient in gradients(layer).items() if "deepspeed_experts" in name]


def test_experts_without_a_token_get_gradients_of_zeros(ranks: Callable[..., Any]) -> None:
    *others, last = ranks(4, all_to_the_last, 4)
    assert all(value == 0 for each in others for value in each)
    assert all(value > 0 for value in last)


def test_a_layer_that_has_no_ranks_yet_is_an_error() -> None:
    layer = MoE(WIDTH, TwoLinears(), EXPERTS, ep_size=2)
    with pytest.raises(UsageError, match="experts-without-ranks"):
        layer(torch.randn(3, WIDTH))


def train_with_a_bad_router(is_bad_on: int) -> str:
    rank = current_world().rank
    model = build_model(MoE)
    engine = shoal.initialize(model=model, config={**CONFIG, "gradient_accumulation_steps": 2})[0]
    router = model.blocks[2].deepspeed_moe.gate.wg.weight
    tokens = torch.randint(VOCABULARY, (3, 8))
    value = float(router.data[0, 0])
    if rank == is_bad_on:
        router.data[0, 0] = torch.nan
    engine.backward(engine(tokens))
    router.data[0, 0] = value
    engine.step()
    engine.backward(engine(tokens))
    with pytest.raises(NonFiniteError) as found:
        engine.step()
    engine.destroy()
    return str(found.value)


def test_nan_in_a_router_is_an_error_on_all_ranks_that_names_the_layer(ranks: Callable[..., Any]) -> None:
    for message in ranks(2, train_with_a_bad_router, 1):
        assert "the loss of rank 1 is not finite" in message
        assert "The router of 'blocks.2.deepspeed_moe.experts.deepspeed_experts' gave weights that are not" in message

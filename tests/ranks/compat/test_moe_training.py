"""Models with DeepSpeed's MoE layers, with dropped tokens: every layout trains as one process with all experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shoal.comm.world import current_world
from shoal.compat import finder
from shoal.parallel.expert.layer import MoE
from tests.fixtures.experts.cases import WIDTH, TwoLinears
from tests.helpers.models import VOCABULARY
from tests.helpers.training import GRADIENT_ORDERS, batch, config, make, sgd, start_with

STEPS, NUM_EXPERTS = 5, [4, 4, 8]  # a number per layer
# Without random draws: ranks that are threads share one generator.
LAYERS: list[dict[str, Any]] = [
    {"k": 1, "capacity_factor": 0.6, "min_capacity": 1, "use_rts": False, "use_residual": True},
    {"k": 2, "capacity_factor": 0.5, "min_capacity": 1, "top2_2nd_expert_sampling": False},
    {"k": 3, "drop_tokens": False},
]


class MoeModel(nn.Module):
    def __init__(self, ep_size: int = 1, recomputes: bool = False) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            [MoE(WIDTH, TwoLinears(), num, ep_size, **each) for num, each in zip(NUM_EXPERTS, LAYERS, strict=True)]
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x, balance = self.embedding(tokens), torch.zeros(())
        for block in self.blocks:
            out, l_aux, _ = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
            x, balance = x + out, balance + l_aux
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten()) + 0.01 * balance


def alone(num_ranks: int, optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] = sgd) -> dict[str, torch.Tensor]:
    """One process with all experts, which routes each rank's tokens by themselves."""
    model = make(MoeModel)
    stepped = optimizer(model.parameters())
    for step in range(STEPS):
        for rank in range(num_ranks):
            (model(*batch(step, rank, num_ranks)) / num_ranks).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        stepped.step()
        stepped.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def adamw(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """With an ``eps`` above what sums round in another order, which Adam would else divide by a tiny gradient."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4, weight_decay=0.1)


def train(engine: Any) -> dict[str, Any]:
    ranks = engine.axes.batch
    for step in range(STEPS):
        engine.backward(engine(*batch(step, ranks.rank, ranks.size)))
        engine.step()
    values = engine.module_state_dict()
    engine.destroy()
    return values


def assert_close(values: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    assert set(values) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(values[name].float(), value, rtol=1e-6, atol=1e-6, msg=name)


RECOMPUTED = {"recomputes": True}
TENSOR = {"tp": 2, "tp_plan": {"head": "vocab_head", "blocks.0.mlp": "replicate", "blocks.0.coefficient": "replicate"}}


@pytest.mark.parametrize(
    ("size", "ep", "stage", "model", "sections"),
    [
        (4, 1, 0, {}, {}),
        (4, 2, 0, {}, {}),
        (4, 4, 1, {}, {}),
        (4, 2, 2, RECOMPUTED, {}),
        (4, 1, 3, {}, {}),
        (4, 2, 3, RECOMPUTED, {}),
        (
            4,
            4,
            3,
            {},
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}},
        ),
        (4, 2, 1, {}, {"parallel": {"dp_replicate": 2}}),
        (4, 2, 2, {}, {"parallel": TENSOR}),
        (4, 4, 3, {}, {"parallel": TENSOR}),
    ],
)
def test_the_same_tokens_are_dropped_and_parameters_are_those_of_one_process(
    size: int, ep: int, stage: int, model: dict[str, Any], sections: dict[str, Any], ranks: Callable[..., Any]
) -> None:
    expected = alone(size // sections.get("parallel", {}).get("tp", 1))

    def rank() -> dict[str, Any]:
        settings = config(stage, gradient_clipping=0.5, **sections)
        return train(start_with(make(partial(MoeModel, ep, **model)), settings))

    for values in ranks(size, rank):
        assert_close(values, expected)


@pytest.mark.parametrize("order", GRADIENT_ORDERS, ids=" ".join)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ep", [1, 2])
def test_keys_of_how_gradients_are_reduced_train_layers_of_deepspeed_as_one_process(
    ep: int, stage: int, order: dict[str, Any], ranks: Callable[..., Any]
) -> None:
    expected = alone(2)

    def rank() -> dict[str, Any]:
        settings = config(stage, gradient_clipping=0.5, zero_optimization=order)
        return train(start_with(make(partial(MoeModel, ep)), settings))

    for values in ranks(2, rank):
        assert_close(values, expected)


@pytest.fixture
def deepspeed_alias() -> Iterator[None]:
    finder.install(children=False)
    yield
    finder.uninstall()


@pytest.mark.usefixtures("deepspeed_alias")
def test_a_script_of_deepspeed_that_groups_experts_itself_runs_unchanged(ranks: Callable[..., Any]) -> None:
    import deepspeed
    from deepspeed.moe.layer import MoE as Layer
    from deepspeed.moe.utils import (
        has_moe_layers,
        is_moe_param,
        is_moe_param_group,
        split_params_into_different_moe_groups_for_optimizer,
        split_params_into_shared_and_expert_params,
    )
    from deepspeed.utils import groups

    assert Layer is MoE
    expected = alone(4, adamw)

    def rank(*, config_has_optimizer: bool) -> tuple[Any, ...]:
        model = make(partial(MoeModel, 2))
        assert has_moe_layers(model) == (True, 4)
        shared, experts = split_params_into_shared_and_expert_params(list(model.parameters()))
        group = {"params": list(model.parameters()), "name": "parameters", "weight_decay": 0.1}
        parts = split_params_into_different_moe_groups_for_optimizer(group, max_group_size=1000)
        assert [is_moe_param_group(part) for part in parts] == [False] + [True] * (len(parts) - 1) and len(parts) > 2
        assert parts[0]["params"] == shared and [p for part in parts[1:] for p in part["params"]] == experts
        assert {part["name"] for part in parts[1:]} == {"ep_size_2"} and all(map(is_moe_param, experts))
        settings = config(2, gradient_clipping=0.5)
        if config_has_optimizer:
            settings["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4}}
            engine = deepspeed.initialize(model=model, model_parameters=parts, config=settings)[0]
        else:
            engine = deepspeed.initialize(model=model, optimizer=adamw(parts), config=settings)[0]
        assert engine.has_moe_layers and engine.num_experts == NUM_EXPERTS
        assert [layer.num_local_experts for layer in engine.moe_layers] == [2, 2, 4]
        assert [gate.k for gate in engine.gate_modules] == [1, 2, 3]
        made = engine.expert_parallel_group["ep_size_2"], engine.expert_data_parallel_group["ep_size_2"]
        assert made[0] is groups._get_expert_parallel_group("ep_size_2")
        assert made[1] is groups._get_expert_data_parallel_group_dict()["ep_size_2"]
        seen = (
            [group.size() for group in made],
            groups._get_expert_parallel_rank("ep_size_2"),
            groups._get_expert_data_parallel_rank("ep_size_2"),
            groups._get_expert_parallel_group_ranks("ep_size_2"),
            groups._get_expert_data_parallel_group_ranks("ep_size_2"),
            groups._get_expert_broadcast_src_rank("ep_size_2"),
            groups._get_expert_data_parallel_world_size("ep_size_1"),
            groups._get_max_expert_size_name(),
        )
        return train(engine), seen

    for config_has_optimizer in (False, True):
        found = ranks(4, partial(rank, config_has_optimizer=config_has_optimizer))
        for values, _ in found:
            assert_close(values, expected)
    assert [seen for _, seen in found] == [
        ([2, 2], 0, 0, [0, 1], [0, 2], 0, 4, "ep_size_2"),
        ([2, 2], 1, 0, [0, 1], [1, 3], 1, 4, "ep_size_2"),
        ([2, 2], 0, 1, [2, 3], [0, 2], 0, 4, "ep_size_2"),
        ([2, 2], 1, 1, [2, 3], [1, 3], 1, 4, "ep_size_2"),
    ]


@pytest.mark.usefixtures("deepspeed_alias")
def test_tokens_of_tensor_parallel_ranks_are_divided_and_gathered(ranks: Callable[..., Any]) -> None:
    from deepspeed.moe.mappings import drop_tokens, gather_tokens

    def rank() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        engine = start_with(make(MoeModel), config(0, parallel=TENSOR))
        x = torch.arange(8.0).view(2, 4).requires_grad_()
        part = drop_tokens(x, dim=1)
        whole = gather_tokens(part * 2, dim=1)
        (whole * torch.arange(8.0).view(2, 4)).sum().backward()
        engine.destroy()
        return part.detach(), whole.detach(), x.grad

    for number, (part, whole, gradient) in enumerate(ranks(2, rank)):
        x = torch.arange(8.0).view(2, 4)
        assert torch.equal(part, x[:, 2 * number : 2 * number + 2])
        assert torch.equal(whole, 2 * x) and torch.equal(gradient, 2 * x)
    assert current_world().mesh.tp == 1
    x = torch.ones(3)
    assert drop_tokens(x) is x and gather_tokens(x) is x

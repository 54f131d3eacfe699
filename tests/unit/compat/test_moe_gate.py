"""The gates against real DeepSpeed's (tests/fixtures/experts): same tokens, weights, losses, counts and gradients."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from shoal.errors import AssertedUsageError, ConfigError, UsageError
from shoal.parallel.expert import gate as gates
from shoal.parallel.expert.gate import capacity_of, gumbel, jitter, positions, top1gating, top2gating, topkgating
from shoal.parallel.expert.held import first_bad_router
from shoal.parallel.expert.layer import Experts, MoE, TopKGate
from tests.fixtures.experts.cases import EXPERTS, GATES, TOKENS, WIDTH, call_gate, logits_of, used_tokens
from tests.helpers.places import FIXTURES

RECORDED = FIXTURES / "experts" / "gates.safetensors"

route_top1, route_top2, route_topk = (
    partial(function, sparse_routes=True) for function in (top1gating, top2gating, topkgating)
)


@pytest.fixture(scope="module")
def recorded() -> dict[str, torch.Tensor]:
    return load_file(RECORDED)


@pytest.mark.parametrize("case", GATES)
def test_a_gate_computes_what_deepspeeds_does(case: str, recorded: dict[str, torch.Tensor]) -> None:
    found = call_gate(gates, case)
    for name in ("counts", "mask"):
        assert torch.equal(found[name], recorded[f"{case}/{name}"]), name
    for name in ("l_aux", "combine", "grad"):
        torch.testing.assert_close(found[name], recorded[f"{case}/{name}"], rtol=1e-6, atol=1e-6)


def test_a_case_drops_tokens_or_does_not_as_its_name_says(recorded: dict[str, torch.Tensor]) -> None:
    is_dropping = {case: bool(recorded[f"{case}/mask"].sum() < recorded[f"{case}/counts"].sum()) for case in GATES}
    assert not any(is_dropping[case] for case in ("top1-all", "top1-all-used", "top2-all", "top3-all"))
    assert all(is_dropping[case] for case in ("top1-half", "top1-equal", "top2-half", "top3-half", "top3-equal"))


@pytest.mark.parametrize("route", ["top1", "top2", "topk"])
def test_a_dropped_token_has_no_expert_and_no_weight(route: str) -> None:
    logits = logits_of("skewed")
    routing = {
        "top1": lambda: route_top1(logits, 0.5, 1),
        "top2": lambda: route_top2(logits, 0.5, 1),
        "topk": lambda: route_topk(logits, 3, 0.5, 1),
    }[route]()
    is_dropped = routing.expert_index < 0
    assert is_dropped.any() and not is_dropped.all()
    assert (routing.weights[is_dropped] == 0).all() and (routing.weights[~is_dropped] > 0).all()
    kept = torch.bincount(routing.expert_index[~is_dropped], minlength=EXPERTS)
    assert torch.equal(kept, routing.exp_counts.clamp(max=routing.capacity))


@pytest.mark.parametrize("num_tokens", [0, 1])
@pytest.mark.parametrize("drop_tokens", [True, False])
def test_a_rank_may_have_one_token_or_none(num_tokens: int, drop_tokens: bool) -> None:
    logits = logits_of("plain")[:num_tokens]
    for routing in (
        route_top1(logits, 1.0, 4, drop_tokens=drop_tokens),
        route_top2(logits, 1.0, 4, drop_tokens),
        route_topk(logits, 3, 1.0, 4, drop_tokens),
    ):
        assert (routing.expert_index >= 0).all() and len(routing.expert_index) == num_tokens
        assert routing.exp_counts.sum() == routing.expert_index.numel()
        assert bool(routing.l_aux > 0) == (num_tokens > 0)


def test_random_selection_keeps_each_token_of_an_expert_equally_often() -> None:
    logits = torch.zeros(20, 2)
    logits[:, 0] = 1.0
    draws = torch.stack([route_top1(logits, 0.5, 1).expert_index.view(-1) >= 0 for _ in range(2000)]).float()
    assert (draws.sum(dim=1) == 5).all()
    assert (draws.mean(dim=0) - 0.25).abs().max() < 0.05  # 5 standard deviations


def test_noise_has_the_moments_of_its_distribution() -> None:
    noise = gumbel(torch.zeros(200_000))
    assert noise.isfinite().all()
    assert abs(float(noise.mean()) - 0.57722) < 0.02 and abs(float(noise.var()) - torch.pi**2 / 6) < 0.04
    factors = jitter(torch.ones(100_000))
    assert factors.min() >= 0.99 and factors.max() <= 1.01 and abs(float(factors.mean()) - 1) < 1e-4


def test_the_capacity_is_rounded_up_in_fp32() -> None:
    assert capacity_of(40, 4, 1.1, 4) == 11  # 10 * 1.1 is 11.000000000000002 in fp64
    assert capacity_of(41, 4, 1.0, 4) == 11
    assert capacity_of(4, 4, 1.0, 4) == 4
    assert positions(torch.tensor([2, -1, 2, 0, -1, 2]), 3)[[0, 2, 3, 5]].tolist() == [0, 1, 0, 2]


def test_noise_is_added_while_training_only() -> None:
    x = torch.randn(TOKENS, WIDTH)
    for options in ({"noisy_gate_policy": "Jitter"}, {"noisy_gate_policy": "RSample"}):
        gate = TopKGate(WIDTH, EXPERTS, drop_tokens=False, use_rts=False, **options)
        plain = TopKGate(WIDTH, EXPERTS, drop_tokens=False, use_rts=False)
        plain.load_state_dict(gate.state_dict())
        indexes = [gate(x * 1e-3, None, True).expert_index for _ in range(20)]
        weights = [gate(x, None, True).weights for _ in range(2)]
        assert any(not torch.equal(indexes[0], other) for other in indexes) or not torch.equal(*weights)
        gate.eval(), plain.eval()
        assert torch.equal(gate(x)[1], plain(x)[1])


def test_capacity_factors_of_training_and_evaluation_are_two() -> None:
    gate = TopKGate(WIDTH, EXPERTS, k=2, capacity_factor=1.0, eval_capacity_factor=2.0, min_capacity=1)
    x = torch.randn(40, WIDTH)
    assert gate(x, None, True).capacity == 20 and gate(x)[1].shape == (40, EXPERTS, 20)
    assert gate.eval()(x, None, True).capacity == 40


def test_used_token_of_a_gate_that_does_not_read_it_is_a_warning() -> None:
    gate = TopKGate(WIDTH, EXPERTS, k=2)
    with pytest.warns(UserWarning, match="used_token has no effect with k=2"):
        gate(torch.randn(TOKENS, WIDTH), used_tokens())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_experts": 2, "k": 3}, UsageError, "3 of 2 experts"),
        ({"num_experts": 2, "k": "2"}, UsageError, "'2' of 2 experts"),
        ({"num_experts": 2, "k": True}, UsageError, "True of 2 experts"),
        ({"num_experts": 2, "capacity_factor": float("inf")}, UsageError, "capacity_factor=inf is not a number"),
        ({"num_experts": 2, "eval_capacity_factor": 0, "min_capacity": 0}, UsageError, "every token is dropped"),
        ({"num_experts": 2, "capacity_factor": -1.0}, UsageError, "capacity_factor=-1.0 is not a number from 0"),
        ({"num_experts": 2, "min_capacity": "4"}, UsageError, "min_capacity='4' is not a number from 0"),
        ({"num_experts": 2, "noisy_gate_policy": "Noise"}, AssertedUsageError, "'Noise' is not known"),
        ({"num_experts": 6, "ep_size": 4}, ConfigError, "6 experts cannot be divided among 4"),
        ({"num_experts": [4, 8]}, ConfigError, r"the number of experts of a layer is \[4, 8\]"),
        ({"num_experts": 4, "ep_size": 0}, ConfigError, "the number of expert-parallel ranks is 0"),
    ],
)
def test_options_that_cannot_work_are_errors(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MoE(WIDTH, nn.Linear(WIDTH, WIDTH), **options)


def test_experts_are_copies_with_deepspeeds_marks() -> None:
    layer = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=6, ep_size=3, use_residual=True)
    experts = layer.deepspeed_moe.experts.deepspeed_experts
    assert len(experts) == layer.num_local_experts == layer.deepspeed_moe.num_local_experts == 2
    assert layer.expert_group_name == layer.deepspeed_moe.ep_group_name == "ep_size_3"
    assert torch.equal(experts[0].weight, experts[1].weight) and experts[0].weight is not experts[1].weight
    assert {(p.allreduce, p.group_name) for p in experts.parameters()} == {(False, "ep_size_3")}
    assert not any(hasattr(p, "allreduce") for p in (layer.deepspeed_moe.gate.wg.weight, *layer.mlp.parameters()))


def test_experts_take_deepspeeds_buffer_too() -> None:
    experts = Experts(nn.Linear(WIDTH, WIDTH), 2)
    with torch.no_grad():
        experts.deepspeed_experts[1].weight.zero_()
    buffer = torch.randn(3, 2, 5, WIDTH)  # ranks, experts, capacity, width
    out = experts(buffer)
    torch.testing.assert_close(out[:, 0], experts.deepspeed_experts[0](buffer[:, 0]))
    torch.testing.assert_close(out[:, 1], experts.deepspeed_experts[1](buffer[:, 1]))


def test_a_layer_that_has_run_can_be_copied_and_pickled() -> None:
    layer = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=2)
    _, l_aux, counts = layer(torch.randn(3, 5, WIDTH))
    assert layer.deepspeed_moe.l_aux is l_aux and layer.deepspeed_moe.exp_counts is counts
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):  # noqa: S301 - made on this line
        assert other.deepspeed_moe.l_aux is None
        assert torch.equal(other.deepspeed_moe.gate.wg.weight, layer.deepspeed_moe.gate.wg.weight)


def test_a_router_that_gives_nan_is_found_by_name() -> None:
    model = nn.Sequential(MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 2), MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 2))
    x = torch.randn(3, 5, WIDTH)
    for layer in model:
        layer(x)
    assert first_bad_router(model) is None
    model[1](x * torch.nan)
    model[1](x)  # a later micro-batch that is finite
    assert first_bad_router(model) == "1.deepspeed_moe.experts.deepspeed_experts"
    assert first_bad_router(model) is None

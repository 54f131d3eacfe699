"""Balance without an auxiliary loss: a bias of each expert that takes part in the selection only."""

from __future__ import annotations

import torch
from torch import nn

from shoal.build.materialize import widen
from shoal.config.parallel import ExpertParallel
from shoal.models import GPTConfig
from shoal.parallel.expert.apply import prepare_experts
from shoal.parallel.expert.bias import add_bias, bias_of, imbalance, update_bias
from shoal.parallel.expert.losses import tokens_per_expert
from shoal.parallel.expert.stacked import ExpertFeedForward

EXPERTS = 6


def test_a_step_moves_each_bias_against_the_load() -> None:
    bias = torch.tensor([0.0, 1.0, 0.0, 0.0])
    update_bias(bias, torch.tensor([9, 3, 0, 4]), 0.25)
    assert bias.tolist() == [-0.25, 1.25, 0.25, 0.0]
    stacked = torch.zeros(1, 4)
    update_bias(stacked, torch.tensor([9, 3, 0, 4]), 0.25)
    assert stacked.tolist() == [[-0.25, 0.25, 0.25, 0.0]]


def test_biases_balance_a_router_that_prefers_some_experts() -> None:
    generator = torch.Generator().manual_seed(0)
    preference = torch.linspace(0, 0.5, EXPERTS)
    bias, loads = torch.zeros(EXPERTS), []
    for _ in range(200):
        scores = (torch.randn(256, EXPERTS, generator=generator) + preference).sigmoid()
        loads.append(tokens_per_expert((scores + bias).topk(2).indices, EXPERTS))
        update_bias(bias, loads[-1], 0.005)
    assert imbalance(loads[0]) > 1.3
    assert imbalance(sum(loads[-20:])) < 1.05


def test_the_bias_of_a_layer_is_found_by_its_name_and_size() -> None:
    layer = nn.ModuleDict({"gate": nn.Linear(4, EXPERTS), "experts": nn.Linear(4, 4)})
    assert bias_of(layer, EXPERTS) is None
    layer["gate"].register_buffer("e_score_correction_bias", torch.zeros(EXPERTS))
    assert bias_of(layer, EXPERTS) is layer["gate"].e_score_correction_bias
    assert bias_of(layer, EXPERTS + 1) is None


def test_the_bias_stays_in_fp32_beside_16_bit_parameters() -> None:
    gate = nn.Linear(4, EXPERTS)
    bias = add_bias(gate, EXPERTS)
    assert bias_of(gate, EXPERTS) is bias
    assert "expert_bias" in gate.state_dict()
    gate.to(torch.bfloat16)
    widen(gate, torch.bfloat16)
    assert gate.expert_bias.dtype == torch.float32


def test_the_bias_of_shoals_gpt_chooses_and_does_not_weigh() -> None:
    layer = ExpertFeedForward(GPTConfig(16, 4, 1, 8, 2, num_experts=4, experts_per_token=2))
    model, hidden = torch.nn.Sequential(layer), torch.randn(5, 8)
    prepare_experts(model, None, ExpertParallel(load_balance_coeff=0.1))
    bias = bias_of(layer.router, 4)
    assert bias is not None
    bias += torch.tensor([0.0, 10.0, 0.0, 10.0])
    probabilities = layer.router(hidden).softmax(-1)[:, [1, 3]]
    outputs = [
        torch.nn.functional.gelu(hidden @ layer.experts.up[expert], approximate="tanh") @ layer.experts.down[expert]
        for expert in (1, 3)
    ]
    weights = probabilities / probabilities.sum(-1, keepdim=True)
    torch.testing.assert_close(layer(hidden)[0], weights[:, :1] * outputs[0] + weights[:, 1:] * outputs[1])


def test_the_imbalance_is_the_largest_load_over_the_mean() -> None:
    assert imbalance(torch.tensor([6, 2, 0, 0])) == 3.0
    assert imbalance(torch.zeros(4)) == 1.0

"""The products of experts that a simulated GPU computes: one of all of them, where torch has such a kernel."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import shoal
from shoal.models import GPT, GPTConfig
from shoal.parallel.expert.stacked import ExpertFeedForward
from tests.helpers.dry_runs import take_steps

SHAPE = GPTConfig(
    vocab_size=512, sequence_length=64, num_layers=2, hidden_size=256, num_heads=4, num_experts=16, experts_per_token=2
)
LINEARS = 2 * SHAPE.num_layers
PRODUCTS = 3  # forward, and the gradients of rows and weights


def products_of(machine: str, **sections: Any) -> Counter[str]:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW"},
        "parallel": {"ep": 2},
        **sections,
    }
    with shoal.dry_run(8, machine=machine) as run:
        engine, *_ = shoal.initialize(model=GPT(SHAPE, experts=ExpertFeedForward), config=config)
        take_steps(run, engine, torch.zeros(1, 64, dtype=torch.long), 1)
        start = len(run._times.operations)
        take_steps(run, engine, torch.zeros(1, 64, dtype=torch.long), 1)
        names = [each.name for each in run._times.operations[start:]]
        engine.destroy()
    return Counter(name.split(".")[1] for name in names if name.endswith((".default", ".out")) and "mm" in name)


@pytest.mark.parametrize("machine", ["h100", "b200"])
def test_experts_are_multiplied_by_one_product(machine: str) -> None:
    products = products_of(machine)
    assert products["_grouped_mm"] == PRODUCTS * LINEARS
    few_bits = products_of(machine, fp8={"recipe": "rowwise"})
    assert few_bits["_scaled_grouped_mm"] == PRODUCTS * LINEARS and not few_bits["_grouped_mm"]
    of_weights_in_16 = products_of(machine, fp8={"recipe": "rowwise_with_gw_hp"})
    assert (of_weights_in_16["_scaled_grouped_mm"], of_weights_in_16["_grouped_mm"]) == (2 * LINEARS, LINEARS)


def test_other_gpus_and_recipes_have_a_product_for_each() -> None:
    of_experts = PRODUCTS * LINEARS * SHAPE.num_experts // 2
    assert products_of("a100-80g")["mm"] > of_experts
    few_bits = products_of("h100", fp8={"recipe": "blockwise"})
    assert few_bits["_scaled_mm_v2"] > of_experts and not few_bits["_scaled_grouped_mm"]

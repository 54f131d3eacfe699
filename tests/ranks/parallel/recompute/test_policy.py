"""Recomputed blocks that communicate, by each policy: the same bits as without recomputation."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch

import shoal
from shoal.comm.threads import run_ranks
from shoal.models import GPT, GPTConfig
from shoal.parallel.expert.stacked import ExpertFeedForward

torch.manual_seed(0)
SHAPE: Any = {"vocab_size": 32, "sequence_length": 8, "num_layers": 2, "hidden_size": 16, "num_heads": 2}
MODELS = {
    "dense": GPT(GPTConfig(**SHAPE)),
    "experts": GPT(GPTConfig(**SHAPE, num_experts=4), experts=ExpertFeedForward),
}
EP = {"parallel": {"ep": 2}, "expert_parallel": {"enabled": True}}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "experts of one rank": ("experts", 1, {}),
    "ep": ("experts", 2, EP),
    "ep, stage 3": ("experts", 2, {**EP, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}),
    "ep inside tp": ("experts", 2, {**EP, "parallel": {"ep": 2, "tp": 2}}),
    "tp": ("dense", 2, {"parallel": {"tp": 2}}),
    "tp, sequence parallel": ("dense", 2, {"parallel": {"tp": 2, "tp_sequence_parallel": True}}),
    "tp, overlapped": ("dense", 2, {"parallel": {"tp": 2}, "tensor_parallel": {"tp_overlap_comm": True}}),
    "tp, sequence parallel and overlapped": (
        "dense",
        2,
        {"parallel": {"tp": 2, "tp_sequence_parallel": True}, "tensor_parallel": {"tp_overlap_comm": True}},
    ),
    "tp, overlapped, stage 3": (
        "dense",
        4,
        {
            "parallel": {"tp": 2},
            "tensor_parallel": {"tp_overlap_comm": True},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        },
    ),
    "sp": ("dense", 2, {"parallel": {"sp": 2}}),
    "cp": ("dense", 2, {"parallel": {"cp": 2}}),
    "cp of experts": ("experts", 2, {"parallel": {"cp": 2}}),
}


def train(name: str, settings: dict[str, Any], section: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "activation_checkpointing": section,
        **settings,
    }
    engine: Any = shoal.initialize(model=copy.deepcopy(MODELS[name]), config=config)[0]
    losses = []
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + engine.axes.batch.rank)
        context = engine.sequence_context or shoal.SequenceContext()
        tokens = context.shard(torch.randint(32, (2, 8), generator=generator))
        loss = engine(tokens, tokens)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    values = engine.module_state_dict()
    engine.destroy()
    return losses, values


@cache
def run_plain(layout: str) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """Without recomputation."""
    name, num_ranks, settings = LAYOUTS[layout]
    return run_ranks(num_ranks, train, name, settings, {})


LISTED = ["mm", "addmm", "bmm", "cat", "clone", "_to_copy"]


@pytest.mark.parametrize("policy", ["block", "matmul", LISTED], ids=["block", "matmul", "list"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_recomputed_blocks_that_communicate_give_the_same_bits(layout: str, policy: Any) -> None:
    name, num_ranks, settings = LAYOUTS[layout]
    plain = run_plain(layout)
    again = run_ranks(num_ranks, train, name, settings, {"modules": ["Block"], "policy": policy})
    for (losses, values), (other_losses, other_values) in zip(plain, again, strict=True):
        assert other_losses == losses
        assert all(torch.equal(other_values[key], value) for key, value in values.items())


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.startswith("tp")])
def test_recomputed_parts_of_blocks_whose_input_entered_before_them_give_the_same_bits(layout: str) -> None:
    name, num_ranks, settings = LAYOUTS[layout]
    plain = run_plain(layout)
    again = run_ranks(num_ranks, train, name, settings, {"modules": ["Attention", "FeedForward"]})
    for (losses, values), (other_losses, other_values) in zip(plain, again, strict=True):
        assert other_losses == losses
        assert all(torch.equal(other_values[key], value) for key, value in values.items())

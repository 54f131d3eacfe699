"""Layers of experts in compiled blocks: one graph for equal blocks, with bits and collectives of uncompiled ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.models import GPT
from shoal.parallel.expert.layer import MoE
from shoal.parallel.expert.stacked import ExpertFeedForward
from tests.helpers.compiling import CountsGraphs, compiling, overwriting
from tests.helpers.expert_layers import WIDTH, Layers
from tests.helpers.training import batch, config, make, sgd, start_with
from tests.ranks.parallel.expert.test_gpt import SHAPE

RANKS, STEPS = 2, 2
Trained = tuple[list[tuple[str, str, int]], list[float], dict[str, torch.Tensor]]


class Block(nn.Module):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        expert = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, WIDTH))
        self.moe = MoE(WIDTH, expert, 4, RANKS, **options)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, loss, _ = self.moe(self.norm(x))
        return x + out, loss


class Gated(nn.Module):
    """DeepSpeed's layers, with their losses."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(options) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, total = self.first(x), x.new_zeros(())
        for block in self.blocks:
            x, loss = block(x)
            total = total + 0.1 * loss
        return x.square().mean() + total


class Named(nn.Module):
    """Layers that Shoal finds by their names."""

    def __init__(self, family: str) -> None:
        super().__init__()
        made = Layers(family).float()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.config, self.layers = made.config, made.layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.tanh().square().mean()


def gpt() -> nn.Module:
    return GPT(SHAPE, experts=ExpertFeedForward)


def hidden_of(step: int, rank: int) -> list[torch.Tensor]:
    return [torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(9 * step + rank))]


def tokens_of(step: int, rank: int) -> list[torch.Tensor]:
    return [each[:, :4] for each in batch(step, rank, RANKS)]


Case = tuple[Callable[[], nn.Module], Callable[[int, int], Any], str, dict[str, Any]]
BY_NAME = {"expert_parallel": {"enabled": True}, "parallel": {"ep": RANKS}}
CASES: dict[str, Case] = {
    "GPT": (gpt, tokens_of, "blocks", {"parallel": {"ep": RANKS}}),
    "GPT over sp": (gpt, tokens_of, "blocks", {"parallel": {"sp": RANKS}}),
    "one expert a token": (
        partial(Gated, {"k": 1, "capacity_factor": 0.5, "use_rts": False, "use_residual": True}),
        hidden_of,
        "blocks",
        {},
    ),
    "three experts a token, none dropped": (partial(Gated, {"k": 3, "drop_tokens": False}), hidden_of, "blocks", {}),
    "stacked": (partial(Named, "transposed with biases"), hidden_of, "layers", BY_NAME),
    "listed, with a shared one": (partial(Named, "qwen2_moe"), hidden_of, "layers", BY_NAME),
}


@pytest.mark.parametrize("case", CASES)
def test_blocks_are_one_graph_and_end_to_the_bit_as_uncompiled(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    factory, inputs, blocks, sections = CASES[case]
    backend, compile_ = CountsGraphs(overwriting), torch.compile
    how: dict[str, Any] = {"backend": backend, "dynamic": False, "fullgraph": True}
    monkeypatch.setattr(torch, "compile", lambda function, *, mode: compile_(function, **how))

    def job(**more: Any) -> Trained:
        engine = start_with(make(factory), config(3, units={"names": [f"{blocks}.*"]}, **sections, **more), sgd)
        losses = []
        with current_world().recorder.recording() as entries:
            for step in range(STEPS):
                given, context = inputs(step, engine.axes.batch.rank), engine.sequence_context
                if context is not None:
                    engine.module.attend_by(shoal.attention)
                    given = [*map(context.shard, given), context.positions(4)]
                loss = engine(*given)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
        parameters = engine.module_state_dict()
        engine.destroy()
        return sorted((entry.op, entry.label, entry.nbytes) for entry in entries), losses, parameters

    with compiling():
        compiled = run_ranks(RANKS, lambda: job(compile={"enabled": True}))
    assert 1 <= backend.num_graphs <= RANKS  # not one for each block
    for mine, plain in zip(compiled, run_ranks(RANKS, job), strict=True):
        assert mine[:2] == plain[:2]
        assert all(torch.equal(value, plain[2][name]) for name, value in mine[2].items())


def test_a_compiled_copy_of_a_model_runs_its_own_experts() -> None:
    engine = start_with(make(gpt), config(0), sgd)
    copied = copy.deepcopy(engine.module)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(1.5)
    inputs = tokens_of(0, 0)
    expected = copied(*inputs)
    with compiling():
        copied.compile(backend="eager")
        assert torch.equal(copied(*inputs), expected)
    engine.destroy()

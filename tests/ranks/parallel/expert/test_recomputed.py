"""Experts that are recomputed: their ranks exchange the numbers of rows once a forward, whatever recomputes them."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.models import GPT
from shoal.parallel.expert.stacked import ExpertFeedForward
from tests.helpers.compiling import compiling, overwriting
from tests.helpers.training import batch, config, make, sgd, start_with
from tests.ranks.parallel.expert.test_gpt import SHAPE

RANKS, STEPS, FORWARDS = 2, 2, 2 * SHAPE.num_layers
# Operations that the exchange of the rows runs, or a check in the first forward: they are none of a policy's.
OPERATIONS = ["add", "cat", "clone", "empty", "eq", "mul", "stack", "sum", "_to_copy", "aminmax", "all", "mm"]
Collectives = Counter[str]
Trained = tuple[Collectives, list[float], dict[str, torch.Tensor]]


def gpt() -> nn.Module:
    return GPT(SHAPE, experts=ExpertFeedForward)


class Around(nn.Module):
    """A block that the model itself gives to torch's function."""

    def __init__(self, block: nn.Module, *, use_reentrant: bool) -> None:
        super().__init__()
        self.block = block
        self.use_reentrant = use_reentrant

    def forward(self, *args: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=self.use_reentrant)


def checkpointed(**options: Any) -> nn.Module:
    model = gpt()
    for at, block in enumerate(model.blocks):
        model.blocks[at] = Around(block, **options)
    return model


BLOCKS = {"modules": ["Block"]}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "block": (gpt, BLOCKS),
    "matmul": (gpt, {**BLOCKS, "policy": "matmul"}),
    "operations": (gpt, {**BLOCKS, "policy": OPERATIONS}),
    "host": (gpt, {**BLOCKS, "cpu_checkpointing": True}),
    "torch's": (partial(checkpointed, use_reentrant=False), {}),
    "torch's, reentrant": (partial(checkpointed, use_reentrant=True), {}),
}


def train(factory: Any, recompute: dict[str, Any], *, is_compiled: bool = False) -> Trained:
    more: dict[str, Any] = {"activation_checkpointing": recompute} if recompute else {}
    engine = start_with(make(factory), config(2, parallel={"ep": RANKS}, **more), sgd)
    if is_compiled:
        for block in engine.module.blocks:
            getattr(block, "block", block).compile(backend=overwriting, dynamic=False)
    losses = []
    with current_world().recorder.recording() as entries:
        for step in range(STEPS):
            loss = engine(*batch(step, engine.axes.batch.rank, RANKS))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    parameters = {name.replace("block.", ""): value for name, value in engine.module_state_dict().items()}
    engine.destroy()
    return Counter(entry.label.replace("block.", "") for entry in entries), losses, parameters


@pytest.fixture(scope="module")
def plain() -> list[Trained]:
    return run_ranks(RANKS, lambda: train(gpt, {}))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_bits_are_those_without_recomputation_and_rows_are_exchanged_once(
    case: str, is_compiled: bool, plain: list[Trained]
) -> None:
    with compiling() if is_compiled else nullcontext():
        results = run_ranks(RANKS, lambda: train(*CASES[case], is_compiled=is_compiled))
    for (found, *values), (expected, *wanted) in zip(results, plain, strict=True):
        again = {"experts dispatch", "experts combine"}
        assert expected["experts' rows"] == FORWARDS
        assert found == {label: (1 + (label in again)) * number for label, number in expected.items()}
        assert values[0] == wanted[0]
        assert all(torch.equal(value, wanted[1][name]) for name, value in values[1].items())

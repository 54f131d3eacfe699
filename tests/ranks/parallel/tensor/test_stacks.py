"""Layers with a split sequence, called in any order: parity, and what is an error."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoal.comm.threads import run_ranks
from shoal.errors import UsageError
from shoal.parallel.tensor import parallelize
from tests.helpers.tensor_cases import Outputs, compare, randomize, tp_communicator

HIDDEN, LENGTH = 12, 8
PLAN = {"up": "column", "down": "row"}
INPUT = torch.randn(2, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(1))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 20), nn.Linear(20, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(self.up(self.norm(x)).relu())
        return out


class Layers(nn.Module):
    """Three layers, called in a given order."""

    def __init__(self, order: str, *, is_recomputed: bool = False, is_shared: bool = False) -> None:
        super().__init__()
        self.order, self.is_recomputed = order, is_recomputed
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        if is_shared:
            self.layers[2] = self.layers[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for letter in self.order:
            layer = self.layers[int(letter)]
            x = checkpoint(layer, x, use_reentrant=False) if self.is_recomputed else layer(x)
        return x


def forward(model: nn.Module) -> Outputs:
    output = model(INPUT)
    return {"output": output, "loss": output.square().mean()}


# by the order of calls: the spans and single layers, each of which gathers its output once
ORDERS = {"012": 1, "0120": 2, "0121": 2, "0122": 2, "012012": 4, "0012": 1, "12": 2, "210": 3, "01210": 3}


@pytest.mark.parametrize("order", ORDERS)
def test_layers_in_any_order_compute_what_one_rank_does(order: str) -> None:
    for calls in compare(randomize(Layers(order)), forward, 2, plan=PLAN, sequence_parallel=True):
        assert Counter(call.label for call in calls)["layers out"] == ORDERS[order]


def test_a_layer_that_stands_first_and_last_computes_what_one_rank_does() -> None:
    compare(randomize(Layers("012", is_shared=True)), forward, 2, plan=PLAN, sequence_parallel=True)


def test_layers_that_a_function_around_them_recomputes_run_once_each() -> None:
    compare(randomize(Layers("012", is_recomputed=True)), forward, 2, plan=PLAN, sequence_parallel=True)


def test_what_would_compute_with_split_sequences_is_an_error() -> None:
    def on_a_rank() -> None:
        def split(order: str, *, is_recomputed: bool = False) -> nn.Module:
            model = randomize(Layers(order, is_recomputed=is_recomputed))
            parallelize(model, tp_communicator(), PLAN, sequence_parallel=True)
            return model

        with pytest.raises(UsageError, match=r"layers\.0 was called, and layers\.2,.*was not called after it"):
            split("01")(INPUT)
        with pytest.raises(UsageError, match="a module inside a layer was called"):
            split("012").layers[1].up(INPUT)
        output = split("0121", is_recomputed=True)(INPUT)
        with pytest.raises(UsageError, match="recomputed one by one by a function around them"):
            output.sum().backward()

    run_ranks(2, on_a_rank)

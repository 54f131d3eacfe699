"""Split blocks under `torch.compile`: which collectives are operators of graphs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.mesh import Mesh
from shoal.models.gpt import GPT, GPTConfig
from shoal.parallel.tensor import parallelize
from tests.helpers.compiling import compiling


class Counting:
    """A backend that counts the collectives of its graphs."""

    num_moves = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            self.num_moves += sum(node.target is torch.ops.shoal.move.default for node in graph.graph.nodes)
            return graph

        return aot_autograd(fw_compiler=count)(graph, inputs)


def model_of(num_heads: int) -> nn.Module:
    torch.manual_seed(0)
    return GPT(GPTConfig(64, 8, 2, 8 * num_heads, num_heads, False))


@pytest.mark.parametrize(("num_heads", "has_moves"), [(4, True), (3, False)])
def test_collectives_of_unequal_parts_are_no_operators_of_a_graph_which_ranks_would_order_differently(
    num_heads: int, has_moves: bool
) -> None:
    tokens = torch.arange(16).view(2, 8)
    made = model_of(num_heads)
    whole = copy.deepcopy(made)
    whole(tokens).square().sum().backward()
    expected = [block.attention_norm.weight.grad for block in whole.blocks]
    counting = Counting()

    def job() -> None:
        model = copy.deepcopy(made)
        comm = current_world().communicator("tp", Mesh(tp=2))
        parallelize(model, comm, sequence_parallel=True)
        for block in model.blocks:
            block.compile(backend=counting, dynamic=False)
        model(tokens).square().sum().backward()
        for block, gradient in zip(model.blocks, expected, strict=True):
            total = comm.gathered(block.attention_norm.weight.grad, label="test").sum(0)
            torch.testing.assert_close(total, gradient)

    with compiling():
        run_ranks(2, job)
    assert (counting.num_moves > 0) == has_moves

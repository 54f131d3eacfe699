"""Blocks under `torch.compile`, at every stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shoal.comm.threads import run_ranks
from tests.ranks import models
from tests.ranks.training import config, finish, largest_difference, run_steps, start, train_alone

CRASHES_IN_THREADS = (
    "older torch crashes where several threads compile at once, as ranks that are threads do"
    if torch.torch_version.TorchVersion(torch.__version__) < (2, 13)
    else ""
)
pytestmark = pytest.mark.skipif(bool(CRASHES_IN_THREADS), reason=CRASHES_IN_THREADS)


class CountsGraphs:
    """A backend that counts what it is asked to compile."""

    def __init__(self, inner: str) -> None:
        self.num_graphs = 0
        self._inner = inner

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        from torch._dynamo.backends.registry import lookup_backend

        self.num_graphs += 1
        return lookup_backend(self._inner)(graph, inputs)


def compiled_blocks(backend: CountsGraphs, how: str) -> nn.Module:
    """More blocks than torch keeps graphs of one function: they must share."""
    model = models.Plain(num_blocks=10)
    for index, block in enumerate(model.blocks):
        if how == "in place":
            block.compile(backend=backend, dynamic=False)
        else:
            model.blocks[index] = torch.compile(block, backend=backend, dynamic=False)
    return model


@pytest.mark.filterwarnings("ignore")  # torch.compile reads .grad of tensors that have none
@pytest.mark.parametrize("how", ["wrapped", "in place"])
@pytest.mark.parametrize(
    ("backend", "world", "stage"),
    [("eager", 2, 0), ("eager", 2, 1), ("eager", 2, 2), ("eager", 2, 3), ("aot_eager", 2, 3), ("aot_eager", 1, 3)],
)
def test_compiled_blocks_train_alike_and_are_not_compiled_again_after_the_second_step(
    backend: str, world: int, stage: int, how: str
) -> None:
    alone = train_alone(lambda: models.Plain(num_blocks=10), world=world, steps=5)
    counting = CountsGraphs(backend)

    def job() -> tuple[dict[str, torch.Tensor], int, int]:
        engine = start(lambda: compiled_blocks(counting, how), config(stage))
        run_steps(engine, 2)
        after_two_steps = counting.num_graphs
        run_steps(engine, 3, first=2)
        return finish(engine, []).parameters, after_two_steps, counting.num_graphs

    torch._dynamo.reset()
    try:
        results = run_ranks(world, job)
    finally:
        torch._dynamo.reset()
    for parameters, after_two_steps, in_the_end in results:
        assert 1 <= after_two_steps == in_the_end <= 3
        plain_names = {name.replace("_orig_mod.", ""): value for name, value in parameters.items()}
        assert largest_difference(plain_names, alone.parameters) <= 1e-5

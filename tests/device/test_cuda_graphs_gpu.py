"""On a GPU, blocks in CUDA graphs have the bits of the same kernels without, and are replayed after two steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers import models
from tests.helpers.training import Trained, adamw, batch, config, finish, largest_difference, start

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(torch.version.cuda is None and torch.version.hip is None, reason="CUDA graphs"),
]

NUM_BLOCKS, STEPS, WARM_UP = 4, 6, 3


def trained(settings: dict[str, Any], counts: list[str] | None = None) -> tuple[Trained, list[list[str]]]:
    """Also what PyTorch did with graphs in each step."""
    engine = start(lambda: models.Plain(num_blocks=NUM_BLOCKS), settings, adamw)
    losses, seen = [], []
    for step in range(STEPS):
        for micro in range(engine.gradient_accumulation_steps()):
            inputs = batch(step * engine.gradient_accumulation_steps() + micro, 0, 1)
            loss = engine(*(tensor.to(engine.device) for tensor in inputs))
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        if counts is not None:
            seen.append(list(counts))
            counts.clear()
    return finish(engine, [float(loss) for loss in losses]), seen


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_graphs_are_replayed_from_the_fourth_step_on(
    stage: int, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(stage, gradient_accumulation_steps=accumulation)
    eager, _ = trained(settings)
    torch._dynamo.reset()
    plain, _ = trained({**settings, "compile": {"enabled": True}})
    torch._dynamo.reset()
    from torch._inductor.cudagraph_trees import CUDAGraphTreeManager

    counts: list[str] = []
    for name in ("run_eager", "record_function", "execute_node"):
        original = getattr(CUDAGraphTreeManager, name)

        def counted(manager: Any, *args: Any, name: str = name, original: Any = original) -> Any:
            counts.append(name)
            return original(manager, *args)

        monkeypatch.setattr(CUDAGraphTreeManager, name, counted)
    graphs, seen = trained({**settings, "compile": {"enabled": True, "mode": "reduce-overhead"}}, counts)
    torch._dynamo.reset()
    assert seen[WARM_UP:] == [["execute_node"] * (2 * NUM_BLOCKS * accumulation)] * (STEPS - WARM_UP)
    assert graphs.losses == plain.losses
    assert all(torch.equal(value, plain.parameters[name]) for name, value in graphs.parameters.items())
    assert largest_difference(graphs.parameters, eager.parameters) <= 1e-4

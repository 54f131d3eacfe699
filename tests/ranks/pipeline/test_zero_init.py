"""Models that ``zero.Init`` has built are cut into pipeline stages: each stage's ranks share its parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.errors import NotBuiltError
from shoal.pipeline.layers import LayerSpec
from shoal.pipeline.module import PipelineModule
from tests.helpers.pipeline_cases import mean_square
from tests.helpers.training import make, sgd
from tests.ranks.parallel.tensor.test_engine import ROWS, assert_equal, config, gpt, tokens
from tests.ranks.pipeline.test_models import MICRO, STEPS, alone


@pytest.mark.parametrize(
    ("size", "stage", "parallel", "tied", "remote"),
    [
        (2, 3, {"pp": 2}, True, None),
        (4, 3, {"pp": 2}, True, "cpu"),
        (4, 1, {"pp": 2}, False, None),
        (4, 3, {"pp": 2, "tp": 2}, True, None),
        (8, 3, {"pp": 2, "tp": 2}, False, None),
    ],
)
def test_a_gpt_trains_as_in_one_process(
    size: int, stage: int, parallel: dict[str, int], tied: bool, remote: str | None
) -> None:
    dp = size // parallel["pp"] // parallel.get("tp", 1)
    expected, losses = alone(dp, lambda: gpt(tied=tied))

    def job() -> Any:
        model = make(lambda: gpt(tied=tied))
        shoal.zero.Init(model, remote_device=remote)
        everything = list(model.parameters())
        settings = config(stage, 1, MICRO) | {"parallel": parallel}
        engine = shoal.initialize(model=model, optimizer=sgd(model.parameters()), config=settings)[0]
        own = {id(parameter) for parameter in engine.module.parameters()}
        held = sum(p.untyped_storage().nbytes() for p in everything if id(p) not in own)
        found = []
        for step in range(STEPS):
            rank, micros = engine.axes.batch.rank, []
            for micro in range(MICRO):
                rows = tokens(10 * step + micro, dp)[ROWS * rank : ROWS * (rank + 1)]
                micros.append((rows[:, :-1], rows[:, 1:]))
            found.append(float(engine.train_batch(iter(micros))))
        return found, engine.module_state_dict(), held

    for found, values, held in run_ranks(size, job):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-6, atol=1e-6)
        assert_equal(values, expected)
        assert held <= 4 * 40  # placeholders of one element


def test_layers_of_a_whole_pipeline_module_are_cut_and_those_of_stages_are_refused() -> None:
    def layers() -> list[Any]:
        return [LayerSpec(nn.Linear, 6, 6) for _ in range(4)]

    def job(num_stages: int | None, with_init: bool) -> Any:
        if num_stages is None:
            model = make(lambda: PipelineModule(layers(), loss_fn=mean_square))
            shoal.zero.Init(model, enabled=with_init)
        else:
            with shoal.zero.Init(enabled=with_init):
                model = PipelineModule(layers(), num_stages, loss_fn=mean_square)
        settings = config(3, 1, MICRO) | {"pipeline": {"stages": 2}}
        engine = shoal.initialize(model=model, optimizer=sgd(model.parameters()), config=settings)[0]
        data = [(torch.ones(2, 6) * micro, torch.zeros(2, 6)) for micro in range(MICRO)]
        return [float(engine.train_batch(iter(data))) for _ in range(2)]

    assert run_ranks(4, job, None, True) == run_ranks(4, job, None, False)
    with pytest.raises(NotBuiltError, match=r"built under zero\.Init") as caught:
        run_ranks(2, job, 2, True)
    assert caught.value.code == "pipeline-init"

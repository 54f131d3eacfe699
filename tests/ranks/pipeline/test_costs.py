"""Models are cut into pipeline stages by the measured time or memory of their blocks, or by the class of these."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import UsageError
from shoal.pipeline.costs import partition_costs
from tests.helpers.fake_clock import FakeClock
from tests.helpers.training import make, sgd
from tests.ranks.parallel.tensor.test_engine import GPT, LENGTH, ROWS, VOCABULARY, GPTConfig, config, tokens

CPU = torch.device("cpu")
CLOCK = FakeClock()


class Waiting(nn.Linear):
    """Takes a known time, on one rank more than on the other."""

    def __init__(self, rank: int) -> None:
        super().__init__(6, 6)
        self.rank = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CLOCK.advance(0.02 if current_world().rank == self.rank else 0.001)
        return super().forward(x)


class WithLoss(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(x, labels)


def settings(pp: int, **pipeline: Any) -> dict[str, Any]:
    return config(1, 1, 2) | {"pipeline": {"stages": pp, **pipeline}}


def test_all_ranks_cut_by_the_times_that_rank_0_has_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.pipeline.costs.time", CLOCK)

    def job() -> Any:
        model = make(lambda: WithLoss([Waiting(rank) for rank in (0, 2, 2, 1, 1, 2)]))
        data = (torch.ones(2, 6), torch.zeros(2, 6))
        model.pipeline_sample = data
        engine = shoal.initialize(model=model, optimizer=sgd(model.parameters()), config=settings(2, partition="time"))[
            0
        ]
        assert "forward" not in model.blocks.__dict__
        engine.train_batch(iter([data, data]))
        return engine.module.starts

    assert run_ranks(2, job) == [(0, 1)] * 2


@pytest.mark.parametrize("method", ["time", "memory"])
def test_measuring_blocks_draws_no_random_number_of_the_process(method: str) -> None:
    """In one process: threads as ranks share the generator of the host."""

    class Dropping(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Dropping.calls += 1
            return nn.functional.dropout(super().forward(x))

    model = WithLoss([Dropping(6, 6) for _ in range(4)])
    before = torch.get_rng_state()
    costs = partition_costs(model, method, (torch.ones(2, 6), torch.zeros(2, 6)), 2, CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert Dropping.calls > 4 and len(costs) in (2, 4)


def gpt(num_layers: int = 8) -> GPT:
    return GPT(GPTConfig(VOCABULARY, LENGTH, num_layers, 16, 2, False))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_gpt_is_cut_by_memory_of_the_micro_batches_in_flight(device: str) -> None:
    def starts(rows: int) -> Any:
        with torch.device(device):
            model = gpt()
        batch = torch.zeros(rows, LENGTH, dtype=torch.long)
        model.pipeline_sample = (batch, batch)
        values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        costs: Any = partition_costs(model, "memory", None, 2, CPU)
        assert [len(row) for row in costs] == [8, 8]
        assert all(t.is_meta or torch.equal(values[n], t) for n, t in model.state_dict().items())
        return costs

    small, large = starts(1), starts(8)
    state = 16 * sum(p.numel() for p in gpt().blocks[1].parameters())
    assert large[1][1] - state == pytest.approx(8 * (small[1][1] - state), rel=0.1)
    assert large[0][1] - large[1][1] == large[1][1] - state  # stage 0 keeps two micro-batches
    assert small[0][0] > small[0][1] < small[0][7]  # with the embedding, and the head

    def job() -> Any:
        with torch.device(device):
            model = make(gpt) if device == "cpu" else gpt()
        batch = torch.zeros(64, LENGTH, dtype=torch.long)
        model.pipeline_sample = {"tokens": batch, "targets": batch}
        engine = shoal.initialize(
            model=model, optimizer=sgd(model.parameters()), config=settings(2, partition="memory")
        )[0]
        batches = [tokens(micro, 1) for micro in range(2)]
        engine.train_batch(iter([(batch[:, :-1], batch[:, 1:]) for batch in batches]))
        return engine.module.starts

    first, *others = run_ranks(2, job)
    assert first == (0, 3) and others == [first]


def test_blocks_of_a_class_are_divided() -> None:
    kinds = [nn.Linear, nn.Linear, nn.Tanh, nn.Tanh, nn.Tanh, nn.Linear]

    def model() -> nn.Module:
        return nn.Sequential(*(kind(6, 6) if kind is nn.Linear else kind() for kind in kinds))

    def job() -> Any:
        made, section = make(model), settings(3, partition="type:lin")
        return shoal.initialize(model=made, optimizer=sgd(made.parameters()), config=section)[0].module.starts

    assert run_ranks(3, job) == [(0, 1, 5)] * 3
    with pytest.raises(UsageError, match="matches no block"):
        partition_costs(model(), "type:Conv", None, 2, CPU)


def test_what_is_missing_for_a_measurement_is_said() -> None:
    def job() -> None:
        model = make(gpt)
        with pytest.raises(UsageError, match=r"set model\.pipeline_sample to one micro-batch"):
            shoal.initialize(model=model, config=settings(2, partition="time"))

    run_ranks(2, job)


@pytest.mark.parametrize("method", ["time", "memory"])
@pytest.mark.parametrize(
    "parallel", [{"tp": 2}, {"tp": 2, "tp_sequence_parallel": True, "tp_loss_parallel": True}, {"sp": 2}, {"cp": 2}]
)
def test_blocks_are_measured_as_the_ranks_along_the_other_axes_run_them(
    method: str, parallel: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank runs its part, so a block's states (tp) or activations (sp, cp) are half of the whole one's."""
    measured: list[Any] = []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        measured.append(partition_costs(*args, **kwargs))
        return measured[-1]

    monkeypatch.setattr("shoal.engine.pipeline_parts.partition_costs", recorded)
    splits_sequence = "tp" not in parallel
    rows = [tokens(micro, 1) for micro in range(2)]

    def job() -> Any:
        model = make(gpt)
        if splits_sequence:
            model.attend_by(shoal.attention)
        sample = torch.zeros(ROWS, LENGTH // (2 if splits_sequence else 1), dtype=torch.long)
        model.pipeline_sample = (sample, sample)
        asked = settings(2, partition=method) | {"parallel": parallel}
        engine = shoal.initialize(model=model, optimizer=sgd(model.parameters()), config=asked)[0]
        batches: list[Any] = [(batch[:, :-1], batch[:, 1:]) for batch in rows]
        if (context := engine.sequence_context) is not None:
            positions = context.positions(LENGTH, CPU)
            batches = [(*(context.shard(tensor) for tensor in batch), positions) for batch in batches]
        return engine.module.starts, float(engine.train_batch(iter(batches)))

    model, batch = make(gpt), torch.zeros(ROWS, LENGTH, dtype=torch.long)
    expected = sum(model(batch[:, :-1], batch[:, 1:]).item() for batch in rows) / 2
    (starts, loss), *others = run_ranks(4, job)
    assert others == [(starts, loss)] * 3 and loss == pytest.approx(expected, rel=1e-6)
    if method == "memory":
        whole: Any = partition_costs(model, method, (batch, batch), 2, CPU)
        kept = whole[0][1] - whole[1][1]  # the activations of the micro-batch more that stage 0 keeps
        for costs in measured:
            if splits_sequence:
                assert costs[0][1] - costs[1][1] < 0.75 * kept
            else:
                assert costs[1][1] < 0.75 * whole[1][1]

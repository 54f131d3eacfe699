"""Layers to pipeline stages: by parameters, number, class, memory and time."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import nn

from shoal.errors import UsageError
from shoal.parallel.sequence.chunks import cuts
from shoal.pipeline.costs import balance, measure
from shoal.pipeline.layers import LayerSpec, TiedLayerSpec, outline
from shoal.pipeline.module import PipelineModule
from tests.helpers.fake_clock import FakeClock


def gpt(num_blocks: int = 12) -> list[Any]:
    blocks = [LayerSpec(nn.Linear, 16, 16) for _ in range(num_blocks)]
    head = TiedLayerSpec("embed", nn.Embedding, 64, 16, forward_fn=lambda module, x: x @ module.weight.t())
    return [TiedLayerSpec("embed", nn.Embedding, 64, 16), torch.tanh, *blocks, torch.tanh, head]


def bounds(layers: list[Any], num_stages: int, method: Any, **options: Any) -> list[int]:
    return PipelineModule(layers, num_stages, partition_method=method, pipeline_rank=0, **options).partitions()


@pytest.mark.parametrize(
    ("costs", "num_stages", "expected"),
    [
        ([1] * 10, 4, [0, 3, 6, 8, 10]),
        ([5, 1, 1, 1, 1, 1, 5], 3, [0, 1, 6, 7]),
        ([0, *[1] * 24, 0, 0, 0], 4, [0, 7, 13, 19, 28]),
        ([50, 0, *[12] * 24, 0, 50], 4, [0, 6, 14, 22, 28]),
        ([7, 3, 3, 3, 3, 3, 3, 7], 4, [0, 1, 4, 7, 8]),
        ([1, 2, 3], 3, [0, 1, 2, 3]),
    ],
)
def test_splits_are_those_of_deepspeed_for_models_of_equal_blocks(
    costs: list[float], num_stages: int, expected: list[int]
) -> None:
    assert balance(costs, num_stages) == expected


def test_the_largest_cost_is_the_smallest_of_all_splits() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        size = int(torch.randint(3, 9, (), generator=generator))
        costs = torch.randint(0, 20, (3, size), generator=generator).tolist()
        splits = [[0, *inner, size] for inner in combinations(range(1, size), 2)]

        def largest(split: list[int], costs: list[list[int]] = costs) -> int:
            return max(sum(of[start:end]) for of, (start, end) in zip(costs, pairwise(split), strict=True))

        assert largest(balance(costs, 3)) == min(map(largest, splits))
        assert balance(costs[0], 3) in splits


def test_methods_of_deepspeed() -> None:
    assert cuts(5, 2) == [0, 3, 5]
    assert bounds(gpt(), 4, "uniform") == [0, 4, 8, 12, 16]
    assert bounds(gpt(), 4, "parameters") == [0, 3, 8, 13, 16]
    assert bounds(gpt(), 4, "Type:linear") == [0, 5, 8, 11, 16]
    assert bounds(gpt(), 4, "type:Linear|Embedding") == [0, 5, 9, 12, 16]
    assert bounds(gpt(), 2, "type:tanh") == [0, 14, 16]
    with pytest.raises(
        UsageError, match=r"(?s)'type:Conv' matches no layer.*match one of the types: Embedding, tanh, Lin"
    ):
        bounds(gpt(), 2, "type:Conv")
    with pytest.raises(UsageError, match=r"(?s)'profile' is not known.*use one of parameters, uniform, type:REGEX"):
        bounds(gpt(), 2, "profile")
    with pytest.raises(UsageError, match="has 2 costs for 16 layers"):
        bounds(gpt(), 2, [1, 2])


def test_frozen_layers_count_nothing_and_a_frozen_model_is_cut_by_layers() -> None:
    frozen = nn.Linear(64, 64).requires_grad_(False)
    assert bounds([frozen, frozen, nn.Linear(4, 4), nn.Linear(4, 4)], 2, "parameters") == [0, 3, 4]
    assert bounds([frozen] * 5, 2, "parameters") == [0, 3, 5]


def test_counting_needs_no_memory_and_a_constructor_that_reads_values_works() -> None:
    class Reading(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.linear = nn.Linear(width, width)
            self.first = self.linear.weight[0, 0].item()

    huge = LayerSpec(nn.Linear, 1 << 20, 1 << 20)  # 4 TiB
    assert [known.numel for known in outline([huge, LayerSpec(Reading, 3), nn.Linear(2, 2)])] == [
        (1 << 40) + (1 << 20),
        12,
        6,
    ]
    state = torch.get_rng_state()
    outline([LayerSpec(Reading, 3)])
    assert torch.equal(torch.get_rng_state(), state)


class Takes(nn.Module):
    def __init__(self, seconds: float, clock: FakeClock) -> None:
        super().__init__()
        self.seconds, self.clock = seconds, clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.advance(self.seconds)
        return 2 * x


def test_time_splits_by_measured_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr("shoal.pipeline.costs.time", clock)
    layers = [LayerSpec(Takes, seconds, clock) for seconds in (0.05, 0.01, 0.01, 0.01, 0.01)]
    assert bounds(layers, 2, "time", sample=torch.ones(2)) == [0, 1, 5]
    with pytest.raises(UsageError, match=r"(?s)'time' runs each layer.*pass sample="):
        bounds(layers, 2, "time")


def test_memory_counts_states_and_what_is_saved_for_the_micro_batches_in_flight() -> None:
    layers = [LayerSpec(nn.Linear, 8, 8), torch.tanh, nn.ReLU(inplace=True), nn.Linear(8, 8).requires_grad_(False)]
    state = torch.get_rng_state()
    costs = measure(layers, outline(layers), torch.ones(4, 8), torch.device("cpu"), repeats=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert [cost.state_bytes for cost in costs] == [72 * 16, 0, 0, 72 * 4]
    assert [cost.saved_bytes for cost in costs] == [128, 128, 128, 0]  # the frozen layer saves its weight only
    assert [cost.input_bytes for cost in costs] == [128] * 4
    blocks = [LayerSpec(nn.Linear, 8, 8) for _ in range(12)]
    assert bounds(blocks, 2, "memory", sample=torch.ones(1, 8)) == [0, 6, 12]
    assert bounds(blocks, 2, "memory", sample=torch.ones(100, 8)) == [0, 4, 12]  # stage 0 saves two micro-batches
    with pytest.raises(UsageError, match="'memory' runs each layer"):
        bounds(blocks, 2, "memory")

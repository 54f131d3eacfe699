"""What a few equal blocks and micro-batches take, extended to all of them: against the run of all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from shoal.models import GPT
from shoal.planner.dry_model import PlannedStep, dry_run_model
from shoal.planner.repeated_blocks import Repeats, RunGrid
from shoal.simulation.times import COMPUTE
from tests.simulation.planner.test_dry_model import SHAPE, config

UNITS = {"units": {"classes": ["Block"]}}  # else a small model is one unit, and its padding is not the blocks'
NEAR = {  # at most two blocks are gathered ahead, none is kept
    "stage3_prefetch_bucket_size": 40_000,
    "stage3_max_reuse_distance": 40_000,
    "stage3_max_live_parameters": 100_000,
    "stage3_param_persistence_threshold": 0,
}
AGAIN = {"modules": ["Block"]}
ON_HOST = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}


def counted(calls: list[int], num_layers: int) -> Callable[[], nn.Module]:
    """Builds a model that counts the runs of its blocks."""

    def build() -> nn.Module:
        model = GPT(replace(SHAPE, num_layers=num_layers))
        for block in model.blocks:
            block.register_forward_pre_hook(lambda *_: calls.append(1))
        return model

    return build


def check(short: PlannedStep, whole: PlannedStep) -> None:
    """Time within 1 %, memory within 1 % (of a pipeline 2 %), traffic exact."""
    assert short.seconds == pytest.approx(whole.seconds, rel=0.01)
    assert short.received == whole.received
    for one, other in zip(short.stages, whole.stages, strict=True):
        # A pipeline has a few more messages in flight when more micro-batches follow.
        part = 0.01 if len(whole.stages) == 1 else 0.02
        assert one.memory.allocated == pytest.approx(other.memory.allocated, rel=part)
        assert one.memory.operation == other.memory.operation
        assert one.by_kind[COMPUTE] == pytest.approx(other.by_kind[COMPUTE], rel=0.01)
        if len(whole.stages) == 1:  # else what a stage waits for may have waited for another stage
            assert one.by_kind == pytest.approx(other.by_kind, abs=0.01 * other.seconds)
            assert one.busy == pytest.approx(other.busy, rel=0.01, abs=1e-6)


@pytest.mark.parametrize(
    ("num_layers", "made"),
    [
        (9, config(0, **UNITS)),
        (2, config(1, 6, parallel={"tp": 2}, **UNITS)),
        (9, config(2, 1, zero_optimization={"stage": 2, **ON_HOST}, **UNITS)),
        (15, config(3, 1, zero_optimization={"stage": 3, **NEAR}, activation_checkpointing=AGAIN, **UNITS)),
    ],
    ids=["stage 0", "stage 1, tp, accumulation", "stage 2, offload", "stage 3, recomputation"],
)
def test_a_step_is_that_of_all_blocks_and_micro_batches(num_layers: int, made: dict[str, Any]) -> None:
    few: list[int] = []
    all_of_them: list[int] = []
    short = dry_run_model(counted(few, num_layers), made, 8)
    check(short, dry_run_model(counted(all_of_them, num_layers), made, 8, repeats=False))
    assert len(few) < len(all_of_them)


def test_what_cuda_graphs_keep_grows_with_the_blocks() -> None:
    lamb = {"type": "Lamb", "params": {"lr": 1e-3}}  # its step has memory of its own, when activations are gone
    made = config(0, 1, compile={"enabled": True, "mode": "reduce-overhead"}, optimizer=lamb, **UNITS)
    short, whole = (dry_run_model(counted([], 9), made, 8, repeats=each) for each in (True, False))
    check(short, whole)
    assert whole.memory.in_graphs > 0
    assert short.memory.in_graphs == pytest.approx(whole.memory.in_graphs, rel=0.05)
    # The allocator may take one segment of 20 MiB more for what Lamb's one call over all units holds.
    assert short.memory.device_nbytes == pytest.approx(whole.memory.device_nbytes, abs=21e6)


@pytest.mark.parametrize(("num_layers", "accumulation", "stage"), [(8, 2, 1), (2, 6, 1), (8, 2, 2)])
def test_the_stages_of_a_pipeline_have_fewer_blocks_or_micro_batches(
    num_layers: int, accumulation: int, stage: int
) -> None:
    made = config(stage, accumulation, parallel={"pp": 2}, pipeline={"partition": "parameters"}, **UNITS)
    few: list[int] = []
    all_of_them: list[int] = []
    short = dry_run_model(counted(few, num_layers), made, 4)
    check(short, dry_run_model(counted(all_of_them, num_layers), made, 4, repeats=False))
    assert len(few) < len(all_of_them)
    assert short.bubble > 0.05


def test_a_part_of_the_blocks_is_recomputed_as_the_budget_allows() -> None:
    made = config(1, activation_checkpointing={"memory_budget": 1_500_000}, **UNITS)
    short, whole = (dry_run_model(counted([], 10), made, 8, repeats=each) for each in (True, False))
    check(short, whole)
    assert 1_500_000 < short.memory.by_kind["activation"] < 2_000_000  # what is outside of the blocks is not counted


# which blocks repeat


class Layer(nn.Module):
    def __init__(self, number: int, width: int = 4, window: int | None = None) -> None:
        super().__init__()
        self.layer_idx, self.window = number, window
        self.linear = nn.Linear(4, width)


def found(*layers: nn.Module) -> tuple[int, int, int]:
    model = nn.Module()
    model.layers = nn.ModuleList(layers)
    repeats = Repeats.of(model)
    return repeats.first, repeats.period, repeats.count


def test_blocks_repeat_where_shapes_and_settings_are_equal() -> None:
    assert found(*(Layer(n) for n in range(6))) == (0, 1, 6)
    assert found(Layer(0, 8), *(Layer(n) for n in range(1, 6))) == (1, 1, 5)
    assert found(*(Layer(n, 4 + 4 * (n % 2)) for n in range(7))) == (0, 2, 3)
    assert found(*(Layer(n, window=16 if n % 3 else None) for n in range(6))) == (0, 3, 2)
    assert found(*(Layer(n, 4 + n) for n in range(4)))[2] < 2


def test_blocks_are_removed_from_each_pipeline_stage() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([Layer(0, 8), *(Layer(n) for n in range(1, 10))])
    repeats = Repeats.of(model)
    assert repeats.spans([0, 5, 10]) == [(1, 4), (5, 5)]
    assert repeats.remove(model, [0, 5, 10], 3) == ["layers.2"]
    assert [layer.layer_idx for layer in model.layers] == [0, 4, 8, 9]


def test_a_grid_extends_what_is_linear_in_both() -> None:
    def figure(blocks: int, micro: int) -> float:
        return 3 + 2 * blocks + 5 * micro + 7 * blocks * micro

    grid = RunGrid((3, 5), (2, 3), 80, 64)
    runs = {
        (n, m, None): {("busy", "compute"): figure(n, m), ("allocated", 0): figure(n, 0)}
        for n in (3, 5)
        for m in (2, 3)
    }
    made = grid.extended(runs)
    assert made["busy", "compute"] == pytest.approx(figure(80, 64))
    assert made["allocated", 0] == pytest.approx(figure(80, 0))

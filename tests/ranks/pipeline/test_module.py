"""PipelineModule trains on ranks as on one: tied, recomputed and frozen layers; the grid's groups; measured splits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.pipeline.layers import LayerSpec, TiedLayerSpec
from shoal.pipeline.module import PipelineModule
from shoal.pipeline.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from tests.helpers.fake_clock import FakeClock
from tests.helpers.training import make, sgd

TOKENS, WIDTH, NUM_MICRO = 16, 8, 4


class Head(nn.Module):
    """Of another class than the embedding whose weight it shares."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.proj = nn.Linear(WIDTH, TOKENS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(self.norm(x))


def logits(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x @ module.weight.t()


def loss_fn(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten())


EMBEDDING = partial(TiedLayerSpec, "embed", nn.Embedding, TOKENS, WIDTH)
BLOCKS = [LayerSpec(nn.Linear, WIDTH, WIDTH), torch.tanh, LayerSpec(nn.Linear, WIDTH, WIDTH), torch.tanh]


def tied() -> list[Any]:
    return [EMBEDDING(), *BLOCKS, EMBEDDING(forward_fn=logits)]


def two_classes() -> list[Any]:
    return [EMBEDDING(), *BLOCKS, TiedLayerSpec("embed", Head, tied_weight_attr="proj.weight")]


def frozen() -> list[Any]:
    return [nn.Embedding(TOKENS, WIDTH).requires_grad_(False), *BLOCKS, LayerSpec(Head)]


def train(layers: Callable[[], list[Any]], num_ranks: int, stage: int, pipeline: Any, options: Any) -> Any:
    """Of each rank the losses of three steps, the parameters after them, and where the stages begin.

    Args:
        pipeline: the section of the config; with "stages" the module leaves the cut to it.
    """

    num_stages = None if "stages" in pipeline else num_ranks

    def job() -> Any:
        module = make(lambda: PipelineModule(layers(), num_stages, loss_fn=loss_fn, **options), seed=3)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": NUM_MICRO,
            "gradient_clipping": 0.5,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "pipeline": pipeline,
        }
        engine = shoal.initialize(model=module, optimizer=sgd(module.parameters()), config=config)[0]
        generator = torch.Generator().manual_seed(0)
        data = torch.randint(0, TOKENS, (3 * NUM_MICRO, 2, 2, 5), generator=generator)
        batches = iter([(inputs, labels) for inputs, labels in data])
        losses = [float(engine.train_batch(batches)) for _ in range(3)]
        trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        return losses, {name: engine.access.full_parameter(p) for name, p in trained.items()}, module.parts

    found = run_ranks(num_ranks, job)
    assert all(losses == found[0][0] for losses, _, _ in found)
    return found


@pytest.mark.parametrize(
    ("layers", "num_ranks", "stage", "schedule", "options"),
    [
        (tied, 2, 0, "1f1b", {}),
        (tied, 2, 1, "zbv", {"virtual_stages": 2, "stage_to_rank": "v"}),
        (tied, 3, 2, "1f1b", {"activation_checkpoint_interval": 1}),
        (tied, 2, 3, "interleaved_1f1b", {"virtual_stages": 2, "activation_checkpoint_interval": 2}),
        (two_classes, 3, 3, "gpipe", {}),
        (two_classes, 2, 2, "1f1b", {"partition_method": "type:linear|head"}),
        (frozen, 2, 1, "1f1b", {"partition_method": [5, 1, 1, 1, 1, 1]}),  # nothing is trained on rank 0
        (frozen, 2, 3, "zb_h1", {"partition_method": [5, 1, 1, 1, 1, 1]}),
    ],
)
def test_any_number_of_stages_trains_as_one(
    layers: Callable[[], list[Any]], num_ranks: int, stage: int, schedule: str, options: Any
) -> None:
    pipeline = {"schedule": schedule, "virtual_stages": options.get("virtual_stages", 1)}
    equals_one_rank(layers, train(layers, num_ranks, stage, pipeline, options))


def equals_one_rank(layers: Callable[[], list[Any]], result: Any) -> None:
    [(losses, values, _)] = train(layers, 1, 0, {}, {})
    seen: set[str] = set()
    for found, held, _ in result:
        assert found == pytest.approx(losses, rel=1e-6)
        for name, value in held.items():
            torch.testing.assert_close(value, values[name], rtol=1e-6, atol=1e-6, msg=name)
        seen |= set(held)
    assert seen == set(values)


@pytest.mark.parametrize(
    ("layers", "pipeline", "bounds"),
    [
        (tied, {"schedule": "dualpipev", "partition": "uniform"}, [0, 2, 4, 5, 6]),
        (two_classes, {"virtual_stages": 1, "activation_checkpoint_interval": 2}, [0, 3, 6]),
        (frozen, {"partition": "type:head|tanh"}, [0, 5, 6]),
    ],
)
def test_the_config_cuts_a_module_without_stages(
    layers: Callable[[], list[Any]], pipeline: dict[str, Any], bounds: list[int]
) -> None:
    result = train(layers, 2, 2, {"stages": 2, **pipeline}, {})
    assert [parts for _, _, parts in result] == [bounds] * 2
    equals_one_rank(layers, result)


def test_groups_of_the_grid_are_the_ranks_that_it_names() -> None:
    def job() -> list[tuple[float, int]]:
        grid = PipelineParallelGrid(PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2))
        groups = [
            (grid.get_pipe_parallel_group(), grid.pp_group),
            (grid.get_data_parallel_group(), grid.dp_group),
            (grid.get_slice_parallel_group(), grid.slice_group),
            (grid.get_model_parallel_group(), grid.model_group),
        ]
        sums = []
        for group, ranks in groups:
            total = torch.tensor([float(grid.global_rank)])
            dist.all_reduce(total, group=group)
            sums.append((total.item(), sum(ranks)))
        return sums

    for sums in run_ranks(8, job):
        assert [total for total, _ in sums] == [expected for _, expected in sums]


def test_all_ranks_take_the_split_that_rank_0_has_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr("shoal.pipeline.costs.time", clock)

    class Slow(nn.Module):
        def __init__(self, own_rank: int) -> None:
            super().__init__()
            self.own_rank = own_rank

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            clock.advance(0.03 if self.own_rank == current_world().rank else 0.001)
            return 2 * x

    def job() -> list[int]:
        layers = [LayerSpec(Slow, rank) for rank in (0, 2, 1, 1)]  # another is slow on each rank
        return PipelineModule(layers, 2, partition_method="time", sample=torch.ones(2)).partitions()

    assert run_ranks(2, job) == [[0, 1, 4]] * 2

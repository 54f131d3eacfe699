"""Frozen, unused, shared and tied parameters in a pipeline."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.errors import ModelError, OptimizerError
from tests.helpers.pipeline_cases import assert_as_alone, engine_of_layers
from tests.helpers.pipeline_layers import WIDTH, batches
from tests.helpers.training import make

SCHEDULES = [("1f1b", 1, 1), ("1f1b", 3, 1), ("zb_h1", 1, 1), ("zbv", 3, 2), ("interleaved_1f1b", 2, 2)]


class Adapted(nn.Module):
    """A frozen layer with a trained low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(value) + self.up(self.down(value)))


class Spare(nn.Module):
    """A layer with parameters that its forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, 3)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.used(value))


def linears(count: int = 8) -> list[nn.Linear]:
    return [nn.Linear(WIDTH, WIDTH, bias=i % 2 == 0) for i in range(count)]


def frozen(*indices: int) -> Callable[[], Sequence[nn.Module]]:
    def layers() -> Sequence[nn.Module]:
        made = linears()
        for index in indices:
            made[index].requires_grad_(False)
        return made

    return layers


def tied(*pairs: tuple[int, int], freezes: int | None = None) -> Callable[[], Sequence[nn.Module]]:
    """Each pair's second layer has the weight of the first."""

    def layers() -> Sequence[nn.Module]:
        made: Any = linears()
        for first, second in pairs:
            made[second].weight = made[first].weight
        if freezes is not None:
            made[freezes].weight.requires_grad_(False)
        return [nn.Sequential(layer, nn.Tanh()) for layer in made]

    return layers


@pytest.mark.parametrize(
    ("indices", "schedule", "stage", "virtual"),
    [
        ((1, 6), *SCHEDULES[0]),
        ((0, 1, 2, 3), *SCHEDULES[1]),
        ((0, 1, 2, 3), *SCHEDULES[2]),
        ((4, 5, 6, 7), *SCHEDULES[0]),
        ((2, 3, 4, 5), *SCHEDULES[3]),
        ((0, 1, 4, 5), *SCHEDULES[4]),
    ],
)
def test_frozen_layers_and_stages_without_trained_parameters(
    indices: tuple[int, ...], schedule: str, stage: int, virtual: int
) -> None:
    assert_as_alone(frozen(*indices), 4, 2, stage, schedule, virtual)


@pytest.mark.parametrize(("schedule", "stage", "virtual"), [SCHEDULES[1], SCHEDULES[3]])
@pytest.mark.parametrize("make", [lambda: [Adapted() for _ in range(8)], lambda: [Spare() for _ in range(8)]])
def test_adapters_on_frozen_layers_and_unused_parameters(make: Any, schedule: str, stage: int, virtual: int) -> None:
    assert_as_alone(make, 4, 2, stage, schedule, virtual)


@pytest.mark.parametrize(("schedule", "stage", "virtual"), [SCHEDULES[0], SCHEDULES[3]])
@pytest.mark.parametrize(
    "make",
    [
        tied((0, 3), (0, 7)),
        tied((0, 5), (1, 4)),  # the stages have them in opposite orders
        tied((0, 7), (3, 4), (1, 2), (5, 6)),
        tied((0, 7), freezes=0),
        tied((1, 6), (0, 7), freezes=1),
    ],
)
def test_tied_weights(make: Any, schedule: str, stage: int, virtual: int) -> None:
    assert_as_alone(make, 4, 2, stage, schedule, virtual)


@pytest.mark.parametrize("units", [{"classes": ["Linear"]}, {"names": ["*.0"]}])
@pytest.mark.parametrize("stage", [1, 3])
def test_tied_weights_over_three_stages_in_units_of_their_own(stage: int, units: dict[str, Any]) -> None:
    make = tied((0, 3), (0, 5), (1, 7), (2, 6))
    assert_as_alone(make, 4, 4, stage, units=units)
    assert_as_alone(make, 4, 4, stage, units=units, zero={"stage3_max_live_parameters": 40})


ADAMW = {"type": "AdamW", "params": {"lr": 0.1}}


@pytest.mark.parametrize("more", [{}, {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}}}])
def test_the_configs_optimizer_trains_the_stages_that_have_trained_parameters(more: dict[str, Any]) -> None:
    def job() -> Any:
        engine = engine_of_layers(frozen(4, 5, 6, 7), 2, 2, optimizer=None, optimizer_section=ADAMW, **more)
        for step in range(2):
            engine.train_batch(batches(0, step, 4))
        return len(engine.optimizer.param_groups), engine.get_lr(), engine.get_global_grad_norm()

    first, second = run_ranks(2, job)
    assert first == second
    assert first[0] == 1


def test_groups_of_the_optimizer_are_those_of_all_stages(tmp_path: Any) -> None:
    def job() -> Any:
        def optimizer(parameters: Any) -> torch.optim.Optimizer:
            parameters = list(parameters)
            decayed, others = ([p for p in parameters if (p.dim() > 1) is wanted] for wanted in (True, False))
            return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.1)

        def start() -> Any:
            return engine_of_layers(frozen(*range(4, 8)), 2, 1, optimizer=optimizer)

        engine = start()
        for step in range(2):
            engine.train_batch(batches(0, step, 4))
        engine.save_checkpoint(tmp_path)
        engine.train_batch(batches(0, 2, 4))
        expected = engine.module_state_dict()
        engine.destroy()
        engine = start()
        engine.load_checkpoint(tmp_path)
        engine.train_batch(batches(0, 2, 4))
        found = engine.module_state_dict()
        assert all(torch.equal(expected[name], found[name]) for name in expected)

    run_ranks(2, job)


def test_a_model_without_any_trained_parameter_is_refused() -> None:
    def job() -> None:
        with pytest.raises(OptimizerError, match="no parameter requires a gradient"):
            engine_of_layers(frozen(*range(8)), 2, 1, optimizer=None, optimizer_section=ADAMW)

    run_ranks(2, job)


def test_a_weight_that_only_one_of_its_stages_uses_stays_the_same_on_all() -> None:
    class Unused(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return value

    def layers() -> Sequence[nn.Module]:
        made = linears(4)
        return [*made[:3], Unused(made[0].weight)]

    assert_as_alone(layers, 4, 2, 1)
    assert_as_alone(layers, 4, 2, 3)


def test_units_that_other_stages_have_are_passed_over_and_unknown_ones_are_refused() -> None:
    def layers() -> Sequence[nn.Module]:
        return [*linears(4), *(Adapted() for _ in range(4))]

    assert_as_alone(layers, 2, 2, 3, units={"classes": ["Adapted"], "names": ["0", "1"]})

    def job() -> None:
        with pytest.raises(ModelError, match="Adaptid"):
            engine_of_layers(layers, 2, 3, units={"classes": ["Adaptid", "Adapted"]})

    run_ranks(2, job)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_layer_that_is_used_twice_in_a_stage_and_once_in_another(stage: int) -> None:
    def layers() -> Sequence[nn.Module]:
        made = [nn.Sequential(layer, nn.Tanh()) for layer in linears()]
        return [made[0], made[0], made[1], made[2], made[3], made[4], made[3], made[0]]

    assert_as_alone(layers, 2, 2, stage)


def detached(at: int, count: int = 8) -> Callable[[], Sequence[nn.Module]]:
    """The loss does not depend on the layers before ``at``."""

    def layers() -> Sequence[nn.Module]:
        made: list[nn.Module] = [nn.Sequential(layer, nn.Tanh()) for layer in linears(count)]
        made[at] = nn.Sequential(Detach(), made[at])
        return made

    return layers


class Detach(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value.detach()


@pytest.mark.parametrize(
    ("schedule", "stage", "virtual"), [("1f1b", 0, 1), ("zb_h1", 1, 1), ("1f1b", 3, 1), ("zbv", 2, 2)]
)
@pytest.mark.parametrize("at", [2, 4, 6])
def test_layers_before_a_cut_that_the_loss_does_not_depend_on_are_left_alone(
    at: int, schedule: str, stage: int, virtual: int
) -> None:
    """Weight decay would change them if their gradients were zeros."""
    decaying = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
    model = nn.Sequential(*make(detached(at)))  # type: ignore[arg-type]
    before = {name: value.detach().clone() for name, value in model.named_parameters()}

    def job() -> Any:
        engine = engine_of_layers(detached(at), 2, stage, schedule, virtual, optimizer=decaying)
        for step in range(2):
            engine.train_batch(batches(engine.axes.batch.rank, step, 4))
        return engine.module_state_dict()

    for values in run_ranks(4, job):
        for name, value in before.items():
            is_used = int(name.split(".")[0]) >= at
            assert torch.equal(values[name], value) is not is_used, name


def test_layers_that_some_micro_batch_uses_are_updated() -> None:
    class Sometimes(nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return value.detach() if value[0, 0] > 0 else value

    def layers() -> Sequence[nn.Module]:
        made: list[nn.Module] = [nn.Sequential(layer, nn.Tanh()) for layer in linears()]
        made[4] = nn.Sequential(Sometimes(), made[4])
        return made

    assert_as_alone(layers, 4, 2, 1)
    assert_as_alone(layers, 2, 2, 3)


class Prompted(nn.Module):
    """Returns what it received, changed, and a value of its weight alone; ``Joined`` uses both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.prompt, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(2, 2)

    def forward(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.linear(value)), torch.tanh(self.prompt.weight[:1] + self.prompt.bias)


class Joined(nn.Linear):
    def forward(self, pair: Any) -> torch.Tensor:
        return super().forward(pair[0] + pair[1])


@pytest.mark.parametrize(("schedule", "stage"), [("1f1b", 1), ("zb_h1", 1), ("zb_h1", 3)])
def test_a_weight_that_only_another_output_depends_on_gets_its_gradient(schedule: str, stage: int) -> None:
    def layers() -> Sequence[nn.Module]:
        return [*linears(3), Prompted(), Joined(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]

    assert_as_alone(layers, 3, 3, stage, schedule)


def test_muon_with_a_stage_that_trains_no_matrix_continues_in_another_layout(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.LayerNorm(8)]
    inputs, targets = torch.randn(2, 4, 8)

    def losses(num_stages: int, folder: Path, *, is_first: bool) -> list[float]:
        model: nn.Module = nn.Sequential(*copy.deepcopy(layers))
        if num_stages > 1:
            model = shoal.PipelineModule(model, loss_fn=nn.functional.mse_loss)
        config = {
            "train_batch_size": 4,
            "gradient_accumulation_steps": 1,
            "optimizer": {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 0.01}},
            "zero_optimization": {"stage": 1},
            **({"pipeline": {"stages": num_stages, "partition": "uniform"}} if num_stages > 1 else {}),
        }
        engine = shoal.initialize(model=model, config=config)[0]
        if not is_first:
            engine.load_checkpoint(str(folder))
        found = []
        for _ in range(2):
            if num_stages > 1:
                found.append(float(engine.train_batch(iter([(inputs, targets)]))))
            else:
                loss = nn.functional.mse_loss(engine(inputs), targets)
                engine.backward(loss)
                engine.step()
                found.append(loss.item())
        if is_first:
            engine.save_checkpoint(str(folder))
        engine.destroy()
        return found

    first = {n: run_ranks(n, partial(losses, n, tmp_path / str(n), is_first=True))[0] for n in (1, 2)}
    assert first[2] == pytest.approx(first[1], rel=1e-6)
    # Each continues what the other has saved.
    after = {n: run_ranks(n, partial(losses, n, tmp_path / str(3 - n), is_first=False))[0] for n in (1, 2)}
    assert after[2] == pytest.approx(after[1], rel=1e-6)
    assert after[1][0] < first[1][1]


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_stage_that_has_nothing_on_the_disk_starts_with_the_others(frozen: int, tmp_path: Path) -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    layers[frozen].requires_grad_(False)
    inputs, targets = torch.randn(2, 4, 8)

    def job(**offload: str) -> float:
        model = shoal.PipelineModule(copy.deepcopy(layers), loss_fn=nn.functional.mse_loss)
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none", **offload}},
            "pipeline": {"stages": 2, "partition": "uniform"},
        }
        engine: Any = shoal.initialize(model=model, config=config)[0]
        losses = [float(engine.train_batch(iter([(inputs, targets)]))) for _ in range(2)]
        engine.destroy()
        return losses[-1]

    expected = run_ranks(2, job)
    assert run_ranks(2, partial(job, device="nvme", nvme_path=str(tmp_path)), timeout=20) == expected

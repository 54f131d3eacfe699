"""A pipeline trains as one process does: stages, schedules, ZeRO stages, tied weights, precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.pipeline.schedule import build_schedule
from shoal.pipeline.stage import StageModule
from tests.ranks.training import sgd

WIDTH, ROWS, STEPS, NUM_LAYERS = 6, 2, 3, 8


class Layers(StageModule):
    """A stack of layers, of which one rank has some; layer 0 and the last may share their weight."""

    def __init__(self, layers: Sequence[nn.Module], starts: Sequence[int], stages: Sequence[int], *, tied: bool) -> None:
        super().__init__()
        self.num_stages, self.stages, self._starts = len(starts), tuple(stages), [*starts, len(layers)]
        self.tied = {"0.weight": (0, len(starts) - 1)} if tied else {}
        for index, layer in enumerate(layers):
            stage = max(s for s in range(len(starts)) if starts[s] <= index)
            if stage in stages or (tied and index == 0 and len(starts) - 1 in stages):
                self.add_module(str(index), layer)

    def forward(self, stage: int, received: Any, batch: Any) -> Any:
        value = batch[0] if stage == 0 else received
        for index in range(self._starts[stage], self._starts[stage + 1]):
            value = self._modules[str(index)](value)
        return value

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(output, batch[1])

    def stage_parameters(self, stage: int) -> list[nn.Parameter]:
        own = range(self._starts[stage], self._starts[stage + 1])
        return [parameter for index in own for parameter in self._modules[str(index)].parameters()]


def layers(*, tied: bool) -> list[nn.Module]:
    torch.manual_seed(3)
    made: list[nn.Module] = [nn.Linear(WIDTH, WIDTH, bias=0 < i < NUM_LAYERS - 1) for i in range(NUM_LAYERS)]
    if tied:
        made[-1].weight = made[0].weight
    return [nn.Sequential(layer, nn.Tanh()) if 0 < i < NUM_LAYERS - 1 else layer for i, layer in enumerate(made)]


def batches(rank: int, step: int, num_micro: int) -> Iterator[Any]:
    for micro in range(num_micro):
        generator = torch.Generator().manual_seed(1000 * rank + 100 * step + micro)
        yield torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)


def alone(num_dp: int, num_micro: int, *, tied: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    model = nn.Sequential(*layers(tied=tied))
    optimizer = sgd(model.parameters())
    losses = []
    for step in range(STEPS):
        total = 0.0
        for rank in range(num_dp):
            for inputs, labels in batches(rank, step, num_micro):
                loss = nn.functional.mse_loss(model(inputs), labels) / (num_micro * num_dp)
                loss.backward()
                total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return {name: value.detach().clone() for name, value in model.named_parameters()}, losses


def settings(stage: int, pp: int, num_micro: int, schedule: str, virtual: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": num_micro,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **more.pop("zero", {})},
        "pipeline": {"stages": pp, "schedule": schedule, "virtual_stages": virtual},
        **more,
    }


def engine_of(stage: int, pp: int, num_micro: int, schedule: str, virtual: int, *, tied: bool, **more: Any) -> Any:
    made = build_schedule(schedule, pp, num_micro, virtual_stages=virtual)
    world = current_world()
    own = made.stages_of(world.rank // (world.size // pp))
    starts = [index * NUM_LAYERS // made.num_stages for index in range(made.num_stages)]
    model = Layers(layers(tied=tied), starts, own, tied=tied)
    config = settings(stage, pp, num_micro, schedule, virtual, **more)
    return shoal.initialize(model=model, optimizer=sgd(model.parameters()), config=config)[0]


@pytest.mark.parametrize(
    ("size", "pp", "stage", "schedule", "virtual", "num_micro", "tied"),
    [
        (2, 2, 0, "1f1b", 1, 4, False),
        (2, 2, 1, "gpipe", 1, 3, True),
        (4, 2, 1, "1f1b", 1, 5, True),
        (4, 2, 2, "1f1b", 1, 2, True),
        (4, 2, 3, "1f1b", 1, 4, True),
        (4, 4, 2, "1f1b", 1, 1, True),
        (4, 2, 3, "interleaved_1f1b", 2, 4, True),
        (4, 2, 2, "interleaved_zero_bubble", 2, 4, True),
        (2, 2, 0, "zb_h1", 1, 4, True),
        (4, 2, 3, "zb_h1", 1, 4, True),
        (4, 2, 1, "zbv", 2, 4, True),
        (4, 2, 3, "zbv", 2, 5, False),
        (4, 2, 2, "dualpipev", 2, 4, True),
    ],
)
def test_parameters_and_losses_equal_one_process(
    size: int, pp: int, stage: int, schedule: str, virtual: int, num_micro: int, tied: bool
) -> None:
    expected, losses = alone(size // pp, num_micro, tied=tied)

    def job() -> Any:
        engine = engine_of(stage, pp, num_micro, schedule, virtual, tied=tied)
        found = [
            float(engine.train_batch(batches(engine.axes.batch.rank, step, num_micro))) for step in range(STEPS)
        ]
        return found, {name: engine.access.full_parameter(p) for name, p in engine.module.named_parameters()}

    seen: set[str] = set()
    for found, values in run_ranks(size, job):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-6, atol=1e-6)
        for name, value in values.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6, msg=name)
        seen |= set(values)
    assert seen == set(expected)


Layout = tuple[int, int, int, str, int]  # ranks, pipeline ranks, ZeRO stage, schedule, stages a rank
LAYOUTS: list[Layout] = [
    (2, 2, 1, "1f1b", 1),
    (4, 4, 2, "gpipe", 1),
    (2, 2, 3, "interleaved_1f1b", 2),
    (4, 2, 3, "zbv", 2),
    (1, 1, 0, "1f1b", 1),
]


def run(layout: Layout, steps: range, folder: Any, *, loads: bool) -> dict[str, torch.Tensor]:
    size, pp, stage, schedule, virtual = layout
    num_micro = 4 * pp // size

    def job() -> Any:
        engine = engine_of(stage, pp, num_micro, schedule, virtual, tied=True)
        if loads:
            path, state = engine.load_checkpoint(folder)
            assert path is not None and state == {"steps": steps.start}
        rank = engine.axes.batch.rank
        for step in steps:
            micros = [batch for r in range(size // pp) for batch in batches(r, step, 4 * pp // size)]
            engine.train_batch(iter(micros[rank * num_micro : (rank + 1) * num_micro]))
        if not loads:
            engine.save_checkpoint(folder, client_state={"steps": steps.stop})
        return engine.module_state_dict()

    found = run_ranks(size, job)
    for other in found[1:]:
        assert {name: value.tolist() for name, value in other.items()} == {
            name: value.tolist() for name, value in found[0].items()
        }
    return found[0]


@pytest.mark.parametrize("saved", LAYOUTS[:3])
@pytest.mark.parametrize("loaded", LAYOUTS)
def test_a_checkpoint_of_one_layout_goes_on_in_another(saved: Layout, loaded: Layout, tmp_path: Any) -> None:
    values = run(saved, range(2), tmp_path, loads=False)
    size, pp = loaded[:2]
    went_on = run(loaded, range(2, 2), tmp_path, loads=True)
    assert set(went_on) == set(values)
    for name, value in values.items():
        torch.testing.assert_close(went_on[name], value, rtol=0, atol=0, msg=name)
    assert {"0.weight", f"{NUM_LAYERS - 1}.weight"} & set(values) == {"0.weight", f"{NUM_LAYERS - 1}.weight"}


@pytest.mark.parametrize("loaded", LAYOUTS[1:])
def test_training_goes_on_as_if_it_had_not_stopped(loaded: Layout, tmp_path: Any) -> None:
    first, size, pp = LAYOUTS[0], loaded[0], loaded[1]
    if size != pp:
        pytest.skip("the global batch is another one")
    run(first, range(2), tmp_path / "a", loads=False)
    went_on = run(loaded, range(2, 4), tmp_path / "a", loads=True)
    whole = run(first, range(4), tmp_path / "b", loads=False)
    for name, value in whole.items():
        torch.testing.assert_close(went_on[name], value, rtol=1e-6, atol=1e-6, msg=name)

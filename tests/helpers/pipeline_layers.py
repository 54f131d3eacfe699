"""A stack of layers in pipeline stages, for tests: the model, its data, its engine, and the same in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

import shoal
from shoal.comm.world import current_world
from shoal.pipeline.schedule import build_schedule
from shoal.pipeline.stage import StageModule
from tests.helpers.training import make, sgd

WIDTH, ROWS, STEPS, NUM_LAYERS = 6, 2, 3, 8


class Layers(StageModule):
    """A stack of layers, of which one rank has some. Layer 0 and the last may share their weight."""

    def __init__(
        self, layers: Sequence[nn.Module], starts: Sequence[int], stages: Sequence[int], *, tied: bool
    ) -> None:
        super().__init__()
        self.num_stages, self.stages, self._starts = len(starts), tuple(stages), [*starts, len(layers)]
        self.tied = {"0.weight": (0, len(starts) - 1)} if tied else {}
        for index, layer in enumerate(layers):
            stage = max(s for s in range(len(starts)) if starts[s] <= index)
            if stage in stages or (tied and index == 0 and len(starts) - 1 in stages):
                self.add_module(str(index), layer)

    def forward(self, stage: int, received: Any, batch: Any) -> Any:
        value = batch[0].to(next(self.parameters()).dtype) if stage == 0 else received
        for index in range(self._starts[stage], self._starts[stage + 1]):
            value = self._modules[str(index)](value)
        return value

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(output.float(), batch[1])

    def stage_parameters(self, stage: int) -> list[nn.Parameter]:
        own = range(self._starts[stage], self._starts[stage + 1])
        return [parameter for index in own for parameter in self._modules[str(index)].parameters()]


def layers(*, tied: bool) -> list[nn.Module]:
    made = [make(partial(nn.Linear, WIDTH, WIDTH, bias=0 < i < NUM_LAYERS - 1), seed=i) for i in range(NUM_LAYERS)]
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

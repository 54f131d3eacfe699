"""Lists of layers that train as a PipelineModule and, the same, as an ``nn.Sequential`` in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

import shoal
from shoal.comm.threads import run_ranks
from shoal.pipeline.module import PipelineModule
from tests.helpers.pipeline_layers import STEPS, batches, settings
from tests.helpers.training import make, sgd

MakeLayers = Callable[[], Sequence[Any]]
Values = dict[str, torch.Tensor]


def mean_square(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output.float(), labels)


def trained_parameters(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def engine_of_layers(
    make_layers: MakeLayers,
    pp: int,
    stage: int,
    schedule: str = "1f1b",
    virtual: int = 1,
    num_micro: int = 4,
    *,
    loss_fn: Callable[[Any, Any], torch.Tensor] = mean_square,
    optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] | None = sgd,
    dynamic_shape: bool = False,
    optimizer_section: dict[str, Any] | None = None,
    **more: Any,
) -> Any:
    module = make(
        lambda: PipelineModule(
            make_layers(),
            num_stages=pp,
            loss_fn=loss_fn,
            partition_method="uniform",
            virtual_stages=virtual,
            stage_to_rank="v" if schedule in ("zbv", "dualpipev") else "loop",
            dynamic_shape=dynamic_shape,
        )
    )
    if optimizer_section is not None:
        more["optimizer"] = optimizer_section
    config = settings(stage, pp, num_micro, schedule, virtual, **more)
    return shoal.initialize(model=module, optimizer=optimizer, config=config)[0]


def alone(
    make_layers: MakeLayers,
    num_dp: int,
    num_micro: int = 4,
    *,
    data: Callable[[int, int, int], Iterable[Any]] = batches,
    loss_fn: Callable[[Any, Any], torch.Tensor] = mean_square,
) -> tuple[list[float], Values]:
    """Losses and parameters after some steps in one process."""
    model = nn.Sequential(*make(make_layers))  # type: ignore[arg-type]
    optimizer = sgd(trained_parameters(model))
    losses = []
    for step in range(STEPS):
        total = 0.0
        for rank in range(num_dp):
            for inputs, labels in data(rank, step, num_micro):
                loss = loss_fn(model(inputs), labels) / (num_micro * num_dp)
                loss.backward()
                total += float(loss.detach())
        nn.utils.clip_grad_norm_(trained_parameters(model), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {name: value.detach().clone() for name, value in model.named_parameters()}


def in_stages(
    make_layers: MakeLayers,
    size: int,
    pp: int,
    stage: int,
    schedule: str = "1f1b",
    virtual: int = 1,
    num_micro: int = 4,
    *,
    data: Callable[[int, int, int], Iterable[Any]] = batches,
    **more: Any,
) -> list[tuple[list[float], Values]]:
    """Each rank's losses, and the values of the whole model."""

    def job() -> Any:
        engine = engine_of_layers(make_layers, pp, stage, schedule, virtual, num_micro, **more)
        rank = engine.axes.batch.rank
        losses = [float(engine.train_batch(iter(data(rank, step, num_micro)))) for step in range(STEPS)]
        named, access = engine.module.named_parameters(), engine.access
        own = {name: access.full_parameter(p) for name, p in named if access.knows(p)}
        return losses, engine.module_state_dict(), own

    found = run_ranks(size, job)
    for _, values, own in found:
        for name, value in own.items():  # copies of tied weights among them
            torch.testing.assert_close(value, values[name], rtol=0, atol=0, msg=name)
    return [(losses, values) for losses, values, _ in found]


def assert_as_alone(make_layers: MakeLayers, size: int, pp: int, *args: Any, **more: Any) -> None:
    """A pipeline's losses and parameters are those of one process."""
    given = {key: more[key] for key in ("data", "loss_fn") if key in more}
    losses, values = alone(make_layers, size // pp, **given)
    for found, state in in_stages(make_layers, size, pp, *args, **more):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-6, atol=1e-6)
        for name, value in values.items():
            torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-6, msg=name)

"""Replicas that take steps of their own and are synchronised by an outer optimizer, against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shoal
from shoal.comm.formats import format_named
from tests.helpers.models import Plain
from tests.helpers.training import (
    OptimizerFactory,
    Trained,
    batch,
    config,
    finish,
    make,
    run_steps,
    sgd,
    start,
)

Layout = list[tuple[str, int, int]]  # name, offset, numel
Layouts = list[tuple[str, int, int, Layout]]  # of each group: its unit, its numel, that of a shard
STEPS = 5


def local(every: int = 2, **keys: Any) -> dict[str, Any]:
    return {"every": every, **keys}


def settings(stage: int, section: dict[str, Any], replicas: int = 2, **sections: Any) -> dict[str, Any]:
    return config(stage, local_steps=section, parallel={"dp_replicate": replicas}, **sections)


def layouts_of(engine: shoal.Engine) -> Layouts:
    return [
        (unit.name, layout.numel, group.owned_numel, [(s.name, s.offset, s.numel) for s in layout.specs])
        for unit in engine.sharded.units
        for group in unit.trained
        for layout in [group.buffer.layout]
    ]


def train(made: dict[str, Any], optimizer: OptimizerFactory = sgd, steps: int = STEPS) -> tuple[Trained, Layouts]:
    engine = start(Plain, made, optimizer)
    layouts = layouts_of(engine)
    losses = run_steps(engine, steps)
    return finish(engine, losses), layouts


class Replica:
    """A model with its optimizer, trained on the micro-batches of some ranks."""

    def __init__(self, optimizer: OptimizerFactory, ranks: range, num_ranks: int) -> None:
        self.model = make(Plain)
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = optimizer(self.model.parameters())
        self.ranks, self.num_ranks = ranks, num_ranks

    def step(self, first: int, num_micro: int, *, sums_each_time: bool) -> None:
        """Sums are taken in the order of the ranks: of each micro-batch (stages 2 and 3), or of each rank's sum."""

        def gradient(micro: int, rank: int) -> dict[str, torch.Tensor]:
            self.model.zero_grad()
            (self.model(*batch(first + micro, rank, self.num_ranks)) / num_micro).backward()
            return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

        def added(values: list[dict[str, torch.Tensor]], scale: float = 1.0) -> dict[str, torch.Tensor]:
            return {name: _in_order([each[name] for each in values]) * scale for name in values[0]}

        share = 1 / len(self.ranks)
        if sums_each_time:
            micros = [added([gradient(micro, rank) for rank in self.ranks], share) for micro in range(num_micro)]
            total = added(micros)
        else:
            total = added([added([gradient(micro, rank) for micro in range(num_micro)]) for rank in self.ranks], share)
        for name, parameter in self.parameters.items():
            parameter.grad = total.get(name)
        self.optimizer.step()


def _in_order(values: list[torch.Tensor]) -> torch.Tensor:
    total = values[0].clone()
    for value in values[1:]:
        total.add_(value)
    return total


def through(form: Any, flat: torch.Tensor, num_rows: int, error: torch.Tensor | None = None) -> torch.Tensor:
    """What arrives of ``flat``, of which each replica sums a part, encoded by itself."""
    rows, out = flat.view(num_rows, -1), torch.empty_like(flat)
    form.decode(form.encode(rows, None if error is None else error.view(num_rows, -1)), out.view(num_rows, -1))
    return out


def emulate(
    stage: int,
    section: dict[str, Any],
    layouts: Layouts,
    optimizer: OptimizerFactory = sgd,
    *,
    num_replicas: int = 2,
    ranks_of_one: int = 2,
    num_micro: int = 1,
    steps: int = STEPS,
) -> list[dict[str, torch.Tensor]]:
    """The parameters of each replica after ``steps`` steps, in one process."""
    ranks = [range(at * ranks_of_one, (at + 1) * ranks_of_one) for at in range(num_replicas)]
    replicas = [Replica(optimizer, each, num_replicas * ranks_of_one) for each in ranks]
    anchors = dict(make(Plain).named_parameters())
    outer = {
        unit: torch.optim.SGD(
            [anchors[name] for of, _, _, layout in layouts if of == unit for name, _, _ in layout],
            lr=section.get("outer_lr", 0.7),
            momentum=section.get("outer_momentum", 0.9),
            nesterov=section.get("nesterov", True),
        )
        for unit, _, _, _ in layouts
    }
    form = format_named(section["wire"]) if "wire" in section else None
    errors = {(unit, at): torch.zeros(numel) for unit, numel, _, _ in layouts for at in range(num_replicas)}
    has_error = section.get("error_feedback", False)
    fragments = section.get("fragments", 1)

    def flat_of(replica: Replica, numel: int, layout: Layout) -> torch.Tensor:
        flat = torch.zeros(numel)
        for name, offset, size in layout:
            flat[offset : offset + size] = (anchors[name].data - replica.parameters[name].data).flatten()
        return flat

    def mean(unit: str, numel: int, owned: int, layout: Layout) -> torch.Tensor:
        flats = [flat_of(replica, numel, layout) for replica in replicas]
        if form is None:
            return _in_order(flats) / num_replicas
        parts = []
        for begin in range(0, numel, owned):
            mine = [errors[unit, at][begin : begin + owned] if has_error else None for at in range(num_replicas)]
            sent = [
                through(form, flat[begin : begin + owned], num_replicas, error)
                for flat, error in zip(flats, mine, strict=True)
            ]
            total, lost = _in_order(sent) / num_replicas, torch.zeros(owned)
            part = through(form, total, num_replicas, lost if has_error else None)
            size = owned // num_replicas
            for at, error in enumerate(mine):
                if error is not None:
                    error[at * size : (at + 1) * size].add_(lost[at * size : (at + 1) * size], alpha=num_replicas)
            parts.append(part)
        return torch.cat(parts)

    for step in range(1, steps + 1):
        for replica in replicas:
            replica.step((step - 1) * num_micro, num_micro, sums_each_time=stage >= 2)
        for number, unit in enumerate(dict.fromkeys(unit for unit, _, _, _ in layouts)):
            if (step - number % fragments * section["every"] // fragments) % section["every"]:
                continue
            for of, numel, owned, layout in layouts:
                if of != unit:
                    continue
                gradient = mean(of, numel, owned, layout)
                for name, offset, size in layout:
                    anchors[name].grad = gradient[offset : offset + size].view_as(anchors[name]).clone()
            outer[unit].step()
            for replica in replicas:
                for of, _, _, layout in layouts:
                    for name, _, _ in layout if of == unit else ():
                        replica.parameters[name].data.copy_(anchors[name].data)
    return [{name: value.detach() for name, value in replica.parameters.items()} for replica in replicas]


SECTIONS: dict[str, dict[str, Any]] = {
    "every 2": local(),
    "each step": local(1, outer_lr=1.0, outer_momentum=0.0, nesterov=False),
    "plain momentum": local(nesterov=False, outer_lr=0.5),
    "fragments": local(3, fragments=2),
    "int8": local(wire="int8"),
    "int4 with error": local(wire="int4_hadamard", error_feedback=True),
    "1bit fragments": local(2, wire="1bit", fragments=2, error_feedback=True),
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", SECTIONS)
def test_two_replicas_of_two_ranks_have_the_bits_of_one_process(
    name: str, stage: int, ranks: Callable[..., Any]
) -> None:
    results = ranks(4, train, settings(stage, SECTIONS[name]))
    wanted = emulate(stage, SECTIONS[name], results[0][1])
    for rank, (trained, _) in enumerate(results):
        for key, value in wanted[rank // 2].items():
            assert torch.equal(trained.main_parameters[key], value), (rank, key)

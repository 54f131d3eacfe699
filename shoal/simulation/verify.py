"""``shoal.verify``: one step of the real engine without values, in which each tensor has a kind along each mesh axis.

    report = shoal.verify(train, 8)      # train(): builds the model, initializes, takes a step, destroys the engine
    print(report)

See ``spreads`` for the kinds and ``type_check`` for what follows them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from functools import partial
from math import isclose
from typing import Any

import torch

from shoal.comm.fake import FakeStages, FakeStageTransport, FakeTransport
from shoal.comm.world import World, fake_process_group, use_world
from shoal.device import fake_tensors
from shoal.errors import ModelError, ShoalError
from shoal.simulation.dry_run import run_stages, stages_of
from shoal.simulation.type_check import TypedTransport, TypeFinding, Types
from shoal.text import counted, table


class TypeReport:
    """What ``shoal.verify`` found.

    Attributes: ``findings``: none: the step is right by type. ``axes``: those with several ranks. ``parameters``: by
    name, for each axis what it is along it, and what happens to its gradient.
    """

    def __init__(self, ranks: Sequence[Types]) -> None:
        self.findings: list[TypeFinding] = list(dict.fromkeys(each for types in ranks for each in types.findings))
        self.axes = [digit.name for digit in ranks[0].digits]
        self.parameters = {name: cells for types in ranks for name, cells in types.table.items()}
        self.num_operators = sum(types.num_operators for types in ranks)

    def check(self) -> None:
        """Raises: ModelError: there are findings."""
        if self.findings:
            shown = "\n\n".join(map(str, self.findings[:_MAX_SHOWN]))
            more = len(self.findings) - _MAX_SHOWN
            raise ModelError(
                f"the step is wrong by type ({counted(len(self.findings), 'fault')}):\n\n{shown}"
                + (f"\n\n... and {more} more" if more > 0 else ""),
                do="fix the first one, and verify again: later ones may follow from it.",
                code="verify-types",
            )

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            "findings": [asdict(each) for each in self.findings],
            "parameters": {name: dict(zip(self.axes, cells, strict=True)) for name, cells in self.parameters.items()},
            "num_operators": self.num_operators,
        }

    def __str__(self) -> str:
        """The faults, or the table of parameters, in which blocks that are equal are one."""
        if self.findings:
            shown = "\n\n".join(map(str, self.findings))
            return f"{self.num_operators} operators, {counted(len(self.findings), 'fault')}:\n\n{shown}"
        alike = {(re.sub(r"\b\d+\b", "*", name), *cells): None for name, cells in self.parameters.items()}
        return (
            table([list(row) for row in alike], ["parameter", *self.axes])
            + f"\n{self.num_operators} operators, no fault."
        )


_MAX_SHOWN = 8


def verify(
    train: Callable[[], object],
    num_ranks: int,
    *,
    num_stages: int = 1,
    stride: Callable[[int], int] | None = None,
) -> TypeReport:
    """Run ``train()`` as one rank of ``num_ranks`` without values, and check the kinds of all tensors.

    ``train`` builds the model, initializes, takes one step and destroys the engine. With several pipeline stages it is
    called once for each, in threads of which one runs at a time. It is called again where dropout or another draw of
    random numbers has to be compared with that of another rank, and where the script scales the loss down.

    Args:
        stride: of a number of ranks, as of ``dry_run_pipeline``.

    Raises: UsageError: stages that do not divide the ranks. What ``train`` raises.
    Memory: that of the model's objects; tensors have none.
    """
    step = partial(_step, train, num_stages, stride)
    ranks = step(num_ranks)
    for place, digit in enumerate(ranks[0].digits):
        if any(draw.needs and draw.needs[place] for types in ranks for draw in types.draws):
            for types, other in zip(ranks, step(num_ranks, ranks, digit.stride), strict=True):
                types.compare_draws(other, place)
    if any(factor and factor < 1.0 for types in ranks for factor, _ in types.losses):
        with suppress(ShoalError):  # a configuration for one number of ranks
            for types, other in zip(ranks, step(2 * num_ranks), strict=True):
                _compare_losses(types, other)
    return TypeReport(ranks)


def _compare_losses(types: Types, of_twice: Types) -> None:
    """Report a loss that the script divides by a number that doubles with the ranks."""
    axis = [place for place, digit in enumerate(types.digits) if digit.axis.startswith("dp")][-1:]
    for (factor, place), (half, _) in zip(types.losses, of_twice.losses, strict=False):
        if factor and half and isclose(factor, 2 * half):
            what = (
                f"the loss is multiplied by {factor:.4g}, by {half:.4g} on twice the ranks: the engine takes the mean"
            )
            types.report(f"{what} over the ranks too", axis, "", place)


def _step(
    train: Callable[[], object],
    num_stages: int,
    stride: Callable[[int], int] | None,
    num_ranks: int,
    first: Sequence[Types] = (),
    rank_0: int = 0,
) -> list[Types]:
    """``train()`` as one rank, from ``rank_0``, of each pipeline stage.

    Args:
        first: what rank 0 of each has recorded.
    """
    numbers = [rank + rank_0 for rank in stages_of(num_ranks, num_stages, stride and stride(num_ranks)).ranks]
    stages = FakeStages(numbers)
    every = {rank: Types() for rank in stages.ranks}
    for number, types in enumerate(every.values()):
        types.messages = every[rank_0].messages
        types.is_stage = num_stages > 1
        types.first = first[number] if first else None

    def run(rank: int, transport: FakeTransport) -> None:
        types = every[rank]
        world = World(rank, num_ranks, rank, torch.device("cpu"), "fake", TypedTransport(transport, types, rank))
        world.stages = stages if num_stages > 1 else None
        with use_world(world), closing(world), fake_tensors(allow_non_fake_inputs=True), types.following():
            try:
                train()
            except Exception:
                if not types.has_failed:
                    raise

    with fake_process_group(num_ranks, rank_0):
        if num_stages == 1:
            run(rank_0, FakeTransport(rank_0))
        else:
            run_stages(stages, lambda rank: run(rank, FakeStageTransport(rank, num_ranks, stages)))
    return list(every.values())

"""``shoal.verify``: one step of the real engine without values, in which each tensor has a kind along each mesh axis.

    report = shoal.verify(train, 8)      # train(): builds the model, initializes, takes a step, destroys the engine
    print(report)

See ``spreads`` for the kinds and ``type_check`` for what follows them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal.comm.fake import FakeStageTransport, FakeTransport
from shoal.comm.world import World, fake_process_group, use_world
from shoal.errors import ModelError
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


def verify(train: Callable[[], object], num_ranks: int, *, num_stages: int = 1) -> TypeReport:
    """Run ``train()`` as one rank of ``num_ranks`` without values, and check the kinds of all tensors.

    ``train`` builds the model, initializes, takes one step and destroys the engine. With several pipeline stages it is
    called once for each, in threads of which one runs at a time.

    Raises: UsageError: stages that do not divide the ranks. What ``train`` raises.
    Memory: that of the model's objects; tensors have none.
    """
    stages = stages_of(num_ranks, num_stages)
    every = {rank: Types() for rank in stages.ranks}
    for types in every.values():
        types.messages = every[stages.ranks[0]].messages
        types.is_stage = num_stages > 1

    def run(rank: int, transport: FakeTransport) -> None:
        types = every[rank]
        world = World(rank, num_ranks, rank, torch.device("cpu"), "fake", TypedTransport(transport, types, rank))
        world.stages = stages if num_stages > 1 else None
        with use_world(world), closing(world), FakeTensorMode(allow_non_fake_inputs=True), types.following():
            try:
                train()
            except Exception:
                if not types.has_failed:
                    raise

    with fake_process_group(num_ranks, 0):
        if num_stages == 1:
            run(0, FakeTransport(0))
        else:
            run_stages(stages, lambda rank: run(rank, FakeStageTransport(rank, num_ranks, stages)))
    return TypeReport(list(every.values()))

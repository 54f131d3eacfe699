"""Gradients of an unfinished step: a run that stops in the middle of an accumulation resumes there.

They are partial sums over the micro-batches of one rank or of all ranks, as the table's row says, and mean something
only in the layout that made them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.errors import CheckpointError
from shoal.sharding.param_group import ParameterGroup


def layout_of(states: Sequence[ParameterGroup]) -> list[list[Any]]:
    """What must be the same for open gradients to mean the same."""
    return [
        [
            group.buffer.label,
            group.buffer.layout.numel,
            group.buffer.end - group.buffer.begin,
            str(group.buffer.dtype),
            str(group.row.gradient_between),
        ]
        for group in states
    ]


def take(states: Sequence[ParameterGroup]) -> list[Any]:
    """This rank's open gradients, as nested values with tensors; empty between steps."""
    exported = [(index, group.gradient.export()) for index, group in enumerate(states)]
    return [{"bucket": index, **values} for index, values in exported if values is not None]


def put(states: Sequence[ParameterGroup], saved: list[Any], layout: Any) -> None:
    """Set what ``take`` gave.

    Raises: CheckpointError: it was taken in another layout.
    """
    for group in states:
        group.gradient.reset()
        for parameter in group.gradient.parameters:
            parameter.grad = None
    if not saved:
        return
    if layout != layout_of(states):
        raise CheckpointError(
            "the checkpoint was saved in the middle of a step, with gradients of some of its micro-batches,"
            " by another layout.",
            do="load it in the layout that saved it (ranks, stage, units), or save at the end of a step.",
            code="checkpoint-open-gradients",
        )
    for entry in saved:
        states[entry["bucket"]].gradient.restore(entry)

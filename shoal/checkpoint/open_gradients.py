"""Gradients of an unfinished step: a run that stops in the middle of an accumulation resumes there.

They are partial sums over the micro-batches of one rank or of all ranks, as the table's row says, and mean something
only in the layout that made them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.errors import CheckpointError
from shoal.zero.bucket_state import BucketState


def layout_of(states: Sequence[BucketState]) -> list[list[Any]]:
    """What must be the same for open gradients to mean the same."""
    return [
        [
            state.bucket.label,
            state.bucket.layout.numel,
            state.bucket.end - state.bucket.begin,
            str(state.bucket.dtype),
            str(state.unit.row.gradient_between),
        ]
        for state in states
    ]


def take(states: Sequence[BucketState]) -> list[Any]:
    """This rank's open gradients, as nested values with tensors; empty between steps."""
    exported = [(index, state.gradient.export()) for index, state in enumerate(states)]
    return [{"bucket": index, **values} for index, values in exported if values is not None]


def put(states: Sequence[BucketState], saved: list[Any], layout: Any) -> None:
    """Set what ``take`` gave.

    Raises: CheckpointError: it was taken in another layout.
    """
    for state in states:
        state.gradient.reset()
        for parameter in state.gradient.parameters:
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

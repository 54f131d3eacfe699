"""Gradients of an unfinished step: a run that stops in the middle of an accumulation resumes there.

They are partial sums over the micro-batches of one rank or of all ranks, as the table's row says, and mean something
only in the layout that made them. Every other layout begins the step again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.sharding import open_gradient
from shoal.sharding.param_group import ParameterGroup
from shoal.text import counted


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
    exported = [(index, open_gradient.export(group.gradient)) for index, group in enumerate(states)]
    return [{"bucket": index, **values} for index, values in exported if values is not None]


def put(states: Sequence[ParameterGroup], saved: list[Any]) -> None:
    """Set what ``take`` gave, in the layout that it was taken in."""
    for group in states:
        group.gradient.reset()
        for parameter in group.gradient.parameters:
            parameter.grad = None
    for entry in saved:
        open_gradient.restore(states[entry["bucket"]].gradient, entry)


def begin_again(saved: dict[str, Any]) -> str:
    """Set a saved run state to the beginning of its unfinished step. Returns: a warning for the user."""
    first = saved.get("step_start") or {}
    counters = saved["counters"] = {**saved.get("counters", {}), **first.get("counters", {})}
    if saved.get("data") and first.get("data"):
        saved["data"] = first["data"]
    elif saved.get("data") and first.get("taken") is not None:
        saved["data"] = {**saved["data"], "taken": first["taken"], "into": 0}
    saved["micro_in_step"] = 0
    done = counted(int(first.get("num_done", 1)), "micro-batch", "micro-batches")
    return (
        f"the checkpoint was saved in the middle of an accumulation, after {done} of step"
        f" {counters.get('global_steps', 0) + 1}, in another layout (ranks, stage, units or accumulation steps). Their"
        f" gradients are dropped and the step begins again: micro-batches from number {counters.get('micro_steps', 0)}"
        " (counted from 0) are repeated. The engine's data loader gives them again; a data loader of the script must do"
        f" so itself, from sample {counters.get('global_samples', 0)} on."
    )

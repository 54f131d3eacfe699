"""The dtype that a forward computes in: casts of its inputs, autocast; and explanations of errors about dtypes.

Under autocast a linear layer saves its weight's cast for backward, and autocast's own cache keeps it until the forward
ends: in 16 bits, the whole model on every rank. Where backward gathers the parameters once more, it casts them once
more, too, which gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shoal.errors import CommError
from shoal.parallel.saved_tensors import saving_parameters
from shoal.sharding.unit import Unit


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in nested dicts, lists and tuples; other values are kept."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: cast(item, dtype) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast(item, dtype) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(cast(item, dtype) for item in value)
    return value


def autocast(device: torch.device, dtype: torch.dtype, *, is_sharded: bool) -> AbstractContextManager[object]:
    """Operators compute in ``dtype`` where autocast says so.

    Args:
        is_sharded: parameters are gathered for forward and for backward.

    Memory: of sharded parameters that are trained, one cast at a time. Other casts are kept as torch keeps them.
    """
    stack = ExitStack()
    stack.enter_context(torch.autocast(device.type, dtype=dtype, cache_enabled=not is_sharded))
    if is_sharded:
        stack.enter_context(saving_parameters())
    return stack


def explain_mixed_formats(error: Exception, model: nn.Module, parameter: torch.dtype | None, inputs: Any) -> None:
    """Add a note to an error about dtypes where inputs or buffers have another dtype than the parameters.

    Args:
        parameter: the dtype that the config gives parameters; None: their own.
        inputs: of the forward that raised it, as the model got them.
    """
    if not isinstance(error, RuntimeError) or not any(word in str(error) for word in ("dtype", "scalar type")):
        return
    own = {p.dtype for p in model.parameters() if p.is_floating_point()}
    given = {leaf.dtype for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)} - own
    if given:
        error.add_note(
            f"shoal: inputs are {_short(given)}, and parameters {_short(own)}: cast the inputs to the parameters' dtype"
            ' (with fp16, "auto_cast": true does so).'
        )
    if parameter is None:
        return
    names = [name for name, buffer in model.named_buffers() if buffer.is_floating_point() and buffer.dtype != parameter]
    if names:
        short = str(parameter).removeprefix("torch.")
        error.add_note(
            f"shoal: buffers keep a format of their own beside parameters in {short}: "
            f"{', '.join(names[:5])}{' ...' if len(names) > 5 else ''}. If the model mixes them with activations, cast"
            ' them there (buffer.to(x.dtype)), or set "data_types": {"buffer_dtype": "..."} in the config.'
        )


def _short(dtypes: Iterable[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def explain_mismatch(error: Exception, units: Iterable[Unit]) -> None:
    """Add a note to the error of ranks that gather different units: one of them may have read a parameter alone.

    Args:
        units: of this rank, with what their forwards read of each other.
    """
    if not isinstance(error, CommError) or error.code != "comm-mismatch" or "all_gather" not in str(error):
        return
    reads = [(unit.name, read.name) for unit in units for read in unit.shared if f"{read.name!r}" in error.what]
    found = "".join(f" On this rank {reader!r} has read parameters of unit {read!r}." for reader, read in reads)
    error.add_note(
        "shoal: at stage 3, reading a sharded parameter outside the forward of its module gathers the parameter's unit."
        f"{found} If not every rank reads it (as in: if rank == 0: print(p.sum())), the ranks disagree as above: let"
        " all ranks enter `with shoal.zero.GatheredParameters([p]):` and read it there."
    )

"""Casts a forward's inputs to the dtype that the model computes in, and explains errors of a forward."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shoal.errors import CommError, ShoalError
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


def batch_size_note(inputs: Any, micro_batch: int) -> str | None:
    """A warning where no tensor has ``micro_batch`` samples along dim 0, or along dim 1 as in [sequence, batch]."""
    shapes = [leaf.shape for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.ndim]
    if not shapes or any(micro_batch in shape[:2] for shape in shapes):
        return None
    found = sorted({shape[0] for shape in shapes})
    return (
        f"the first batch has {' or '.join(map(str, found))} samples, and train_micro_batch_size_per_gpu is"
        f" {micro_batch}: engine.global_samples, train_batch_size and rates by samples count {micro_batch}. Give the"
        " DataLoader batch_size=engine.train_micro_batch_size_per_gpu(), or change the config."
    )


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


def explain_split_module(error: Exception, model: nn.Module) -> None:
    """Add a note to an error inside of a module of which layers are split over tensor-parallel ranks.

    What the module has for every head or element, beside those layers, is whole, and does not fit them.
    """
    if not isinstance(error, RuntimeError | ValueError | IndexError) or isinstance(error, ShoalError):
        return
    frames = traceback.walk_tb(error.__traceback__)
    selves = [frame.f_locals.get("self") for frame, _ in frames]
    names = {id(module): name for name, module in model.named_modules()}
    for module in reversed(selves):
        if not isinstance(module, nn.Module) or id(module) not in names:
            continue
        inner = {name: part for name, part in module.named_modules() if name}
        split = [name for name, part in inner.items() if hasattr(part, "tensor_split")]
        if split:
            if not any(isinstance(part, nn.ModuleList) for part in inner.values()):  # a layer or less
                error.add_note(
                    f"shoal: of {names[id(module)]} ({type(module).__name__}) {', '.join(split)} are split over"
                    " tensor-parallel ranks. If one rank (parallel.tp 1) does not raise this, the module has something"
                    ' beside them that fits all heads or elements only: leave these layers whole ("skip") in'
                    " parallel.tp_plan; shoal.parallel.tensor.plan_for(model) returns the plan that was used."
                )
            return


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

"""What an operator reads and writes, from its schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

_SYNCHRONIZING = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@dataclass(frozen=True)
class Effects:
    """Of one operator.

    Attributes: ``arguments``: place, name and whether it is written, of each argument that is accessed and not only
    viewed. ``unknown``: why the schema does not tell; empty: it does. ``blocks_host``: the host needs the result.
    """

    arguments: tuple[tuple[int, str, bool], ...] = ()
    unknown: str = ""
    blocks_host: bool = False
    is_custom: bool = False


@cache
def effects_of(operator: Any) -> Effects:
    """Read the schema of an operator."""
    if not isinstance(operator, torch._ops.OpOverload):
        return Effects(unknown="it is no operator with a schema")
    schema = operator._schema
    if torch.Tag.inplace_view in operator.tags:
        return Effects()
    arguments = []
    for place, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        if "Tensor" in str(argument.type) and (alias is None or alias.is_write):
            arguments.append((place, argument.name, alias is not None))
    unknown = ""
    if arguments and not any(written for _, _, written in arguments) and not schema.returns:
        unknown = "its schema has no result and no argument that it writes"
    is_custom = operator.namespace not in ("aten", "prims", "prim", "c10d", "_c10d_functional")
    return Effects(tuple(arguments), unknown, any(tag in operator.tags for tag in _SYNCHRONIZING), is_custom)


def accessed(
    effects: Effects, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that a call reads, and those that it writes."""
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    for place, name, is_written in effects.arguments:
        value = args[place] if place < len(args) else kwargs.get(name)
        (writes if is_written else reads).extend(tensors_of(value))
    return reads, writes


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a value of a call: itself, or those of a list."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_of(each)


def parts_of_memory(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The dense tensors that a tensor consists of. Raises: TypeError: of a layout that is not known."""
    if tensor.layout is torch.strided:
        yield tensor
    elif tensor.layout is torch.sparse_coo:
        yield tensor._indices()
        yield tensor._values()
    else:
        raise TypeError(str(tensor.layout))

"""Batches that are copied to an accelerator while the one before is computed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map

from shoal.comm.side_stream import SideStream
from shoal.streams import host_memory, keep_for_current_stream, streams_of

T = TypeVar("T")


def ahead_on(device: torch.device | None, batches: Iterator[T]) -> Iterator[T]:
    """Batches with their tensors on ``device``; each is read and copied before the one ahead of it is handed out.

    Tensors that are there already are handed out as they are; those on the meta device have no values and stay there.

    Args:
        device: None, or a CPU: batches are handed out as they are.

    Memory: one batch more on the device, and one in pinned memory.
    Order: copies are in a stream next to the current one, which waits for a batch when it is handed out.
    """
    if device is None or streams_of(device) is None:
        yield from batches
        return
    side = SideStream(device)
    waiting: tuple[Any, Any, Any] | None = None  # a batch, its copy's end, and its source, which exists until then
    for batch in batches:
        pinned = _map(lambda tensor: _pinned(tensor, device), batch)
        with side.queued() as copied:
            moved = _map(lambda tensor: _copy(tensor, device), pinned)
        if waiting is not None:
            yield _handed_out(*waiting)
        waiting = moved, copied, pinned
    if waiting is not None:
        yield _handed_out(*waiting)


def _map(function: Callable[[torch.Tensor], Any], batch: Any) -> Any:
    """A batch with ``function`` of each tensor that has values.

    Mappings of kinds that torch does not know, as Transformers' ``BatchEncoding``, are copied; other objects stay.
    """

    def mapped(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf if leaf.is_meta else function(leaf)
        if isinstance(leaf, MutableMapping):
            made = copy.copy(leaf)
            made.update({key: _map(function, value) for key, value in leaf.items()})
            return made
        return leaf

    return tree_map(mapped, batch)


def _handed_out(batch: Any, copied: Any, _: Any) -> Any:
    copied.wait()
    _map(keep_for_current_stream, batch)
    return batch


def _pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":  # a simulated accelerator
        return host_memory(tensor, is_pinned=True)
    return tensor.pin_memory() if tensor.device.type == "cpu" else tensor


def _copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return tensor.to(device, non_blocking=True)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor, non_blocking=True)

"""What this rank has of a sharded model, by parameter: the one list that saving and loading both go through.

A local shard is a contiguous range of one flattened parameter, or of its optimizer state, in one or more parts of
memory. The parameter may itself be a rectangle of a larger, global tensor (a tensor-parallel rank's columns):

    global [4, 6], columns 2 to 4                . . # # . .        elements 1..6 of the flattened local part are
                                                 . . # # . .        the rectangles  rows 0..1, columns 3..4
                                                 . . # # . .                        rows 1..3, columns 2..4
                                                 . . # # . .

Where several ranks have the same range, each writes its share of it; each loads the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from typing import Any

import torch
from torch import nn

from shoal.checkpoint.blocks import TensorEntry
from shoal.checkpoint.element_sums import NOTHING, Sums, added, element_sums
from shoal.checkpoint.manifest import MODEL, OPTIMIZER
from shoal.checkpoint.rectangles import Rectangle, rectangles
from shoal.errors import CheckpointError
from shoal.parallel.expert.held import global_names
from shoal.running.runtime import ShardedModel
from shoal.running.step import ShardedStep
from shoal.sharding.axes import Axes
from shoal.sharding.buffer import FlatBuffer
from shoal.sharding.encoded_state import EncodedState, is_elementwise
from shoal.sharding.layout import ParameterSpec, Ranges
from shoal.sharding.param_group import ParameterGroup
from shoal.sharding.placement import Tier
from shoal.sharding.storage import placeholder


def local_rectangles(spec: ParameterSpec, begin: int, end: int) -> Iterator[tuple[int, Rectangle]]:
    """Elements ``[begin, end)`` of the flattened local part, as rectangles of the global tensor.

    Yields: where each begins in the flattened local part, and the rectangle, in order.
    """
    for inner in rectangles(spec.shape, begin, end):
        for part in _within_ranges(spec.local, inner):
            yield begin, part
            begin += part.numel


def _within_ranges(local: Sequence[Ranges], inner: Rectangle) -> Iterator[Rectangle]:
    """A rectangle of the local part as rectangles of the global tensor, in the order of its elements.

    Where the last dim that has several ranges is not the first, there is one for each range and row.
    """
    if not local:
        yield inner
        return
    cuts = [list(_cuts(*each)) for each in zip(local, inner.start, inner.shape, strict=True)]
    last = max((dim for dim, own in enumerate(cuts) if len(own) > 1), default=0)
    rest = [own[0][0] for own in cuts[last + 1 :]]
    for row in product(*(chain.from_iterable(range(at, at + size) for at, size in own) for own in cuts[:last])):
        for at, size in cuts[last]:
            yield Rectangle((*row, at, *rest), (*[1] * last, size, *inner.shape[last + 1 :]))


def _cuts(ranges: Ranges, begin: int, numel: int) -> Iterator[tuple[int, int]]:
    """Elements ``[begin, begin + numel)`` of a dim of the local part: where they begin in the global one, and how many.

    >>> list(_cuts(((2, 4), (8, 10)), 1, 2))
    [(3, 1), (8, 1)]
    """
    at = 0
    for start, stop in ranges:
        low, high = max(at, begin), min(at + stop - start, begin + numel)
        if low < high:
            yield start + low - at, high - low
        at += stop - start


@dataclass(frozen=True)
class LocalShard:
    """The elements ``[begin, end)`` of a flattened parameter (or of state like it), in this rank's memory."""

    kind: str
    spec: ParameterSpec
    begin: int
    parts: tuple[torch.Tensor, ...]  # 1-D, one after the other
    num_copies: int = 1  # ranks that have this very range
    copy: int = 0  # which of them this one is
    fetch: Callable[[], tuple[torch.Tensor, ...]] | None = None  # where ``parts`` only show sizes: the memory itself
    is_private: bool = False  # changed by Shoal alone, once a pending save has copied it
    is_encoded: bool = False  # in memory in another format, so that values that are set may be rounded

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def numel(self) -> int:
        return sum(part.numel() for part in self.parts)

    @property
    def end(self) -> int:
        return self.begin + self.numel

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def share(self) -> tuple[int, int]:
        """The part of ``[begin, end)`` that this rank writes."""
        numel = self.numel
        return (
            self.begin + numel * self.copy // self.num_copies,
            self.begin + numel * (self.copy + 1) // self.num_copies,
        )

    def sums_of_share(self, dtype: torch.dtype) -> tuple[Sums, int]:
        """The part of the tensor's element sums that this rank's share has, and its elements.

        Args:
            dtype: in which the tensor was saved. Where this rank's cannot hold all its values, there is nothing to sum.
        """
        if self.is_encoded or torch.promote_types(dtype, self.dtype) != self.dtype:
            return NOTHING, 0
        sums, numel = NOTHING, 0
        for low, rectangle in local_rectangles(self.spec, *self.share()):
            flat = torch.cat([part.detach().reshape(-1).to(dtype) for part in self.part(low, low + rectangle.numel)])
            sums, numel = added(sums, element_sums(flat, rectangle, self.spec.global_shape)), numel + flat.numel()
        return sums, numel

    def part(self, begin: int, end: int) -> list[torch.Tensor]:
        """The memory of ``[begin, end)``, which lies inside. Of state on a disk: until another group is asked for."""
        views = []
        at = self.begin
        for part in self.parts if self.fetch is None else self.fetch():
            low, high = max(begin, at), min(end, at + part.numel())
            if low < high:
                views.append(part[low - at : high - at])
            at += part.numel()
        return views

    def rectangles(self) -> Iterator[tuple[int, Rectangle]]:
        """As ``local_rectangles`` of all of it."""
        return local_rectangles(self.spec, self.begin, self.end)

    def entries(self) -> Iterator[tuple[TensorEntry, tuple[int, ...]]]:
        """What this rank writes: an entry for each rectangle of its share, and where that begins in the tensor."""
        for low, rectangle in local_rectangles(self.spec, *self.share()):
            bounds = ",".join(f"{s}:{s + n}" for s, n in zip(rectangle.start, rectangle.shape, strict=True))
            is_whole = rectangle.shape == self.spec.global_shape
            key = f"{self.kind}/{self.name}" + ("" if is_whole else f"[{bounds}]")
            read = partial(self.part, low, low + rectangle.numel)
            is_kept = self.is_private and self.fetch is None
            place = rectangle, self.spec.global_shape
            yield TensorEntry(key, self.dtype, rectangle.shape, read, is_kept=is_kept, place=place), rectangle.start


class LocalShards:
    """The shards of one engine's model and optimizer.

    Args:
        step: None: the engine has no optimizer.
    """

    def __init__(
        self, sharded: ShardedModel, states: Sequence[ParameterGroup], step: ShardedStep | None, axes: Axes
    ) -> None:
        self.sharded = sharded
        self.states = list(states)
        self.step = step
        self.axes = axes
        self._visited: FlatBuffer | ParameterGroup | None = None  # whose values are in memory, until ``_visit.close()``
        self._visit = ExitStack()

    def global_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every parameter, by name."""
        return {spec.name: spec.global_shape for group in self.sharded.groups for spec in group.buffer.layout.specs}

    def _copies(self, group: ParameterGroup) -> tuple[int, int]:
        """How many ranks hold this rank's range of a group's parameters, and which of them this rank is."""
        copy, num_copies = group.axes.replica
        buffer = group.buffer
        if buffer.end - buffer.begin == buffer.layout.numel:
            return num_copies * buffer.comm.size, copy * buffer.comm.size + buffer.comm.rank
        return num_copies, copy

    def model(self, *, exclude_frozen: bool = False) -> Iterator[LocalShard]:
        """Values of parameters: master weights where there are any."""
        for group in self.sharded.groups:
            buffer, is_trained = group.buffer, group.is_trained
            if exclude_frozen and not is_trained:
                continue
            flat = group.main if is_trained else buffer.shard
            num_copies, copy = self._copies(group)
            for segment in buffer.layout.segments_in(buffer.begin, buffer.end):
                spec = buffer.layout.specs[segment.slot]
                part = flat[segment.start : segment.stop]
                fetch = None
                if is_trained and group.disk is not None and group.has_own_main:
                    fetch = partial(self._master_of, group, segment.start, segment.stop)
                elif not is_trained and buffer.storage.tier is Tier.DISK:
                    fetch = partial(self._frozen, buffer, segment.start, segment.stop)
                is_private = is_trained and (group.has_own_main or buffer.is_sharded)
                yield LocalShard(MODEL, spec, segment.offset, (part,), num_copies, copy, fetch, is_private)

    def optimizer(self) -> Iterator[LocalShard]:
        """Optimizer state of one element per element of the parameter, as far as it exists."""
        if self.step is None:
            return
        for group in self.states:
            num_copies, copy = self._copies(group)
            for index, slot in enumerate(group.buffer.layout.specs):
                segments = [segment for _, segment in group.ranges_of(index)]
                for key, parts in self._state_parts(group, index).items():
                    is_in_memory = group.disk is None and group.state_format is None
                    fetch = None if is_in_memory else partial(self._fetched, group, index, key)
                    yield LocalShard(
                        OPTIMIZER + key,
                        slot,
                        segments[0].offset,
                        tuple(parts),
                        num_copies,
                        copy,
                        fetch,
                        is_private=True,
                        is_encoded=group.state_format is not None,
                    )

    def _state_parts(self, group: ParameterGroup, index: int) -> dict[str, list[torch.Tensor]]:
        assert self.step is not None
        parts: dict[str, list[torch.Tensor]] = {}
        for part, segment in group.ranges_of(index):
            for key, value in self.step.optimizer.state.get(part.param, {}).items():
                if isinstance(value, EncodedState):  # decoded by ``_fetched``
                    shown = placeholder((segment.stop - segment.start,), torch.float32, value.memory.device)
                    parts.setdefault(key, []).append(shown)
                elif is_elementwise(value, part.param.numel()):
                    parts.setdefault(key, []).append(value[segment.start : segment.stop])
            for kept in group.kept:
                for key, value in kept.saved.items():
                    parts.setdefault(key, []).append(value[part.start :][segment.start : segment.stop])
        return parts

    def _fetched(self, group: ParameterGroup, index: int, key: str) -> tuple[torch.Tensor, ...]:
        self._enter(group)
        return tuple(self._state_parts(group, index)[key])

    def _master_of(self, group: ParameterGroup, start: int, stop: int) -> tuple[torch.Tensor, ...]:
        self._enter(group)
        return (group.main[start:stop],)

    def _frozen(self, buffer: FlatBuffer, start: int, stop: int) -> tuple[torch.Tensor, ...]:
        self._enter(buffer)
        return (buffer.shard[start:stop],)

    def _enter(self, home: FlatBuffer | ParameterGroup) -> None:
        """Have the values of one group, or of one frozen buffer, in memory, and of no other."""
        if self._visited is not home:
            self.leave()
            self._visit.enter_context(home.resident() if isinstance(home, ParameterGroup) else home.storage.resident())
            self._visited = home

    def leave(self) -> None:
        """What was fetched is stored again."""
        self._visited = None
        self._visit.close()

    def scalars(self) -> dict[str, dict[str, Any]]:
        """Optimizer state that is one value for a whole parameter, as far as this rank has a part of it.

        Raises: CheckpointError: state that is neither one value nor one element per element.
        """
        result: dict[str, dict[str, Any]] = {}
        if self.step is None:
            return result
        for group in self.states:
            for index, slot in enumerate(group.buffer.layout.specs):
                for part, _ in group.ranges_of(index):
                    for key, value in self.step.optimizer.state.get(part.param, {}).items():
                        if is_elementwise(value, part.param.numel()):
                            continue
                        if self.step.is_whole_tensor and (key == "steps" or key in self.step.by_parameter):
                            members = [i for i, s in enumerate(group.buffer.layout.specs) if s.group == part.group]
                            own = "step" if key == "steps" else key
                            result.setdefault(slot.name, {})[own] = value[0, members.index(index)].clone()
                            continue
                        if self.step.is_whole_tensor and key == "step" and "step" in result.get(slot.name, {}):
                            continue  # the parameter's own count is known
                        if isinstance(value, torch.Tensor) and value.numel() != 1:
                            raise CheckpointError(
                                f"optimizer state {key!r} of shape {tuple(value.shape)} belongs to"
                                f" {part.param.numel()} elements of several parameters and cannot be distinguished.",
                                where=f"parameter {slot.name!r}, {type(self.step.optimizer).__name__}",
                                do="use an optimizer whose state is one value per element, or one per parameter.",
                                code="checkpoint-state",
                            )
                        result.setdefault(slot.name, {})[key] = value
        return result


def named_parameters_of(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters by their names in the whole model: an expert in a list has its number in the layer."""
    rename = global_names(model)
    for name, parameter in model.named_parameters(remove_duplicate=remove_duplicate):
        yield rename(name), parameter


def names_of(model: nn.Module) -> tuple[dict[int, str], dict[str, tuple[str, ...]]]:
    """Each parameter's first name by its ``id``, and the other names of tied ones by that name."""
    first: dict[int, str] = {}
    aliases: dict[str, tuple[str, ...]] = {}
    for name, parameter in named_parameters_of(model, remove_duplicate=False):
        if id(parameter) in first:
            aliases[first[id(parameter)]] = (*aliases.get(first[id(parameter)], ()), name)
        else:
            first[id(parameter)] = name
    return first, aliases


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The persistent buffers, by name."""
    buffers: dict[str, torch.Tensor] = {}
    rename = global_names(model)
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                buffers[rename(f"{prefix}.{name}" if prefix else name)] = buffer
    return buffers

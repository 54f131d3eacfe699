"""Where each parameter lies in a flat buffer and which range each rank owns. Pure arithmetic: no tensors.

    buffer   | w: 0..6 | gap | b: 64..67 | gap .. | padding |
    ranks    |<---- rank 0: 0..128 ---->|<---- rank 1: 128..256 ---->|

Every parameter begins at a multiple of ``alignment`` elements (kernels want aligned matrices) and every rank's range
too. The parameters of one optimizer group lie side by side, so that a rank's part of a group is one contiguous range.

>>> layout = lay_out([("w", (2, 3), 0), ("b", (3,), 0)], num_shards=2, alignment=64)
>>> [(spec.name, spec.offset, spec.numel) for spec in layout.specs]
[('w', 0, 6), ('b', 64, 3)]
>>> layout.numel, layout.shard_numel
(128, 64)
>>> layout.segments_in(*layout.owned(1))
(Segment(slot=1, start=0, stop=3, offset=0),)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shoal.memory.transfer import Intervals

Ranges = tuple[tuple[int, int], ...]  # of one dim: (start, stop)
# Of each parameter of a buffer, dim 0 is as many equal blocks as this has entries: which of them a forward uses.
Used = tuple[bool, ...]


def uses_any(used: Used | None) -> bool:
    """True if a block is used; None: all are."""
    return used is None or any(used)


ALIGNMENT = 64  # elements: 128 bytes of a 16-bit parameter, two cache lines of an fp32 one


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter in a buffer: ``full[offset : offset + numel].view(shape)``.

    A parameter that is split over an axis of the model (tensor or expert parallel) is a part of a larger tensor:
    ``local`` says which elements of ``global_shape`` this one is, as ranges (start, stop) of each dim, one after the
    other. A dim may have several (experts that changed ranks; a fused weight, split inside each of its blocks). A
    checkpoint needs no more.

    The four sets name mesh axes, and say what the ranks along each hold. Which axis shards the parameter, over which
    its gradient is summed, and which ranks hold the same range follow from them (``Axes.of_group``). An axis that is in
    none of them is data-parallel, or concerns no parameter.
    """

    name: str  # fully qualified
    shape: tuple[int, ...]
    numel: int
    offset: int
    group: int  # index of the optimizer's parameter group; -1: none (frozen)
    global_shape: tuple[int, ...] = ()  # default: ``shape``
    local: tuple[Ranges, ...] = ()  # default: all of it
    split_over: frozenset[str] = frozenset()  # other parts of the tensor
    others_over: frozenset[str] = frozenset()  # other tensors in its place
    summand_over: frozenset[str] = frozenset()  # the same, and each rank has a summand of the gradient
    copies_over: frozenset[str] = frozenset()  # the same, with equal gradients

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...]) -> ParameterSpec:
        """A tensor that is not in a buffer."""
        return cls(name, shape, math.prod(shape), 0, -1)

    @classmethod
    def part(cls, name: str, global_shape: tuple[int, ...], local: tuple[Ranges, ...]) -> ParameterSpec:
        """A part of a larger tensor that is not in a buffer."""
        shape = tuple(sum(stop - start for start, stop in ranges) for ranges in local)
        return cls(name, shape, math.prod(shape), 0, -1, global_shape, local)

    @classmethod
    def along(cls, name: str, global_shape: tuple[int, ...], dim: int, ranges: Ranges) -> ParameterSpec:
        """A part that is split in one dim."""
        whole: list[Ranges] = [((0, size),) for size in global_shape]
        return cls.part(name, global_shape, (*whole[:dim], ranges, *whole[dim + 1 :]))

    def __post_init__(self) -> None:
        if not self.global_shape:
            object.__setattr__(self, "global_shape", self.shape)
            object.__setattr__(self, "local", tuple(((0, size),) for size in self.shape))
        if tuple(sum(stop - start for start, stop in ranges) for ranges in self.local) != self.shape:
            raise ValueError(f"parameter {self.name!r} has shape {self.shape}, its part {self.local}")
        if any(stop > size for ranges, size in zip(self.local, self.global_shape, strict=True) for _, stop in ranges):
            raise ValueError(f"the part {self.local} of {self.name!r} exceeds its global shape {self.global_shape}")
        if len(frozenset().union(*self.axes)) < sum(map(len, self.axes)):
            raise ValueError(f"an axis is in two of the sets {self.axes} of {self.name!r}")
        if len(self.split_over) > 1:
            raise ValueError(f"{self.name!r} is split over {set(self.split_over)}: name the axis that is made of them")

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Elements from one index of each dim to the next."""
        return tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))

    @property
    def axes(self) -> tuple[frozenset[str], ...]:
        """The four sets: equal for the parameters of one group."""
        return self.split_over, self.others_over, self.summand_over, self.copies_over

    @property
    def is_divided(self) -> bool:
        """True if other ranks hold other parts of the tensor, or other tensors in its place."""
        return bool(self.split_over or self.others_over)

    @property
    def is_part(self) -> bool:
        """True if it is less than the whole tensor."""
        return self.shape != self.global_shape

    @property
    def global_numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.global_shape)


@dataclass(frozen=True)
class Segment:
    """The part of one parameter that lies in a range of a buffer."""

    slot: int
    start: int  # in the range
    stop: int
    offset: int  # of its first element in the flattened parameter


@dataclass(frozen=True)
class BufferLayout:
    """The layout of one buffer.

    Invariants (checked): parameters are in order, do not overlap and are aligned; groups are contiguous; ``numel``
    divides by ``num_shards``.
    """

    specs: tuple[ParameterSpec, ...]
    numel: int
    num_shards: int
    alignment: int = ALIGNMENT

    def __post_init__(self) -> None:
        end = 0
        groups: list[int] = []
        for spec in self.specs:
            if spec.offset < end or spec.offset % self.alignment:
                raise ValueError(f"parameter {spec.name!r} at {spec.offset} overlaps its predecessor or is not aligned")
            end = spec.offset + spec.numel
            if not groups or groups[-1] != spec.group:
                groups.append(spec.group)
        if len(groups) != len(set(groups)):
            raise ValueError(f"groups are not contiguous: {groups}")
        if end > self.numel or self.numel % (self.num_shards * self.alignment):
            raise ValueError(f"{self.numel} elements do not hold {end}, or do not divide over {self.num_shards} shards")

    @property
    def shard_numel(self) -> int:
        return self.numel // self.num_shards

    @cached_property
    def parameter_numel(self) -> int:
        """Elements of parameters, without gaps and padding."""
        return sum(spec.numel for spec in self.specs)

    @cached_property
    def signature(self) -> tuple[int, tuple[tuple[int, tuple[int, ...]], ...]]:
        """Equal for buffers whose parameters lie alike: they can share a buffer, its views and its zeroed gaps."""
        return self.numel, tuple((spec.offset, spec.shape) for spec in self.specs)

    def owned(self, rank: int) -> tuple[int, int]:
        """The range of the buffer that ``rank`` owns."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def segment_in(self, slot: int, begin: int, end: int) -> Segment | None:
        """The part of one parameter in ``[begin, end)`` of the buffer; ``start`` and ``stop`` count from ``begin``."""
        spec = self.specs[slot]
        low, high = max(spec.offset, begin), min(spec.offset + spec.numel, end)
        return Segment(slot, low - begin, high - begin, low - spec.offset) if low < high else None

    def segments_in(self, begin: int, end: int) -> tuple[Segment, ...]:
        """The parts of all parameters."""
        parts = (self.segment_in(slot, begin, end) for slot in range(len(self.specs)))
        return tuple(part for part in parts if part is not None)

    def group_range(self, group: int, begin: int, end: int) -> tuple[int, int]:
        """The part of ``[begin, end)`` that belongs to ``group``, gaps inside included, counted from ``begin``."""
        members = [spec for spec in self.specs if spec.group == group]
        if not members:
            return 0, 0
        low = max(members[0].offset, begin)
        high = min(members[-1].offset + members[-1].numel, end)
        return (low - begin, high - begin) if low < high else (0, 0)

    def ranges_of(self, used: Used | None) -> Ranges | None:
        """Where blocks of the parameters lie in the buffer; None: they are all."""
        if used is None or all(used):
            return None
        ranges = Intervals()
        for spec in self.specs:
            numel = spec.numel // len(used)
            for block, is_used in enumerate(used):
                if is_used:
                    ranges.add(spec.offset + block * numel, spec.offset + (block + 1) * numel)
        return tuple(ranges.ranges)

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """The optimizer groups in this buffer, in order."""
        return tuple(dict.fromkeys(spec.group for spec in self.specs))


def lay_out(
    parameters: Sequence[ParameterSpec | tuple[str, tuple[int, ...], int]],
    *,
    num_shards: int,
    alignment: int = ALIGNMENT,
) -> BufferLayout:
    """Lay parameters out in one buffer. The order within a group is kept.

    Args:
        parameters: specs whose offset is not used, or (name, shape, group) of whole tensors.

    Returns: a layout whose ``specs`` are sorted by group.
    """
    given = [
        entry if isinstance(entry, ParameterSpec) else replace(ParameterSpec.whole(*entry[:2]), group=entry[2])
        for entry in parameters
    ]
    specs, offset = [], 0
    for spec in sorted(given, key=lambda spec: spec.group):
        specs.append(replace(spec, offset=offset))
        offset += -(-spec.numel // alignment) * alignment
    unit = num_shards * alignment
    return BufferLayout(tuple(specs), -(-offset // unit) * unit, num_shards, alignment)

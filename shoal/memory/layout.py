"""Where each parameter lies in a flat bucket and which range each rank owns. Pure arithmetic: no tensors.

    bucket   | w: 0..6 | gap | b: 64..67 | gap .. | padding |
    ranks    |<---- rank 0: 0..128 ---->|<---- rank 1: 128..256 ---->|

Every parameter begins at a multiple of ``alignment`` elements (kernels want aligned matrices) and every rank's range
too. The parameters of one optimizer group lie side by side, so that a rank's part of a group is one contiguous range.

>>> layout = lay_out([("w", (2, 3), 0), ("b", (3,), 0)], num_shards=2, alignment=64)
>>> [(slot.name, slot.offset, slot.numel) for slot in layout.slots]
[('w', 0, 6), ('b', 64, 3)]
>>> layout.numel, layout.shard_numel
(128, 64)
>>> layout.segments(1)
(Segment(slot=1, start=0, stop=3, offset=0),)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

ALIGNMENT = 64  # elements: 128 bytes of a 16-bit parameter, two cache lines of an fp32 one


@dataclass(frozen=True)
class Slot:
    """One parameter in a bucket: ``full[offset : offset + numel].view(shape)``."""

    name: str
    shape: tuple[int, ...]
    numel: int
    offset: int
    group: int  # index of the optimizer's parameter group; -1: none (frozen)


@dataclass(frozen=True)
class Segment:
    """The part of one parameter that lies in a range of a bucket."""

    slot: int
    start: int  # in the range
    stop: int
    offset: int  # of its first element in the flattened parameter


@dataclass(frozen=True)
class BucketLayout:
    """The layout of one bucket.

    Invariants (checked): slots are in order, do not overlap and are aligned; groups are contiguous; ``numel`` divides
    by ``num_shards``.
    """

    slots: tuple[Slot, ...]
    numel: int
    num_shards: int
    alignment: int = ALIGNMENT

    def __post_init__(self) -> None:
        end = 0
        groups: list[int] = []
        for slot in self.slots:
            if slot.offset < end or slot.offset % self.alignment:
                raise ValueError(f"slot {slot.name!r} at {slot.offset} overlaps its predecessor or is not aligned")
            end = slot.offset + slot.numel
            if not groups or groups[-1] != slot.group:
                groups.append(slot.group)
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
        return sum(slot.numel for slot in self.slots)

    @cached_property
    def signature(self) -> tuple[int, tuple[tuple[int, tuple[int, ...]], ...]]:
        """Equal for buckets whose parameters lie alike: they can share a buffer, its views and its zeroed gaps."""
        return self.numel, tuple((slot.offset, slot.shape) for slot in self.slots)

    def owned(self, rank: int) -> tuple[int, int]:
        """The range of the bucket that ``rank`` owns."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def segments_in(self, begin: int, end: int) -> tuple[Segment, ...]:
        """The parts of parameters in ``[begin, end)`` of the bucket; ``start`` and ``stop`` count from ``begin``."""
        found = []
        for index, slot in enumerate(self.slots):
            low, high = max(slot.offset, begin), min(slot.offset + slot.numel, end)
            if low < high:
                found.append(Segment(index, low - begin, high - begin, low - slot.offset))
        return tuple(found)

    def segments(self, rank: int) -> tuple[Segment, ...]:
        """The parts of parameters that ``rank`` owns."""
        return self.segments_in(*self.owned(rank))

    def group_range(self, group: int, begin: int, end: int) -> tuple[int, int]:
        """The part of ``[begin, end)`` that belongs to ``group``, gaps inside included, counted from ``begin``."""
        members = [slot for slot in self.slots if slot.group == group]
        if not members:
            return 0, 0
        low = max(members[0].offset, begin)
        high = min(members[-1].offset + members[-1].numel, end)
        return (low - begin, high - begin) if low < high else (0, 0)

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """The optimizer groups in this bucket, in order."""
        return tuple(dict.fromkeys(slot.group for slot in self.slots))


def lay_out(
    parameters: Sequence[tuple[str, tuple[int, ...], int]], *, num_shards: int, alignment: int = ALIGNMENT
) -> BucketLayout:
    """Lay parameters, given as (name, shape, group), out in one bucket. The order within a group is kept.

    Returns: a layout whose ``slots`` are sorted by group.
    """
    slots, offset = [], 0
    for name, shape, group in sorted(parameters, key=lambda entry: entry[2]):
        numel = math.prod(shape)
        slots.append(Slot(name, tuple(shape), numel, offset, group))
        offset += -(-numel // alignment) * alignment
    unit = num_shards * alignment
    return BucketLayout(tuple(slots), -(-offset // unit) * unit, num_shards, alignment)

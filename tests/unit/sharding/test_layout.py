"""Where parameters lie in a bucket: literal offsets, and the properties that every layout has."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.sharding.layout import ALIGNMENT, BufferLayout, ParameterSpec, Segment, lay_out


def test_parameters_begin_at_multiples_of_the_alignment_and_the_end_divides_by_the_ranks() -> None:
    layout = lay_out([("w", (10, 10), 0), ("b", (10,), 0), ("scalar", (), 0)], num_shards=3)
    assert [(slot.name, slot.offset, slot.numel) for slot in layout.specs] == [
        ("w", 0, 100),
        ("b", 128, 10),
        ("scalar", 192, 1),
    ]
    assert (layout.numel, layout.shard_numel, layout.parameter_numel) == (384, 128, 111)
    assert [layout.owned(rank) for rank in range(3)] == [(0, 128), (128, 256), (256, 384)]


def test_each_rank_owns_the_parts_that_lie_in_its_range() -> None:
    layout = lay_out([("w", (10, 10), 0), ("b", (10,), 0), ("scalar", (), 0)], num_shards=6, alignment=32)
    assert (layout.numel, layout.shard_numel) == (192, 32)
    assert [layout.segments_in(*layout.owned(rank)) for rank in range(6)] == [
        (Segment(slot=0, start=0, stop=32, offset=0),),
        (Segment(slot=0, start=0, stop=32, offset=32),),
        (Segment(slot=0, start=0, stop=32, offset=64),),
        (Segment(slot=0, start=0, stop=4, offset=96),),
        (Segment(slot=1, start=0, stop=10, offset=0),),
        (Segment(slot=2, start=0, stop=1, offset=0),),
    ]


def test_parameters_of_one_group_lie_side_by_side_and_keep_their_order() -> None:
    layout = lay_out([("a", (3,), 1), ("b", (3,), 0), ("c", (3,), 1), ("d", (3,), -1)], num_shards=1)
    assert [(slot.name, slot.offset, slot.group) for slot in layout.specs] == [
        ("d", 0, -1),
        ("b", 64, 0),
        ("a", 128, 1),
        ("c", 192, 1),
    ]
    assert layout.groups == (-1, 0, 1)
    assert layout.group_range(1, 0, 256) == (128, 195)
    assert layout.group_range(1, 150, 256) == (0, 45)
    assert layout.group_range(0, 0, 64) == (0, 0)
    assert layout.group_range(7, 0, 256) == (0, 0)


def test_empty_parameters_take_no_memory_and_an_empty_buffer_has_none() -> None:
    layout = lay_out([("a", (0, 4), 0), ("b", (2,), 0), ("c", (0,), 0)], num_shards=2)
    assert [(slot.offset, slot.numel) for slot in layout.specs] == [(0, 0), (0, 2), (64, 0)]
    assert layout.numel == 128
    assert lay_out([("a", (0, 4), 0)], num_shards=4).numel == 0


def test_buffers_with_the_same_layout_have_one_signature() -> None:
    ours = lay_out([("layers.0.w", (8, 4), 0), ("layers.0.b", (4,), 0)], num_shards=2)
    alike = lay_out([("layers.1.w", (8, 4), 0), ("layers.1.b", (4,), 0)], num_shards=2)
    transposed = lay_out([("layers.1.w", (4, 8), 0), ("layers.1.b", (4,), 0)], num_shards=2)
    assert ours.signature == alike.signature != transposed.signature


@pytest.mark.parametrize(
    ("slots", "numel", "message"),
    [
        ([ParameterSpec("a", (100,), 100, 0, 0), ParameterSpec("b", (4,), 4, 64, 0)], 256, "'b' at 64 overlaps"),
        ([ParameterSpec("a", (4,), 4, 3, 0)], 128, "'a' at 3 overlaps its predecessor or is not aligned"),
        (
            [
                ParameterSpec("a", (4,), 4, 0, 0),
                ParameterSpec("b", (4,), 4, 64, 1),
                ParameterSpec("c", (4,), 4, 128, 0),
            ],
            256,
            "not contiguous",
        ),
        ([ParameterSpec("a", (4,), 4, 0, 0)], 100, "do not divide over 2 shards"),
        ([ParameterSpec("a", (400,), 400, 0, 0)], 128, "128 elements do not hold 400"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(slots: list[ParameterSpec], numel: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BufferLayout(tuple(slots), numel, 2)


SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@settings(max_examples=100)
@given(
    shapes=st.lists(st.tuples(SHAPES, st.integers(-1, 2)), min_size=1, max_size=8),
    num_shards=st.integers(1, 9),
    alignment=st.sampled_from([1, 8, ALIGNMENT]),
)
def test_every_element_lies_on_exactly_one_rank(
    shapes: list[tuple[tuple[int, ...], int]], num_shards: int, alignment: int
) -> None:
    layout = lay_out(
        [(f"p{index}", shape, group) for index, (shape, group) in enumerate(shapes)],
        num_shards=num_shards,
        alignment=alignment,
    )
    found = {slot.name: [0] * slot.numel for slot in layout.specs}
    for rank in range(num_shards):
        begin, _ = layout.owned(rank)
        for segment in layout.segments_in(*layout.owned(rank)):
            slot = layout.specs[segment.slot]
            assert begin + segment.start == slot.offset + segment.offset
            for element in range(segment.offset, segment.offset + segment.stop - segment.start):
                found[slot.name][element] += 1
    assert all(count == 1 for counts in found.values() for count in counts)
    assert {name: len(counts) for name, counts in found.items()} == {
        f"p{index}": math.prod(shape) for index, (shape, _) in enumerate(shapes)
    }
    assert layout.numel - layout.parameter_numel < alignment * (len(shapes) + num_shards)
    # A group's range covers its parts, and begins with the first of them.
    for rank in range(num_shards):
        begin, end = layout.owned(rank)
        for group in layout.groups:
            low, high = layout.group_range(group, begin, end)
            inside = [s for s in layout.segments_in(*layout.owned(rank)) if layout.specs[s.slot].group == group]
            assert all(low <= s.start and s.stop <= high for s in inside)
            assert not inside or inside[0].start == low

"""The arithmetic of tensor parallel parts and heads, and keys of plans."""

from __future__ import annotations

import doctest
from types import ModuleType

import pytest
from torch import nn

from shoal.errors import ModelError
from shoal.parallel.tensor import attention, parts
from shoal.parallel.tensor.attention import local_heads, projection_ranges
from shoal.parallel.tensor.families import Layout
from shoal.parallel.tensor.parts import SharedRows, even_ranges, length
from shoal.parallel.tensor.plan import match, parse_style, plan_for


@pytest.mark.parametrize("module", [attention, parts], ids=lambda module: module.__name__)
def test_the_examples_in_the_docstrings_are_true(module: ModuleType) -> None:
    results = doctest.testmod(module)
    assert (results.failed, results.attempted > 0) == (0, True)


@pytest.mark.parametrize("layout", ["heads", "separate", "blocks", "groups"])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 12])
def test_every_head_is_computed_once_with_its_own_key_and_value(layout: Layout, num_kv_heads: int, size: int) -> None:
    num_heads, unit = 12, 2
    group = num_heads // num_kv_heads
    if layout == "heads" and group > 1:
        return
    query_of: dict[int, list[int]] = {}
    for rank in range(size):
        mine = local_heads(num_heads=num_heads, num_kv_heads=num_kv_heads, size=size, rank=rank)
        assert len(mine.query) == len(mine.kv) * mine.groups
        for position, head in enumerate(mine.query):  # repeat_kv: local query head i reads local kv head i // groups
            assert mine.kv[position // mine.groups] == head // group
        assert mine.is_kv_shared == (num_kv_heads < size)
        numel = unit * num_heads if layout == "separate" else unit * (num_heads + 2 * num_kv_heads)
        numel = 3 * unit * num_heads if layout == "heads" else numel
        ranges, shared = projection_ranges(layout, 0, numel, mine, num_heads, num_kv_heads)
        is_fused = layout in ("blocks", "groups")
        assert length(shared) == (2 * unit * num_kv_heads if mine.is_kv_shared and is_fused else 0)
        rows = [row for start, stop in ranges for row in range(start, stop)]
        query_of[rank] = rows
        if layout == "groups":
            width = unit * (mine.groups + 2)
            for position, kv in enumerate(mine.kv):
                block = rows[position * width : (position + 1) * width]
                assert block[-2 * unit :] == list(
                    range((kv + 1) * (group + 2) * unit - 2 * unit, (kv + 1) * (group + 2) * unit)
                )
    if num_kv_heads >= size:
        everything = sorted(row for rows in query_of.values() for row in rows)
        assert everything == list(range(len(everything)))


@pytest.mark.parametrize("layout", ["separate", "blocks", "groups"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "size"), [(8, 2, 4), (6, 1, 4), (12, 3, 8), (9, 3, 5)])
def test_ranks_that_share_heads_hold_each_row_once_and_return_what_they_need(
    layout: Layout, num_heads: int, num_kv_heads: int, size: int
) -> None:
    numel = 4 * num_kv_heads if layout == "separate" else 4 * (num_heads + 2 * num_kv_heads)
    needed, rows = [], []
    for rank in range(size):
        mine = local_heads(num_heads=num_heads, num_kv_heads=num_kv_heads, size=size, rank=rank)
        ranges, shared = projection_ranges(layout, 1, numel, mine, num_heads, num_kv_heads)
        needed.append(ranges)
        rows.append(SharedRows.of(ranges, shared, size=size, rank=rank))
    held = [[row for start, stop in each.held for row in range(start, stop)] for each in rows]
    assert sorted(row for each in held for row in each) == list(range(numel))
    shares = [(own, *span) for own, each in zip(held, rows, strict=True) for span in each.own]
    gathered = [own[place] for own, start, stop in shares for place in range(start, stop)]
    for own, each, ranges in zip(held, rows, needed, strict=True):
        sources = {True: gathered, False: own}
        returned = [
            sources[is_shared][place]
            for is_shared, places in each.pieces
            for low, high in places
            for place in range(low, high)
        ]
        assert returned == [row for start, stop in ranges for row in range(start, stop)]


def test_fused_blocks_are_split_each() -> None:
    assert even_ranges((6, 2, 2), 2, 1) == ((3, 6), (7, 8), (9, 10))
    assert sum(length(even_ranges((50257,), 8, rank)) for rank in range(8)) == 50257


@pytest.mark.parametrize(
    ("style", "blocks"),
    [("column", (12,)), ("column:3", (4, 4, 4)), ("column:8,2,2", (8, 2, 2)), ("packed_colwise", (6, 6))],
)
def test_a_style_names_the_fused_blocks(style: str, blocks: tuple[int, ...]) -> None:
    assert parse_style(style, "key").block_sizes(12) == blocks


@pytest.mark.parametrize("style", ["colunm", "column:0", "column:a", "row:2", "column:"])
def test_an_unknown_style_is_an_error(style: str) -> None:
    with pytest.raises(ModelError, match="there is no such style"):
        parse_style(style, "layers.*.up")


def test_a_key_may_leave_out_the_beginning_of_a_name_and_names_one_part_by_a_star() -> None:
    names = ["model.layers.0.up", "model.layers.10.up", "model.layers.0.mlp.up", "up"]
    assert match({"layers.*.up": "column"}, names) == {names[0]: "layers.*.up", names[1]: "layers.*.up"}
    assert match({"up": "column"}, names) == {"up": "up"}
    with pytest.raises(ModelError, match=r"does not have: layer\.\*\.up; did you mean 'model\.layers\.\*\.up'"):
        match({"layer.*.up": "column"}, names)


class _Wrapped(nn.Module):
    """As Moshi's: the layer is inside of a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)


def test_projections_that_are_no_layers_themselves_are_left_to_the_plan() -> None:
    attention = nn.ModuleDict({name: _Wrapped() for name in ("q_proj", "k_proj", "v_proj", "o_proj")})
    mlp = nn.ModuleDict({"fc1": nn.Linear(8, 16), "fc2": nn.Linear(16, 8)})
    model = nn.ModuleDict({"attention": attention, "mlp": mlp})
    assert set(plan_for(model)) == {"mlp.fc1", "mlp.fc2"}
    attention.update({name: nn.Linear(8, 8) for name in attention})
    assert {"attention.q_proj", "attention.o_proj"} < set(plan_for(model))

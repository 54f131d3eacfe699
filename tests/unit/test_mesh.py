"""The mesh's arithmetic."""

from __future__ import annotations

import doctest
import time
from typing import get_args

import pytest

import shoal.mesh
from shoal.errors import ConfigError
from shoal.mesh import Axis, Coordinate, Mesh, factor_axis, tied_axis

AXES = get_args(Axis)


def test_the_examples_in_the_docstring_hold() -> None:
    result = doctest.testmod(shoal.mesh)
    assert result.attempted == 18
    assert result.failed == 0


def test_dp_shard_takes_the_ranks_that_are_left() -> None:
    assert Mesh.of(12, dp_replicate=2).dp_shard == 6
    assert Mesh.of(1) == Mesh()
    assert Mesh.of(8, dp_shard=4, dp_replicate=2).dp == 8


def test_tp_varies_fastest_and_pp_slowest() -> None:
    mesh = Mesh.of(32, pp=2, dp_replicate=2, dp_shard=2, sp=2, tp=2)
    assert mesh.coordinate(1) == Coordinate(0, 0, 0, 0, 0, 1)
    assert mesh.coordinate(16) == Coordinate(1, 0, 0, 0, 0, 0)
    assert mesh.coordinate(2).sp == 1
    assert mesh.coordinate(4).dp_shard == 1
    assert mesh.coordinate(8).dp_replicate == 1


def test_the_groups_of_hybrid_sharding_are_rows_and_columns() -> None:
    mesh = Mesh.of(8, dp_replicate=2)
    assert mesh.groups("dp_shard") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.groups("dp_replicate") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.groups("dp") == ((0, 1, 2, 3, 4, 5, 6, 7),)
    assert mesh.ranks_along("dp_replicate", 6) == (2, 6)


def test_expert_groups_partition_the_dp_shard_sp_and_tp_ranks_a_second_time() -> None:
    mesh = Mesh.of(16, sp=2, tp=2, ep=4)
    assert mesh.dp_shard == 4
    assert mesh.groups("ep") == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh.of(4096),
        Mesh.of(4096, pp=4, dp_replicate=4, cp=2, sp=2, tp=8, ep=16),
        Mesh.of(4095, dp_replicate=9, sp=7, ep=5),
        Mesh.of(
            4096, pp=4, dp_replicate=4, cp=2, sp=2, tp=8, order=["dp_shard", "pp", "cp", "tp", "dp_replicate", "sp"]
        ),
        Mesh.of(4096, pp=4, cp=2, tp=8, etp=2, ep=16, order=["tp", "cp", "dp_shard", "pp"]),
        Mesh.of(4096, pp=4, cp=2, tp=8, etp=8, ep=16, order=["ep", "dp_shard", "pp", "cp", "tp"]),
    ],
    ids=repr,
)
def test_groups_partition_the_ranks_at_4096(mesh: Mesh) -> None:
    for axis in AXES:
        groups = mesh.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size)), axis
        assert {len(group) for group in groups} == {mesh.size(axis)}, axis
        for group in groups[:: max(1, len(groups) // 16)]:
            assert group[-1] == group[0] or mesh.ranks_along(axis, group[-1]) == group
            assert [mesh.index(axis, rank) for rank in group[-3:]] == list(range(len(group)))[-3:]
    assert all(mesh.rank(mesh.coordinate(rank)) == rank for rank in range(0, mesh.world_size, 37))


def test_an_order_says_which_axes_are_inside_of_a_node() -> None:
    mesh = Mesh.of(16, pp=2, cp=2, tp=2, order=("cp", "dp_shard", "pp", "tp"))
    assert [mesh.groups(axis)[0] for axis in ("tp", "pp", "dp_shard", "cp")] == [(0, 1), (0, 2), (0, 4), (0, 8)]
    assert mesh.groups("fsdp")[:2] == ((0, 4, 8, 12), (1, 5, 9, 13))
    assert mesh.groups("model")[0] == (0, 1, 2, 3)
    assert mesh.groups("pipeline_stage") == ((0, 1, 4, 5, 8, 9, 12, 13), (2, 3, 6, 7, 10, 11, 14, 15))
    assert mesh.coordinate(10) == Coordinate(pp=1, dp_replicate=0, dp_shard=0, cp=1, sp=0, tp=0)
    assert mesh.groups(tied_axis([0, 1]))[:3] == ((0, 2), (1, 3), (4, 6))
    assert Mesh.of(12, pp=3, order=("dp_shard", "pp")).groups(tied_axis([0, 2]))[:3] == ((0, 2), (1,), (3, 5))
    of_shards = factor_axis("fsdp", (2, 2), (1,))
    assert mesh.groups(of_shards)[:2] == ((0, 4), (1, 5))


def test_experts_are_divided_among_neighbours_or_among_ranks_that_are_far_apart() -> None:
    near, far = (Mesh.of(8, ep=2, order=order) for order in (("dp_shard", "ep"), ("ep", "dp_shard")))
    assert near == Mesh.of(8, ep=2)
    assert far.groups("ep") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert far.groups("expert_dp") == ((0, 1, 2, 3), (4, 5, 6, 7))
    both = Mesh.of(16, tp=4, etp=2, ep=2, order=("ep", "dp_shard", "tp"))
    assert both.groups("ep")[:2] == ((0, 8), (1, 9))
    assert both.groups("expert_dp")[:2] == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert both.groups("expert_model")[:2] == ((0, 1, 8, 9), (2, 3, 10, 11))
    between = Mesh.of(24, pp=2, cp=3, ep=6, order=("cp", "pp", "dp_shard"))
    with pytest.raises(ConfigError, match=r"6 of the ranks 3 x 4 are no runs of ranks") as error:
        between.groups("ep")
    assert "cp, pp, dp_shard" in str(error.value)


def test_orders_that_put_ranks_at_the_same_places_are_equal() -> None:
    assert Mesh.of(8, tp=2, order=("dp_shard", "tp")) == Mesh.of(8, tp=2)
    assert Mesh.of(8, tp=2, order=("tp", "dp_shard")) == Mesh.of(8, tp=2, order=("tp", "pp", "dp_shard", "sp"))
    assert Mesh.of(8, tp=2, order=("tp", "dp_shard")) != Mesh.of(8, tp=2)


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        (("dp_shard", "pq", "tp"), r"dp_shard, pq, tp: 'pq' is no basic axis.*(?s:.)*use pp, dp_replicate"),
        (("dp_shard", "fsdp", "tp"), "'fsdp' is no basic axis"),
        (("dp_shard", "tp", "dp_shard"), r"'dp_shard' is there 2 times.*(?s:.)*name each axis once"),
        (("dp_shard", "pp"), r"dp_shard, pp: without tp = 2.*(?s:.)*the outermost first"),
    ],
)
def test_an_unknown_missing_or_doubled_axis_of_an_order_is_an_error(order: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as error:
        Mesh.of(8, tp=2, order=order)
    assert error.value.code == "mesh-order"


def test_the_derived_axes_are_products_of_the_basic_ones() -> None:
    mesh = Mesh.of(32, pp=2, dp_replicate=2, sp=2, tp=2)  # dp_shard = 2
    assert mesh.ranks_along("fsdp", 0) == (0, 2, 4, 6)
    assert mesh.ranks_along("batch", 0) == mesh.ranks_along("dp", 0) == (0, 4, 8, 12)
    assert mesh.ranks_along("loss", 0) == (0, 2, 4, 6, 8, 10, 12, 14)
    assert mesh.ranks_along("loss", 17) == (17, 19, 21, 23, 25, 27, 29, 31)


@pytest.mark.parametrize("ep", [1, 2, 4, 8, 32])
def test_expert_dp_and_ep_factor_the_fsdp_and_tp_ranks(ep: int) -> None:
    mesh = Mesh.of(64, dp_replicate=2, sp=2, tp=4, ep=ep)
    for rank in (0, 5, 63):
        holders = sorted(r for first in mesh.ranks_along("fsdp", rank) for r in mesh.ranks_along("tp", first))
        assert mesh.size("expert_dp") * ep == len(holders) == 32
        assert mesh.size("expert_data") == 2 * mesh.size("expert_dp")
        # Each of the ranks that shard one expert is in another ep group; together these are all that hold experts.
        reached = [other for shard in mesh.ranks_along("expert_dp", rank) for other in mesh.ranks_along("ep", shard)]
        assert sorted(reached) == holders
        assert {mesh.index("ep", shard) for shard in mesh.ranks_along("expert_dp", rank)} == {mesh.index("ep", rank)}


def test_the_factors_of_an_axis_are_groups_of_its_ranks() -> None:
    mesh = Mesh.of(16, dp_shard=2, tp=8)
    rows, depth, plane = (factor_axis("tp", (2, 2, 2), factors) for factors in ((1,), (2,), (0, 1)))
    assert mesh.groups(rows)[:4] == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.groups(depth)[:2] == ((0, 1), (2, 3))
    assert mesh.ranks_along(plane, 13) == (9, 11, 13, 15)
    assert mesh.index(plane, 13) == 2
    assert (mesh.size(rows), mesh.size(plane)) == (2, 4)
    assert Mesh.of(4, dp_shard=4).groups(factor_axis("dp_shard", (2, 2), (0,))) == ((0, 2), (1, 3))
    of_shards = factor_axis("fsdp", (2, 4), (1,))  # neighbours that shard parameters, beside tp
    assert Mesh.of(16, dp_shard=4, sp=2, tp=2).groups(of_shards)[:2] == ((0, 2, 4, 6), (1, 3, 5, 7))
    for wrong in ("tp:2x2/0", "tp:2x2x2/3", "tp:2x2x2/1,0", "tp:2x2x2/", "dp:2/0", "tp/0"):
        with pytest.raises(ConfigError, match="not made of factors"):
            mesh.groups(wrong)


def test_a_tied_axis_joins_the_pipeline_stages_that_it_names() -> None:
    mesh = Mesh.of(8, pp=4, tp=2)
    axis = tied_axis([3, 0])
    assert mesh.ranks_along(axis, 7) == (1, 7)
    assert mesh.ranks_along(axis, 2) == (2,)
    assert mesh.groups(axis) == ((0, 6), (1, 7), (2,), (3,), (4,), (5,))
    assert (mesh.size(axis), mesh.index(axis, 7), mesh.index(axis, 2)) == (2, 1, 0)
    assert mesh.groups(tied_axis([0, 1, 3]))[0] == (0, 2, 6)
    for wrong in ("tied:", "tied:0,4", "tied:1,0", "tied:a", "tied:,"):
        with pytest.raises(ConfigError, match="does not fit a mesh of 4 pipeline stages"):
            mesh.groups(wrong)


def test_the_groups_of_65536_ranks_are_arithmetic() -> None:
    mesh = Mesh.of(65_536, pp=8, dp_replicate=4, cp=2, sp=2, tp=8, ep=16)
    start = time.process_time()
    for axis in (*AXES, tied_axis([0, 7])):
        groups = mesh.groups(axis)
        assert sum(len(group) for group in groups) == 65_536, axis
        assert mesh.ranks_along(axis, groups[-1][-1]) == groups[-1], axis
    assert time.process_time() - start < 10.0


def test_a_size_that_does_not_multiply_up_names_the_sizes_that_do() -> None:
    with pytest.raises(ConfigError, match=r"10 ranks cannot be laid out as .*tp=4 = 4 times dp_shard") as error:
        Mesh.of(10, tp=4)
    assert "start 8 or 12 ranks, or set tp to 2 or 5" in str(error.value)
    with pytest.raises(ConfigError, match="start 6 ranks, or set dp_replicate to 4, or set dp_shard to 6") as error:
        Mesh.of(12, dp_replicate=2, dp_shard=3)
    with pytest.raises(ConfigError, match="start 8 ranks"):
        Mesh.of(3, tp=8)


def test_experts_split_over_ranks_that_do_not_fit_tensor_parallel_ones_name_what_does() -> None:
    with pytest.raises(ConfigError, match="split over 3 ranks, which does not divide tp=4") as error:
        Mesh.of(8, tp=4, etp=3)
    assert "over 1, 2 or 4 ranks" in str(error.value)
    with pytest.raises(ConfigError, match=r"ep=8 does not divide .* x tp / 2 = 2 x 1 x 1 x 4 / 2 = 4"):
        Mesh.of(8, tp=4, ep=8, etp=2)
    with pytest.raises(ConfigError, match="'etp' has degree 0"):
        Mesh(etp=0)


def test_expert_parallel_that_does_not_divide_names_what_does() -> None:
    with pytest.raises(ConfigError, match="ep=5 does not divide dp_shard x cp x sp x tp = 8 x 1 x 1 x 1 = 8") as error:
        Mesh.of(8, ep=5)
    assert "use an ep of 4 or 8" in str(error.value)


def test_degrees_ranks_and_axes_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="below 1"):
        Mesh.of(8, tp=0)
    with pytest.raises(ConfigError, match="below 1"):
        Mesh.of(0)
    with pytest.raises(ConfigError, match="'ep' has degree 0"):
        Mesh(ep=0)
    with pytest.raises(ConfigError, match="rank 8 is not on a mesh of 8 ranks"):
        Mesh.of(8).coordinate(8)
    with pytest.raises(ConfigError, match="dp_shard=8 is not on an axis of degree 8"):
        Mesh.of(8).rank(Coordinate(0, 0, 8, 0, 0, 0))
    with pytest.raises(ConfigError, match="no axis 'mp'"):
        Mesh.of(8).groups("mp")

"""Topologies and the grid: DeepSpeed's documented values, and the mesh behind them."""

from __future__ import annotations

import pytest
from torch import nn

from shoal.comm.world import fake_world
from shoal.engine.entry import given_degrees
from shoal.errors import ConfigError
from shoal.mesh import Mesh
from shoal.pipeline.module import PipelineModule
from shoal.pipeline.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
    mesh_of_topology,
    topology_of_mesh,
)


def test_coordinates_are_row_major() -> None:
    topology = ProcessTopology(axes=["a", "b", "c"], dims=[2, 3, 4])
    assert topology.world_size() == 24
    assert [topology.get_dim(axis) for axis in "abcd"] == [2, 3, 4, 0]
    assert topology.get_axis_names() == ["a", "b", "c"]
    assert topology.get_rank(a=1, b=2, c=3) == 23
    assert topology.get_rank(a=1, b=0, c=0) == 12
    assert topology.get_coord(17) == topology.ProcessCoord(1, 1, 1)
    assert topology.get_coord(rank=0).b == 0
    assert topology.get_axis_list("c", 3) == [3, 7, 11, 15, 19, 23]
    assert topology.filter_match(a=1, b=2) == [20, 21, 22, 23]
    assert topology.filter_match(a=1, b=1, c=1) == [17]


def test_groups_along_an_axis() -> None:
    topology = ProcessTopology(axes=["pipe", "data", "model"], dims=[2, 2, 2])
    assert topology.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.get_axis_comm_lists("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert topology.get_axis_comm_lists("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.get_axis_comm_lists("nothing") == []


def test_a_rank_as_text() -> None:
    topology = ProcessTopology(axes=["pipe", "data", "model"], dims=[2, 2, 2])
    assert topology.get_rank_repr(rank=5) == "model_01"
    assert topology.get_rank_repr(rank=5, omit_axes=[]) == "pipe_01-data_00-model_01"
    assert topology.get_rank_repr(rank=5, omit_axes=["pipe"], inner_sep="+", outer_sep="/") == "data+00/model+01"
    assert PipeDataParallelTopology(2, 2).get_rank_repr(rank=3) == ""


def test_bad_coordinates_are_errors() -> None:
    topology = PipeDataParallelTopology(num_pp=2, num_dp=3)
    with pytest.raises(ConfigError, match=r"(?s)get_rank\(pipe=0\) on the axes.*filter_match"):
        topology.get_rank(pipe=0)
    with pytest.raises(ConfigError, match=r"get_rank\(pipe=0, data=3\) on pipe 2 x data 3"):
        topology.get_rank(pipe=0, data=3)
    with pytest.raises(ConfigError, match=r"(?s)rank 6 on .*0 to 5"):
        topology.get_coord(6)
    with pytest.raises(ValueError, match=r"axes \['a', 'b'\] and the dims \[2, 0\]"):
        ProcessTopology(["a", "b"], [2, 0])


def test_a_topology_is_a_mesh_or_is_refused_with_the_reason() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=4, num_dp=3)
    mesh = mesh_of_topology(topology)
    assert mesh == Mesh(pp=2, dp_shard=3, tp=4)
    assert mesh.groups("tp") == tuple(map(tuple, topology.get_axis_comm_lists("model")))
    assert mesh.groups("pp") == tuple(map(tuple, topology.get_axis_comm_lists("pipe")))
    assert mesh_of_topology(ProcessTopology(["data", "model", "pipe"], [2, 2, 1])) == Mesh(dp_shard=2, tp=2)
    reason = r"(?s)orders the axes \['data', 'pipe'\], so that its rank 1 is at .*pipe=1.*in this order: pipe, data"
    with pytest.raises(ConfigError, match=reason):
        mesh_of_topology(ProcessTopology(["data", "pipe"], [2, 2]))
    with pytest.raises(ConfigError, match=r"has the axes \['expert'\]"):
        mesh_of_topology(ProcessTopology(["pipe", "expert"], [2, 2]))


def test_a_mesh_as_a_topology() -> None:
    assert isinstance(topology_of_mesh(Mesh(pp=2, dp_shard=4)), PipeDataParallelTopology)
    topology = topology_of_mesh(Mesh(pp=2, dp_replicate=2, dp_shard=2, cp=2, sp=2, tp=2))
    assert (topology.axes, topology.dims) == (["pipe", "data", "sequence", "model"], [2, 4, 4, 2])
    assert topology_of_mesh(Mesh(pp=2, tp=2)).axes == ["pipe", "data", "model"]


def test_a_topology_follows_the_order_of_the_mesh() -> None:
    mesh = Mesh.of(8, pp=2, tp=2, order=("dp_shard", "pp", "tp"))
    topology = topology_of_mesh(mesh)
    assert (topology.axes, topology.dims) == (["data", "pipe", "model"], [2, 2, 2])
    for axis, of in (("pipe", "pp"), ("data", "dp"), ("model", "tp")):
        assert sorted(map(tuple, topology.get_axis_comm_lists(axis))) == sorted(mesh.groups(of))
    assert mesh_of_topology(topology, mesh.order) == mesh
    with pytest.raises(ConfigError, match="orders the axes"):
        mesh_of_topology(topology)
    apart = Mesh.of(8, pp=2, dp_replicate=2, order=("dp_replicate", "pp", "dp_shard"))
    with pytest.raises(ConfigError, match="list dp_replicate and dp_shard next to each other"):
        topology_of_mesh(apart)
    with fake_world(8, rank=6) as world:
        world.mesh = mesh
        grid = PipelineParallelGrid()
        assert (grid.get_stage_id(), grid.get_data_parallel_id(), grid.get_slice_parallel_rank()) == (1, 1, 0)
        assert grid.stage_to_global(0) == 4


def test_the_grid_of_a_rank() -> None:
    with fake_world(12, rank=7):
        grid = PipelineParallelGrid(PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=3))
        assert (grid.get_stage_id(), grid.get_pipe_parallel_rank(), grid.get_pipe_parallel_world_size()) == (1, 1, 2)
        assert (grid.get_data_parallel_id(), grid.data_parallel_id, grid.get_data_parallel_world_size()) == (0, 0, 3)
        assert (grid.get_slice_parallel_rank(), grid.get_slice_parallel_world_size()) == (1, 2)
        assert (grid.get_model_parallel_rank(), grid.get_model_parallel_world_size()) == (3, 4)
        assert (grid.pp_group, grid.dp_group, grid.slice_group) == ([1, 7], [7, 9, 11], [6, 7])
        assert grid.get_data_parallel_group_ranks() == [7, 9, 11]
        assert (grid.get_pipeline_model_parallel_rank(), grid.get_pipeline_model_parallel_world_size()) == (1, 2)
        assert (grid.get_tensor_model_parallel_rank(), grid.get_tensor_model_parallel_world_size()) == (1, 2)
        assert (grid.is_first_stage, grid.is_last_stage) == (False, True)
        assert [grid.stage_to_global(0), grid.stage_to_global(1, data=2), grid.stage_to_global(0, model=0)] == [
            1,
            11,
            0,
        ]
        assert given_degrees(nn.Linear(1, 1), grid, None, 12) == {"pp": 2, "tp": 2}
        with pytest.raises(ConfigError, match=r"pipe 2 x data 3 has 6 ranks, and there are 12"):
            PipelineParallelGrid(PipeDataParallelTopology(2, 3))


def test_a_module_takes_its_place_from_the_world() -> None:
    with fake_world(8, rank=5):
        module = PipelineModule([nn.Linear(2, 2), nn.Linear(2, 2)], num_stages=2)
        assert module.stages == (1,)
        assert module.mpu().stage_to_global(0) == 1
        assert (module.topology().get_dim("data"), module.num_pipeline_stages()) == (4, 2)
        module = PipelineModule([nn.Linear(2, 2)] * 4, topology=PipeModelDataParallelTopology(4, 2, 1))
        assert module.stages == (2,)
        assert module.degrees == {"pp": 4, "tp": 2}
        assert module.ckpt_layer_path("d", 0) == "d/layer_02-model_01-model_states.pt"

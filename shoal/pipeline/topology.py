"""DeepSpeed's topologies: named axes over ranks, and the grid of a pipeline, as arithmetic over Shoal's mesh."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable, Sequence
from itertools import product
from math import prod
from typing import Any

from shoal.comm.world import current_world
from shoal.errors import ConfigError
from shoal.mesh import ORDER, Mesh

# The axes of a pipeline's topology: DeepSpeed's name, the mesh's; a topology without a mesh is of the last one.
_AXES = {"pipe": ("pp",), "data": ("dp_replicate", "dp_shard"), "sequence": ("cp", "sp"), "model": ("tp",)}


class ProcessTopology:
    """Ranks at the points of a grid with named axes. The last axis varies fastest.

    >>> topology = ProcessTopology(axes=["pipe", "data"], dims=[2, 3])
    >>> topology.get_rank(pipe=1, data=0), topology.get_coord(5)
    (3, ProcessCoord(pipe=1, data=2))
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims) or len(set(axes)) != len(axes) or any(dim < 1 for dim in dims):
            raise _wrong(
                f"a topology with the axes {list(axes)} and the dims {list(dims)}",
                "give each axis a name of its own and a dim of 1 or more.",
            )
        self.axes, self.dims = list(axes), list(dims)
        make: Any = namedtuple("ProcessCoord", axes)  # type: ignore[misc]  # the axes are data
        self.ProcessCoord = make
        points = product(*map(range, dims))
        self.mapping: dict[Any, int] = {make(*point): rank for rank, point in enumerate(points)}
        self._coordinates = list(self.mapping)

    def __str__(self) -> str:
        return str(self.mapping)

    def get_rank(self, **coord_kwargs: int) -> int:
        """The rank at a coordinate, which names every axis."""
        if set(coord_kwargs) != set(self.axes):
            raise _wrong(
                f"get_rank({_text(coord_kwargs)}) on the axes {self.axes}",
                "name each axis; filter_match() returns the ranks of a slice.",
            )
        rank = self.mapping.get(self.ProcessCoord(**coord_kwargs))
        if rank is None:
            raise _wrong(f"get_rank({_text(coord_kwargs)}) on {self._text()}", "use a coordinate on the grid.")
        return rank

    def get_axis_names(self) -> list[str]:
        return self.axes

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Iterable[str] = ("data", "pipe"),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """The coordinate of a rank as text, as in names of checkpoint files.

        >>> ProcessTopology(axes=["a", "b"], dims=[2, 2]).get_rank_repr(rank=3)
        'a_01-b_01'
        """
        omitted = set(omit_axes)
        indices = zip(self.axes, self.get_coord(rank), strict=True)
        return outer_sep.join(f"{axis}{inner_sep}{index:02d}" for axis, index in indices if axis not in omitted)

    def get_dim(self, axis: str) -> int:
        """The ranks along an axis; 0 for one that there is not."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """The coordinate of a rank, a namedtuple of the axes."""
        if not 0 <= rank < len(self._coordinates):
            raise _wrong(f"rank {rank} on {self._text()}", f"use a rank from 0 to {len(self._coordinates) - 1}.")
        return self._coordinates[rank]

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The groups of ranks that differ on ``axis`` only; none for an axis that there is not.

        >>> ProcessTopology(axes=["pipe", "data"], dims=[2, 2]).get_axis_comm_lists("pipe")
        [[0, 2], [1, 3]]
        """
        if axis not in self.axes:
            return []
        others = [other for other in self.axes if other != axis]
        points = [dict(zip(others, point, strict=True)) for point in product(*(range(self.get_dim(o)) for o in others))]
        return [[self.get_rank(**point, **{axis: i}) for i in range(self.get_dim(axis))] for point in points]

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """The ranks whose coordinate has these values."""
        wanted = filter_kwargs.items()
        return [rank for coord, rank in self.mapping.items() if all(getattr(coord, a) == i for a, i in wanted)]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """The ranks at ``idx`` on ``axis``."""
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        return prod(self.dims)

    def _text(self) -> str:
        return " x ".join(f"{axis} {dim}" for axis, dim in zip(self.axes, self.dims, strict=True))


class PipeDataParallelTopology(ProcessTopology):
    """Pipeline stages of data-parallel ranks, which are neighbours."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipeline stages of data-parallel groups of tensor-parallel ranks, which are neighbours."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])


def mesh_of_topology(topology: ProcessTopology, order: Sequence[str] = ORDER) -> Mesh:
    """The mesh with the ranks of a topology.

    Args:
        order: as of ``Mesh``.

    Raises: ConfigError: an axis that is not pipe, data, sequence or model, or axes in another order: the ranks would be
        others than the mesh's.
    """
    dims = dict(zip(topology.axes, topology.dims, strict=True))
    unknown = [axis for axis in topology.axes if axis not in _AXES and dims[axis] > 1]
    if unknown:
        raise _wrong(f"the topology has the axes {unknown}", f"use axes from {', '.join(_AXES)}.")
    axes = [axis for axis in topology.axes if dims[axis] > 1]
    known = _ordered(order)
    if axes != [axis for axis in known if axis in axes]:
        raise _wrong(
            f"the topology orders the axes {topology.axes}, so that its rank 1 is at {topology.get_coord(1)}; the"
            f" mesh has the order {', '.join(order)}",
            f"list the axes in this order: {', '.join(axis for axis in known if axis in topology.axes)}.",
        )
    degrees = {_AXES[axis][-1]: dims[axis] for axis in axes}
    return Mesh(order=tuple(degrees), **degrees)


def _ordered(order: Sequence[str]) -> list[str]:
    return sorted(_AXES, key=lambda axis: min((order.index(of) for of in _AXES[axis] if of in order), default=-1))


def topology_of_mesh(mesh: Mesh) -> ProcessTopology:
    """The topology with the ranks of a mesh. An axis for sequence or tensor parallelism only where there is one.

    Raises: ConfigError: other axes lie between ``dp_replicate`` and ``dp_shard``, or between ``cp`` and ``sp``.

    >>> topology_of_mesh(Mesh.of(8, pp=2, tp=2)).get_coord(5)
    ProcessCoord(pipe=1, data=0, model=1)
    """
    dims = {axis: prod(getattr(mesh, of) for of in _AXES[axis]) for axis in _ordered(mesh.order)}
    kept = {axis: dim for axis, dim in dims.items() if dim > 1 or axis in ("pipe", "data")}
    if mesh.order != ORDER:
        made = ProcessTopology(list(kept), list(kept.values()))
        for axis, of in (("data", "dp"), ("sequence", "sequence")):
            if axis in kept and {*map(tuple, made.get_axis_comm_lists(axis))} != {*mesh.groups(of)}:
                raise _wrong(
                    f"a topology has one axis {axis!r}, and the mesh's order is {', '.join(mesh.order)}",
                    f"list {' and '.join(_AXES[axis])} next to each other in parallel.order.",
                )
        return made
    if set(kept) == {"pipe", "data"}:
        return PipeDataParallelTopology(mesh.pp, mesh.dp)
    if set(kept) == {"pipe", "data", "model"}:
        return PipeModelDataParallelTopology(num_pp=mesh.pp, num_mp=mesh.tp, num_dp=mesh.dp)
    return ProcessTopology(list(kept), list(kept.values()))


class PipelineParallelGrid:
    """A rank's place among pipeline stages, data-parallel and tensor-parallel (slice) ranks, and its groups.

    ``model`` in a method's name means all ranks that hold one copy of the model: the stages, and the tensor-parallel
    ranks of each. Groups are torch's.

    Args:
        topology: None: that of the current mesh.
        process_group: the world's.
        rank: None: this one.

    Communicates: a method that returns a group, the first time: every rank calls it.
    """

    def __init__(
        self, topology: ProcessTopology | None = None, process_group: Any = None, *, rank: int | None = None
    ) -> None:
        world = current_world()
        self._topo = topology_of_mesh(world.mesh) if topology is None else topology
        self._mesh = mesh_of_topology(self._topo, world.mesh.order)
        self.world_size = self._topo.world_size()
        if rank is None and self.world_size != world.size:
            raise _wrong(
                f"the topology {self._topo._text()} has {self.world_size} ranks, and there are {world.size}",
                f"start {self.world_size} ranks, or give dims whose product is {world.size}.",
            )
        self.global_rank = world.rank if rank is None else rank
        self.data_parallel_size = max(self._topo.get_dim("data"), 1)
        self.pipe_parallel_size = max(self._topo.get_dim("pipe"), 1)
        self.model_parallel_size = self.slice_parallel_size = max(self._topo.get_dim("model"), 1)
        self.stage_id, self.data_parallel_id = self.get_stage_id(), self.get_data_parallel_id()
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        self.dp_group, self.pp_group = self._ranks("dp_shard"), self._ranks("pp")
        self.slice_group = self._ranks("tp")
        self.model_group = self._ranks("model")
        self.ds_model_world_size = len(self.model_group)
        self.ds_model_rank = self.model_group.index(self.global_rank)

    def topology(self) -> ProcessTopology:
        return self._topo

    def get_stage_id(self) -> int:
        return self._mesh.index("pp", self.global_rank)

    def get_data_parallel_id(self) -> int:
        return self._mesh.index("dp", self.global_rank)

    def get_global_rank(self) -> int:
        return self.global_rank

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """The rank of a pipeline stage at this rank's coordinate on the other axes, or at that of ``kwargs``."""
        coordinate = self._topo.get_coord(self.global_rank)._asdict()
        return self._topo.get_rank(**{**coordinate, "pipe": stage_id, **kwargs})

    def get_pipe_parallel_world_size(self) -> int:
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> Any:
        return self._group("pp")

    def get_data_parallel_world_size(self) -> int:
        return self.data_parallel_size

    def get_data_parallel_group(self) -> Any:
        return self._group("dp")

    def get_model_parallel_rank(self) -> int:
        return self.ds_model_rank

    def get_model_parallel_world_size(self) -> int:
        return self.ds_model_world_size

    def get_model_parallel_group(self) -> Any:
        return self._group("model")

    def get_slice_parallel_rank(self) -> int:
        return self._mesh.index("tp", self.global_rank)

    def get_slice_parallel_world_size(self) -> int:
        return self.slice_parallel_size

    def get_slice_parallel_group(self) -> Any:
        return self._group("tp")

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self.dp_group

    get_pipe_parallel_rank = get_stage_id
    get_data_parallel_rank = get_data_parallel_id

    # names of Megatron's ``mpu``
    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size

    def _ranks(self, axis: str) -> list[int]:
        return list(self._mesh.ranks_along(axis, self.global_rank))

    def _group(self, axis: str) -> Any:
        world = current_world()
        return None if world.backend == "none" else world.process_group(axis, self._mesh)


def _text(coordinate: dict[str, int]) -> str:
    return ", ".join(f"{axis}={index}" for axis, index in coordinate.items())


def _wrong(what: str, do: str) -> ConfigError:
    return ConfigError(what + ".", do=do, code="pipeline-topology")

"""Process groups and device meshes of torch for the axes of Shoal's mesh.

torch's DTensor, pipelining and context parallel ask for these. Where ranks are processes they are torch's own groups.
Where ranks are threads, or one rank runs without torch.distributed, they are ``CommunicatorGroup``: a ProcessGroup of
torch whose operations are a communicator's. (torch has a group for threads too. It replaces torch.distributed's state
for the whole process while it is used, so Shoal has its own.)

Limits of ``CommunicatorGroup``: CPU tensors; sum, avg, min, max, product; every operation but a receive is done by the
call. There is no default process group: ``torch.distributed.get_rank()`` raises, and slices of a device mesh, which
call it, cannot be made; ask for a mesh of the wanted axes instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future

from shoal.comm.protocol import Communicator, Work
from shoal.errors import NotBuiltError
from shoal.mesh import Mesh

# The stubs of torch overload every operation; its C++ code calls one form of each.
_ProcessGroup: Any = dist.ProcessGroup
_c10d: Any = torch._C._distributed_c10d
_world: Any = distributed_c10d._world

_COMBINE: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.MIN: lambda rows: rows.amin(0),
    dist.ReduceOp.MAX: lambda rows: rows.amax(0),
    dist.ReduceOp.PRODUCT: lambda rows: rows.prod(0),
}


def _for_each(operation: Callable[..., Any]) -> Callable[..., dist.Work]:
    """The operation on each pair of two lists of tensors."""

    def call(self: Any, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> dist.Work:
        for output, source in zip(outputs, inputs, strict=True):
            operation(self, output, source, opts)
        return _finished(outputs)

    return call


class CommunicatorGroup(_ProcessGroup):
    """torch's ProcessGroup over a communicator.

    Args:
        ranks: of the world, in the order of their coordinate.
        name: under which torch finds the group; of this rank alone, since ranks may be threads of one process.
    """

    def __init__(self, comm: Communicator, ranks: tuple[int, ...], name: str) -> None:
        super().__init__(comm.rank, comm.size)
        self.communicator = comm
        self._name = name
        self._receives: set[_Receive] = set()  # referenced until they are waited for
        _c10d._register_process_group(name, self)
        _world.pg_names[self] = name
        _world.pg_map[self] = ("shoal", None)
        _world.pg_group_ranks[self] = {rank: index for index, rank in enumerate(ranks)}

    def unregister(self) -> None:
        """Make torch forget the group."""
        _c10d._unregister_process_group(self._name)
        for table in (_world.pg_names, _world.pg_map, _world.pg_group_ranks):
            table.pop(self, None)

    def getBackendName(self) -> str:
        return "shoal"

    @property
    def group_name(self) -> str:
        return self._name

    pg_name = group_name

    def size(self) -> int:
        return self.communicator.size

    def rank(self) -> int:
        return self.communicator.rank

    # --- torch's operations, under the names of torch 2.11 and of later versions ---

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        for tensor in tensors:
            self._reduce(tensor, opts)
        return _finished(tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        for tensor in tensors:
            total = tensor.clone()
            self._reduce(total, opts)
            if self.rank() == opts.rootRank:
                tensor.detach().copy_(total)
        return _finished(tensors)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        for tensor in tensors:
            with _flat(tensor) as flat:
                self.communicator.blocking.broadcast(flat, opts.rootRank, label="torch broadcast")
        return _finished(tensors)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> dist.Work:
        for targets, source in zip(outputs, inputs, strict=True):
            for target, row in zip(targets, self._rows(source), strict=True):
                target.detach().copy_(row)
        return _finished(outputs)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> dist.Work:
        output.detach().view(self.size(), *source.shape).copy_(self._rows(source))
        return _finished(output)

    _allgather_base = all_gather_single

    all_gather_single_coalesced = allgather_into_tensor_coalesced = _for_each(all_gather_single)

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> dist.Work:
        for output, sources in zip(outputs, inputs, strict=True):
            self._reduce_scatter(output, torch.stack(sources), opts)
        return _finished(outputs)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> dist.Work:
        self._reduce_scatter(output, source, opts)
        return _finished(output)

    _reduce_scatter_base = reduce_scatter_single

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced = _for_each(reduce_scatter_single)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> dist.Work:
        splits: dict[str, Sequence[int] | None] = {}
        if output_split_sizes or input_split_sizes:
            for name, tensor, rows in (
                ("out_splits", output, output_split_sizes), ("source_splits", source, input_split_sizes),
            ):  # fmt: skip
                width = tensor.numel() // max(tensor.shape[0], 1)
                rows = rows or [tensor.shape[0] // self.size()] * self.size()
                splits[name] = [width * count for count in rows]
        with _flat(output) as flat:
            contiguous = source.detach().contiguous().view(-1)
            self.communicator.blocking.all_to_all(flat, contiguous, **splits, label="torch all_to_all")
        return _finished(output)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> dist.Work:
        source = torch.cat([tensor.detach().reshape(-1) for tensor in inputs])
        received = source.new_empty(sum(tensor.numel() for tensor in outputs))
        out_splits = [tensor.numel() for tensor in outputs]
        self.communicator.blocking.all_to_all(
            received,
            source,
            out_splits=out_splits,
            source_splits=[tensor.numel() for tensor in inputs],
            label="torch all_to_all",
        )
        for output, part in zip(outputs, received.split(out_splits), strict=True):
            output.detach().copy_(part.view(output.shape))
        return _finished(outputs)

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> dist.Work:
        for index, source in enumerate(inputs):
            rows = self._rows(source)
            if self.rank() == opts.rootRank:
                for target, row in zip(outputs[index], rows, strict=True):
                    target.detach().copy_(row)
        return _finished(outputs)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> dist.Work:
        for index, output in enumerate(outputs):
            rows = output.new_empty((self.size(), *output.shape))
            if self.rank() == opts.rootRank:
                torch.stack([tensor.detach() for tensor in inputs[index]], out=rows)
            self.communicator.blocking.broadcast(rows.view(-1), opts.rootRank, label="torch scatter")
            output.detach().copy_(rows[self.rank()])
        return _finished(outputs)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> dist.Work:
        for tensor in tensors:
            # A copy, so that the caller may overwrite its tensor at once.
            self.communicator.send(tensor.detach().clone().view(-1), peer, label=f"torch send {tag}")
        return _finished(tensors)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> dist.Work:
        return _Receive(self, tensors, peer, tag)

    def barrier(self, opts: Any = None) -> dist.Work:
        self.communicator.barrier(label="torch barrier")
        return _finished([])

    # --- what they are made of ---

    def _rows(self, source: torch.Tensor) -> torch.Tensor:
        """Every rank's ``source``. Shape: [size, *source.shape]."""
        return self.communicator.gathered(source.detach(), label="torch all_gather")

    def _reduce(self, tensor: torch.Tensor, opts: Any) -> None:
        scale, combine = self._reduction(opts)
        if combine is None:
            with _flat(tensor) as flat:
                self.communicator.blocking.all_reduce(flat, scale=scale, label="torch all_reduce")
        else:
            tensor.detach().copy_(combine(self._rows(tensor)))

    def _reduce_scatter(self, output: torch.Tensor, source: torch.Tensor, opts: Any) -> None:
        scale, combine = self._reduction(opts)
        if combine is None:
            full = source.detach().contiguous().view(-1)
            with _flat(output) as flat:
                self.communicator.blocking.reduce_scatter(full, flat, scale=scale, label="torch reduce_scatter")
        else:
            rows = self._rows(source).view(self.size(), self.size(), *output.shape)
            output.detach().copy_(combine(rows[:, self.rank()]))

    def _reduction(self, opts: Any) -> tuple[float, Callable[[torch.Tensor], torch.Tensor] | None]:
        """The factor of a sum; or what combines the ranks' rows."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp.op
        if op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            return 1.0 / self.size() if op == dist.ReduceOp.AVG else 1.0, None
        if op not in _COMBINE:
            raise NotBuiltError(
                f"a process group of thread ranks does not reduce by {str(op).rpartition('.')[2]}",
                do="use SUM, AVG, MIN, MAX or PRODUCT, or ranks that are processes.",
                code="not-built-reduction",
            )
        return 1.0, _COMBINE[op]


class _Receive(dist.Work):
    """A receive under way, waited for by ``wait()``: two ranks may post their receives before their sends."""

    def __init__(self, group: CommunicatorGroup, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        super().__init__()
        self._group = group
        self._tensors = tensors
        self._works: list[tuple[Work, torch.Tensor]] = []
        for tensor in tensors:
            flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")
            self._works.append((group.communicator.recv(flat, peer, label=f"torch send {tag}"), tensor))
        group._receives.add(self)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work, tensor in self._works:
            tensor.detach().copy_(work.wait().view(tensor.shape))
        self._works = []
        self._group._receives.discard(self)
        return True

    def is_completed(self) -> bool:
        return not self._works

    def get_future(self) -> Future[list[torch.Tensor]]:
        self.wait()
        return _future(self._tensors)

    getFuture = get_future


@contextmanager
def _flat(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor as a contiguous 1-D one inside the block; what is written there is in the tensor afterwards."""
    tensor = tensor.detach()
    flat = tensor.contiguous().view(-1)
    yield flat
    if not tensor.is_contiguous():
        tensor.copy_(flat.view(tensor.shape))


def _future(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def _finished(result: Any) -> dist.Work:
    work: dist.Work = _c10d._create_work_from_future(_future(result))
    return work


class _RankedMesh(DeviceMesh):
    """A DeviceMesh that stores its rank: thread ranks have no default process group to ask for it."""

    def get_rank(self) -> int:
        return int(self._rank)

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        coordinate = self.get_coordinate()
        assert coordinate is not None  # the mesh is made of this rank's own groups
        if isinstance(mesh_dim, str):
            mesh_dim = (self.mesh_dim_names or ()).index(mesh_dim)
        return coordinate[mesh_dim or 0]


def device_mesh(
    mesh: Mesh, axes: Sequence[str], rank: int, device_type: str, groups: Sequence[dist.ProcessGroup]
) -> DeviceMesh:
    """torch's DeviceMesh of the ranks that differ from ``rank`` on ``axes`` only, with ``groups`` along them.

    The dimensions have the order of ``axes``, and their names.
    """
    ranks = torch.tensor(_grid(mesh, axes, rank), dtype=torch.int, device="cpu")
    # As DeviceMesh.from_group, which asks torch.distributed for the rank.
    made = _RankedMesh(device_type, ranks, mesh_dim_names=tuple(axes), _init_backend=False, _rank=rank)
    made._dim_group_names = [group.group_name for group in groups]
    registry = getattr(made, "_pg_registry", None)  # of newer versions of torch
    if registry is not None:
        registry.update({group.group_name: group for group in groups})
    return made


def _grid(mesh: Mesh, axes: Sequence[str], rank: int) -> Any:
    """The ranks along the first axis, each with those along the second, and so on, as nested lists."""
    return rank if not axes else [_grid(mesh, axes[1:], other) for other in mesh.ranks_along(axes[0], rank)]

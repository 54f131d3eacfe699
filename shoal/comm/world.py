"""The world: this rank, its device, and the communicators to the other ranks.

world = current_world()
comm = world.communicator("dp", Mesh.of(world.size))
comm.all_reduce(gradient, scale=1 / comm.size, label="gradient").wait()
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh

from shoal.comm.environment import Launch, check_alone, heartbeat_place, read_launch
from shoal.comm.failure import ExceptHook
from shoal.comm.fake import FakeCommunicator, FakeStages, FakeStageTransport, FakeTransport
from shoal.comm.interface import meet, settle_in
from shoal.comm.local_device import (
    accelerator,
    device_of,
    identity_of,
    local_rank_by_host,
    publish_host,
    register_device,
)
from shoal.comm.named_group import destroy_groups, named_group
from shoal.comm.nccl import ComparedCommunicator
from shoal.comm.process_group import CommunicatorGroup, device_mesh
from shoal.comm.protocol import Backend, Communicator
from shoal.comm.recorder import Group, Recorder
from shoal.comm.torch_dist import ProcessTransport
from shoal.config.source import open_source
from shoal.errors import ConfigError, RankFailedError, UsageError
from shoal.hang import HangGuard
from shoal.heartbeat import Heartbeat, await_call, heartbeat
from shoal.mesh import Mesh
from shoal.streams import simulation, streams_of
from shoal.text import listed_ranks

TIMEOUT = timedelta(minutes=30)
DEFAULT_PORT = 29500

logger = logging.getLogger("shoal")


class Transport(Protocol):
    """Opens communicators to the other ranks: threads, processes over torch.distributed, or none (a dry run)."""

    def open(self, axis: str, groups: Sequence[tuple[int, ...]], max_ctas: int | None, number: int) -> Backend:
        """A communicator of this rank's group. Every rank of the world opens the same axes in the same order."""
        ...

    def report_failure(self, rank: int, text: str, error: BaseException) -> None:
        """Report to all ranks that ``rank`` failed with the traceback ``text``. Never raises."""
        ...

    def close(self) -> None: ...


class World:
    """All ranks, as one of them sees them.

    Args:
        device: where this rank computes.
        backend: ``threads``, ``gloo``, ``nccl``, ``fake``, or ``none`` for a single rank without a process group.
        heartbeat: of this process; None: this rank is no process of its own.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        local_rank: int,
        device: torch.device,
        backend: str,
        transport: Transport | None,
        on_close: Callable[[], None] | None = None,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.device = device
        self.backend = backend
        self.mesh = Mesh.of(size)  # of the engine that was made last
        self.compares_calls = False  # before they begin: see ``ComparedCommunicator``
        self._trace_folder: str | None = None
        self.heartbeat = heartbeat or Heartbeat()
        self.recorder = Recorder(heartbeat=self.heartbeat)
        self.shared: dict[str, Any] | None = None  # by ranks that are threads
        self.stages: FakeStages | None = None  # of a dry run of all pipeline stages
        self.ranks_per_node: int | None = None  # of a dry run's machine
        self._transport = transport
        self._communicators: dict[tuple[str, tuple[int, ...], object, int | None, int], Communicator] = {}
        self._compared: dict[Communicator, Communicator] = {}
        self._process_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._on_closing: list[Callable[[], None]] = []
        self._on_close = on_close
        self.is_closed = False

    @property
    def is_dry(self) -> bool:
        """True if there are no other ranks, and tensors have no values: a dry run."""
        return self.backend == "fake"

    @property
    def reports(self) -> bool:
        """True on the rank that logs and writes what it measures: the first one of a run that is not dry."""
        return self.rank == 0 and not self.is_dry

    def __repr__(self) -> str:
        return f"World(rank={self.rank}, size={self.size}, device={self.device}, backend={self.backend!r})"

    def communicator(self, axis: str, mesh: Mesh, max_ctas: int | None = None, *, number: int = 0) -> Communicator:
        """The communicator of the ranks along ``axis``; the same object for the same ranks and arguments.

        Args:
            max_ctas: the most channels that NCCL opens, each of which takes buffers and a multiprocessor: 1 is enough
                for a few numbers at a time; 0: no group of NCCL, for memory of the host only; None: as NCCL wants.
            number: of several communicators of the same ranks. On an accelerator each has a stream of its own, so that
                what is issued on one waits for nothing on another; elsewhere all are one.

        Communicates: the first time, control messages over the whole world: every rank calls it in the same order.
        """
        if self.is_closed:
            raise UsageError(f"{self} is closed", do="ask for communicators before close().")
        if mesh.world_size != self.size:
            raise UsageError(
                f"{mesh} has {mesh.world_size} ranks and the world {self.size}", do="use Mesh.of(world.size)."
            )
        ranks = mesh.ranks_along(axis, self.rank)
        accelerator = simulation()
        number = number if streams_of(self.device) is not None else 0
        key = axis, ranks, accelerator, max_ctas, number
        result = self._communicators.get(key)
        if result is None:
            backend: Backend
            if mesh.size(axis) == 1 or self._transport is None:
                backend = FakeCommunicator(axis, 0, 1)
            else:  # also where this rank alone is on no group of the axis: all ranks open it together
                backend = self._transport.open(axis, mesh.groups(axis), max_ctas, number)
                if accelerator is not None:
                    backend = accelerator.communicator(backend, ranks, self.shared, number)
                backend.max_ctas = max_ctas
                if len(ranks) > 1:
                    backend.group = Group(f"{axis} of ranks {listed_ranks(ranks)}", ranks)
            result = self._communicators[key] = Communicator(backend, self.recorder)
        if self.compares_calls and not result.backend.compares_calls:
            return self._compared.setdefault(result, ComparedCommunicator(result))
        return result

    def hosts(self, comm: Communicator, ranks: Sequence[int], own: str, *, label: str) -> list[str]:
        """What names the host of each rank, along an axis; in a dry run the node of its machine.

        Args:
            comm, ranks: of the axis.
            own: of this rank's host.

        Communicates: ``own``, between the hosts.
        """
        gathered = list(comm.gather_objects(own, label=label))
        if self.ranks_per_node is None:
            return gathered
        return [f"node-{rank // self.ranks_per_node}" for rank in ranks]

    def process_group(self, axis: str, mesh: Mesh) -> dist.ProcessGroup:
        """torch's process group of the ranks along ``axis``; the same object for the same ranks.

        Where ranks are processes, one of torch's own, without Shoal's failure reports; else one whose
        operations are this world's (see ``process_group``).

        Communicates: the first time, start-up messages: every rank calls it in the same order.
        """
        ranks = mesh.ranks_along(axis, self.rank)
        result = self._process_groups.get(ranks)
        if result is None:
            comm = self.communicator(axis, mesh)
            if self.backend in ("threads", "none"):
                name = f"shoal-{id(self)}-{len(self._process_groups)}"
                group = CommunicatorGroup(comm, ranks, name)
                self._on_closing.append(group.unregister)
                result = group
            elif len(ranks) == self.size:
                result = dist.group.WORLD
                assert result is not None
            else:
                store = dist.distributed_c10d._get_default_store()
                if isinstance(self._transport, ProcessTransport):
                    store = self._transport.store
                result = named_group(store, f"shoal/group/{len(self._process_groups)}/{ranks[0]}", ranks)
                self._on_closing.append(partial(destroy_groups, [result], has_failed=False))
            self._process_groups[ranks] = result
        return result

    def device_mesh(self, mesh: Mesh, axes: Sequence[str]) -> DeviceMesh:
        """torch's DeviceMesh over ``axes`` of ``mesh``, slowest first, in the groups of :meth:`process_group`.

        Its ranks are those that differ from this one on ``axes`` only.
        """
        groups = [self.process_group(axis, mesh) for axis in axes]
        return device_mesh(mesh, axes, self.rank, self.device.type, groups)

    def report_failure(self, error: BaseException) -> None:
        """Report to all ranks that this one failed: every rank that waits in a collective raises its traceback.

        A RankFailedError is reported with the rank and traceback that it carries, for ranks that share no axis with the
        one that failed. No collective works after this. Never raises.
        """
        if self._transport is None:
            return
        if isinstance(error, RankFailedError):
            self._transport.report_failure(error.failed_rank, error.remote_traceback, error)
        else:
            self._transport.report_failure(self.rank, "".join(traceback.format_exception(error)), error)
        self.write_trace()

    def trace_into(self, folder: str | None) -> None:
        """Write this rank's last calls into ``folder`` at a failure and a hang from now on; None: write none."""
        place, is_over = heartbeat_place(), Event()
        if folder and not self._trace_folder and place and self.heartbeat.is_read and self.heartbeat.file is None:
            Thread(
                target=await_call, args=[place, self.write_trace, is_over], name="shoal-hang-call", daemon=True
            ).start()
            self._on_closing.append(is_over.set)
        self._trace_folder = folder

    def write_trace(self) -> None:
        """Write this rank's last calls where ``trace_into`` says. Any thread may call. Never raises."""
        if self._trace_folder is not None:
            try:
                self.recorder.write_trace(Path(self._trace_folder), self.rank)
            except OSError as error:
                logger.warning("rank %d could not write its collectives: %s", self.rank, error)

    def close(self) -> None:
        """Close every group, every communicator and the transport. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        for close in self._on_closing:
            close()
        self._process_groups.clear()
        for communicator in self._communicators.values():
            communicator.close()
        self._communicators.clear()
        self._compared.clear()
        if self._transport is not None:
            self._transport.close()
        on_close, self._on_close = self._on_close, None  # an engine may keep this world; the group must end
        if on_close is not None:
            on_close()


# The world of a rank that is a thread, or of a dry run: it ends with its block.
_scoped_world: ContextVar[World | None] = ContextVar("scoped_world", default=None)


class _Process:
    """This process's world, which lives as long as torch's default process group. Every thread sees it."""

    def __init__(self) -> None:
        self.world: World | None = None
        self.group: object = None
        self.hook: ExceptHook | None = None
        self.pid = os.getpid()

    def close(self) -> None:
        if self.pid != os.getpid():
            return  # a fork (a data worker) that ends must not take the parent's world with it
        if self.hook is not None:
            self.hook.remove()
            self.hook = None
        if self.world is not None:
            self.world.close()
            self.world = None
        # Gloo's threads end with the group's last reference. One that frees a tensor while Python is being taken
        # down, after its last collective, ends the process with SIGABRT.
        self.group = None


_process = _Process()
atexit.register(_process.close)


@contextmanager
def use_world(world: World) -> Iterator[World]:
    """Make ``world`` the current one inside the block, for this thread."""
    token = _scoped_world.set(world)
    try:
        yield world
    finally:
        _scoped_world.reset(token)


def has_scoped_world() -> bool:
    """True in a rank that is a thread, in a dry run, and inside ``use_world``."""
    return _scoped_world.get() is not None


def current_world(config: Any = None) -> World:
    """The world this code runs in.

    The first that applies: the one of ``run_ranks``, ``fake_world`` or ``use_world``; the one that torch.distributed
    was initialised with; the one that a launcher's variables name, initialised now; this rank alone.

    Args:
        config: as of ``init_distributed``.

    Communicates: start-up messages, if torch.distributed is initialised now.
    """
    scoped = _scoped_world.get()
    if scoped is not None:
        return scoped
    if not _is_initialized():
        if read_launch() is not None:
            return init_distributed(verbose=False, config=config)
        check_alone()
        device = device_of(None, None)  # the current one: the script may have set another since
        world = _process.world
        if world is None or world.is_closed or _process.group is not None:
            _process.close()
            world = None
        if world is None or world.device != device:  # an engine keeps the world of the device that it was made on
            world = _process.world = World(0, 1, 0, device, "none", None)
            _process.hook = _process.hook or ExceptHook(world.report_failure)
        return world
    return _adopt(TIMEOUT)


def process_group() -> object:
    """Torch's default process group; None without one, as where ranks are threads."""
    return dist.group.WORLD if _is_initialized() and _scoped_world.get() is None else None


def communicator_of(group: dist.ProcessGroup | None, axis: str = "sp") -> Communicator:
    """The communicator of the ranks of ``group``; None: of all ranks.

    Args:
        axis: ``sp``, or another basic axis of the mesh, under which its collectives are recorded.

    Raises: UsageError: the ranks are not ``first, first + stride, first + 2 * stride, ...``, or the group's size times
        its stride does not divide the world.
    Communicates: the first time, control messages over the whole world: every rank calls, with its own group.
    """
    if isinstance(group, CommunicatorGroup):
        return group.communicator
    world = current_world()
    ranks = list(range(world.size)) if group is None else dist.get_process_group_ranks(group)
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if stride > 0 and world.size % (stride * len(ranks)) == 0:
        degrees: dict[str, Any] = {"tp": stride, axis: len(ranks)}
        mesh = Mesh.of(world.size, **degrees)
        if mesh.ranks_along(axis, world.rank) == tuple(ranks):
            return world.communicator(axis, mesh)
    raise UsageError(
        f"ranks {ranks} of a process group are no group of an axis of a mesh of {world.size} ranks",
        do="make groups of neighbours, or of every n-th rank, that are alike on all ranks.",
        code="process-group-ranks",
    )


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> World:
    """Connect to the other ranks, or use the existing process group, and make this world the current one.

    Args:
        dist_backend: ``nccl``, ``gloo``, or any that torch knows; None: NCCL (and Gloo) with a GPU, else Gloo.
        auto_mpi_discovery: also read the ranks from MPI's and Slurm's variables.
        distributed_port: port of the store, if the environment sets none.
        verbose: log a line on rank 0.
        timeout: without progress, after which a collective gives up, and the start where the config sets no
            ``timeouts.init``; 30 minutes.
        init_method: as torch's; None: from the environment, or a world of one rank without it.
        dist_init_required: False: only use an existing process group.
        config: whose ``timeouts.init`` bounds the start.

    Raises: UsageError: no process group and ``dist_init_required=False``. ConfigError: MPI has started ranks on several
        machines, and the address of rank 0 is not given. CommError: some ranks have not come in time; it names them.
    """
    timeout = timeout or TIMEOUT
    if _is_initialized():
        return _adopt(timeout)
    if dist_init_required is False:
        raise UsageError(
            "torch.distributed is not initialised, and dist_init_required=False forbids initialising it",
            do="call torch.distributed.init_process_group first, or leave dist_init_required out.",
        )
    launch = read_launch(mpi_and_slurm=auto_mpi_discovery)
    if rank >= 0 or world_size >= 0:
        if not 0 <= rank < world_size:
            raise ConfigError(
                f"init_distributed was given rank={rank} and world_size={world_size}",
                do="give both, with a rank from 0 to world_size - 1.",
                code="launch-environment",
            )
        local_rank = launch.local_rank if launch is not None else None
        address, port = (launch.address, launch.port) if launch is not None else (None, None)
        launch = Launch(rank, world_size, local_rank, address, port, "arguments")
    if launch is None:
        check_alone()
        launch = Launch(0, 1, 0, None, None, "none")
    backend = dist_backend or ("cpu:gloo,cuda:nccl" if accelerator(None) is not None else "gloo")
    arguments: dict[str, Any] = {"rank": launch.rank, "world_size": launch.world_size, "timeout": timeout}
    if init_method is not None:
        arguments["init_method"] = init_method
    elif launch.world_size == 1 and launch.address is None:
        arguments["store"] = HashStore()
    elif launch.launcher == "mpi" and launch.address is None:
        raise ConfigError(
            f"MPI has started {launch.world_size} ranks on more than one machine, and does not say where rank 0 is.",
            where=f"rank {launch.rank}",
            do="set MASTER_ADDR to the host name or address of rank 0's machine (mpirun -x MASTER_ADDR=..., mpiexec"
            " -genv MASTER_ADDR ...).",
            code="launch-environment",
        )
    else:
        seconds = _start_seconds(config, timeout)
        beat = heartbeat(heartbeat_place())
        beat.enter("init", seconds)
        address, port = launch.address or "127.0.0.1", launch.port or distributed_port
        arguments["store"] = meet(launch, address, port, seconds)
        beat.enter("init", timeout.total_seconds())
    dist.init_process_group(backend, **arguments)
    world = _adopt(timeout, owns_group=True)
    world.heartbeat.enter("data", None)
    if verbose and world.rank == 0:
        logger.info("joined %d ranks (%s, launcher %s)", world.size, backend, launch.launcher)
    return world


def _start_seconds(config: Any, timeout: timedelta) -> float:
    """``timeouts.init`` of a config that sets it; else the time-out. What is wrong in the config is found later."""
    with suppress(Exception):
        return float(open_source(config)[0].value["timeouts"]["init"])
    return timeout.total_seconds()


@contextmanager
def fake_world(size: int, rank: int = 0, device: torch.device | None = None) -> Iterator[World]:
    """A dry run as rank ``rank`` of ``size``: nothing is sent. ``torch.distributed`` says so too, by its fake backend.

    Inside, ``FakeTensorMode`` may be on. A process group that is there already stays as it is.
    """
    if not 0 <= rank < size:
        raise UsageError(f"a fake world of {size} ranks has no rank {rank}", do=f"use a rank from 0 to {size - 1}.")
    world = World(rank, size, rank, device or torch.device("cpu"), "fake", FakeTransport(rank))
    with fake_process_group(size, rank), use_world(world), closing(world):
        yield world


@contextmanager
def fake_stage_world(size: int, rank: int, stages: FakeStages) -> Iterator[World]:
    """A dry run as rank ``rank``, which stands for its pipeline stage. Inside ``fake_process_group``."""
    world = World(rank, size, rank, torch.device("cpu"), "fake", FakeStageTransport(rank, size, stages))
    world.stages = stages
    with use_world(world), closing(world):
        yield world


@contextmanager
def fake_process_group(size: int, rank: int) -> Iterator[None]:
    """``torch.distributed`` has ``size`` ranks inside the block, of which one exists. A group that is there stays."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    owns_group, hook = not _is_initialized(), sys.excepthook
    if owns_group:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        if owns_group:
            dist.destroy_process_group()
            sys.excepthook = hook  # torch's own, which each new group puts another prefix before


def _is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _local_rank(store: Store, rank: int, size: int) -> int:
    """This rank's number among the ranks of its machine: the launcher's, or counted by host names."""
    publish_host(store, rank)  # also where this rank's is set, since another rank's may not be
    launch = read_launch()
    if launch is not None and launch.world_size == size and launch.local_rank is not None:
        return launch.local_rank
    return local_rank_by_host(store, rank)


def _take(device: torch.device) -> torch.device:
    """``device``, which is the current one from now on."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    return device


def _adopt(timeout: timedelta, owns_group: bool = False) -> World:
    """The world of torch's default process group: made once, until it is closed or the group is another."""
    group = dist.group.WORLD
    if _process.world is not None and not _process.world.is_closed and _process.group is group:
        return _process.world
    _process.close()
    rank, size = dist.get_rank(), dist.get_world_size()
    backend = dist.get_backend()
    reached = None if "nccl" in str(group and dist.get_backend_config(group)) else backend
    bound = getattr(group, "bound_device_id", None)
    transport: Transport | None = None
    beat = heartbeat(heartbeat_place())
    guards: Any = None  # their part of the store
    if backend == "fake":
        local_rank, device = rank, device_of(None, reached, bound)
        transport = FakeTransport(rank)
    elif size == 1:
        local_rank, device = 0, _take(device_of(None, reached, bound))
    else:
        store = dist.distributed_c10d._get_default_store()
        local_rank = _local_rank(store, rank, size)
        device = _take(device_of(local_rank, reached, bound))
        generation = store.add(f"shoal/worlds/{rank}", 1)  # the same on every rank: worlds are made and closed together
        store = PrefixStore(f"shoal/{generation}", store)
        if not owns_group:
            settle_in(PrefixStore("interface", store), rank, size, timeout)
        transport = ProcessTransport(store, rank, size, device, timeout.total_seconds())
        if device.type != "cpu":
            try:
                register_device(store, rank, identity_of(device))
            except ConfigError as error:
                transport.report_failure(rank, str(error), error)
                transport.close()
                raise
        if beat.file is not None:
            guards = PrefixStore("hang", store)
    on_close = partial(destroy_groups, [group], has_failed=False) if owns_group and group is not None else None
    world = World(rank, size, local_rank, device, backend, transport, on_close, beat)
    if guards is not None:
        guard = HangGuard(guards.clone(), guards.clone(), rank, size, beat, world.write_trace)
        world._on_closing.append(guard.stop)
    _process.world = world
    _process.group = group
    _process.pid = os.getpid()
    _process.hook = ExceptHook(world.report_failure)
    return world

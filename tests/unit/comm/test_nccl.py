"""What is asked of NCCL: the reduction of each sum, the kernels after it, and the groups. No GPU is needed."""

from __future__ import annotations

import doctest
import math
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory

import shoal.comm.nccl as nccl
from shoal.comm.failure import FirstError
from shoal.comm.gloo import GlooCommunicator
from shoal.comm.gloo_links import GlooLinks
from shoal.comm.named_group import destroy_groups, is_open
from shoal.comm.nccl import NcclCommunicator, NcclWork, split_scale
from shoal.comm.protocol import Communicator, Message
from shoal.comm.recorder import Recorder
from shoal.comm.torch_dist import ProcessTransport
from shoal.comm.world import World
from shoal.engine.model_parts import axes_of
from shoal.errors import CommError, RankFailedError, UsageError
from shoal.mesh import Mesh
from shoal.running import status
from shoal.sharding.sparse_sum import exchange_counts

SIZE = 4
MEET = ProcessTransport._meet


class FakeWork:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def wait(self) -> None:
        if self.error is not None:
            raise self.error


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Every call of torch.distributed, with its reduction as text. Nothing is moved."""
    found: list[tuple[str, Any]] = []

    def record(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> FakeWork:
            assert kwargs.get("group") == "group"
            operations = [arg for arg in args if isinstance(arg, tuple | dist.ReduceOp.RedOpType | dist.ReduceOp)]
            found.append((name, operations[0] if operations else None))
            return FakeWork()

        return call

    @contextmanager
    def coalescing(group: str, device: torch.device, *, async_ops: bool) -> Iterator[FakeWork]:
        assert group == "group" and device.type == "meta" and async_ops
        found.append(("group start", None))
        yield FakeWork()
        found.append(("group end", None))

    monkeypatch.setattr(nccl, "_all_gather", record("all_gather"))
    monkeypatch.setattr(nccl, "_reduce_scatter", record("reduce_scatter"))
    monkeypatch.setattr(nccl, "_premul_sum", lambda factor: ("premul", factor))
    monkeypatch.setattr(nccl, "_coalescing", coalescing)
    for name in ("all_reduce", "broadcast", "all_to_all_single", "isend", "irecv"):
        monkeypatch.setattr(dist, name, record(name))
    return found


def backend(first_error: FirstError | None = None) -> NcclCommunicator:
    host: Any = SimpleNamespace(rank=1, size=SIZE, scratch_nbytes=0, close=lambda: None)
    group: Any = "group"
    failures: Any = SimpleNamespace(explain=lambda error, what: RankFailedError(2, f"{what} {error}"))
    return NcclCommunicator("dp", group, host, failures, first_error or FirstError())


def communicator(first_error: FirstError | None = None) -> Communicator:
    return Communicator(backend(first_error), Recorder())


def meta(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device="meta")  # on no CPU: goes to NCCL, and has no values


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(nccl).failed == 0


@pytest.mark.parametrize(
    ("dtype", "scale", "operation", "after"),
    [
        (torch.float32, 1.0, dist.ReduceOp.SUM, None),
        (torch.float32, 1 / SIZE, dist.ReduceOp.AVG, None),
        (torch.float32, 1 / 12, ("premul", 1 / 12), None),
        (torch.bfloat16, 1 / SIZE, dist.ReduceOp.AVG, None),
        (torch.bfloat16, 1 / 64, ("premul", 1 / 64), None),
        (torch.bfloat16, 1 / 12, ("premul", 1 / 16), 16 / 12),
        (torch.float16, 1 / SIZE, ("premul", 1 / 2), 1 / 2),
        (torch.float16, 1.0, ("premul", 1 / 2), 2.0),
        (torch.int64, 1.0, dist.ReduceOp.SUM, None),
    ],
)
def test_a_sum_is_scaled_inside_ncclls_kernel(
    calls: list[tuple[str, Any]], dtype: torch.dtype, scale: float, operation: Any, after: float | None
) -> None:
    nccl_backend = backend()
    comm = Communicator(nccl_backend, Recorder())
    works: list[Any] = [
        comm.all_reduce(meta(8, dtype), scale=scale, label="x"),
        comm.reduce_scatter(meta(8, dtype), meta(2, dtype), scale=scale, label="x"),
        comm.reduce_scatter(meta(8, dtype), meta(2, torch.float32), scale=scale, accumulate=True, label="x"),
    ]
    assert calls == [("all_reduce", operation), ("reduce_scatter", operation), ("reduce_scatter", operation)]
    for work in works:
        assert (work._after is None) is (after is None)
    if after is not None:
        assert [factor for factor, _ in nccl_backend._factors] == [pytest.approx(after)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1 / SIZE, 1 / 12])
def test_registered_memory_is_summed_plainly(calls: list[tuple[str, Any]], dtype: torch.dtype, scale: float) -> None:
    """NCCL has no kernels for its other reductions in symmetric windows and in the switch."""
    nccl_backend = backend()
    nccl_backend._registered.append(cast(Any, ("pool", "backend")))
    comm = Communicator(nccl_backend, Recorder())
    comm.all_reduce(meta(8, dtype), scale=scale, label="x")
    comm.reduce_scatter(meta(8, dtype), meta(2, dtype), scale=scale, label="x")
    assert calls == [("all_reduce", dist.ReduceOp.SUM), ("reduce_scatter", dist.ReduceOp.SUM)]
    assert [factor for factor, _ in nccl_backend._factors] == ([scale] if scale != 1.0 else [])


def kernels_of(work: NcclWork) -> list[str]:
    """The operators that ``wait()`` runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work.wait()
    names = ("aten::mul", "aten::mul_", "aten::add_", "aten::copy_", "aten::addcmul", "aten::_to_copy")
    return [event.name for event in profile.events() if event.name in names and event.cpu_parent is None]


@pytest.mark.parametrize("after", [None, 0.5, 4 / 3])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    ("landing_dtype", "out_dtype"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float32),
    ],
)
def test_the_result_is_written_by_one_kernel_and_rounded_once(
    landing_dtype: torch.dtype, out_dtype: torch.dtype, accumulate: bool, after: float | None
) -> None:
    landing = torch.randn(1000).to(landing_dtype)
    out = torch.randn(1000).to(out_dtype)
    expected = landing.double() * (1.0 if after is None else after) + (out.double() if accumulate else 0.0)
    factor = None if after is None else torch.full((1,), after)
    work: Any = FakeWork()
    done = NcclWork(backend(), "x", work, out, landing, factor, accumulate)
    assert len(kernels_of(done)) == 1
    assert done.wait() is out
    resolution = torch.finfo(out_dtype).eps / 2
    assert ((out.double() - expected).abs() <= resolution * expected.abs() + 1e-6).all()


def test_a_sum_in_place_needs_no_kernel_unless_a_factor_remains() -> None:
    out = torch.ones(10, dtype=torch.float16)
    work: Any = FakeWork()
    assert kernels_of(NcclWork(backend(), "x", work, out)) == []
    assert kernels_of(NcclWork(backend(), "x", work, out, after=torch.full((1,), 0.5))) == ["aten::mul"]
    assert out.tolist() == [0.5] * 10


@pytest.mark.parametrize("size", [2, 8, 64, 1024])
def test_a_mean_in_fp16_loses_half_the_bits_of_headroom_at_most(size: int) -> None:
    """NCCL multiplies and adds in fp16. Unscaled, values above 65504 / ranks overflow; here 65504 / sqrt(2 ranks).

    The smallest values are not lost either: the part before is no smaller than 1 / sqrt(2 ranks).
    """
    before, after = split_scale(1 / size, torch.float16, size)
    for value in (60_000.0 / (2 * size) ** 0.5, 6.2e-5 * (2 * size) ** 0.5):
        total = torch.zeros((), dtype=torch.float16)
        for _ in range(size):
            total += torch.tensor(value, dtype=torch.float16) * before
        assert float(total) * after == pytest.approx(value, rel=0.1)  # 1024 additions in fp16


def test_sends_and_all_to_all_reach_the_group(calls: list[tuple[str, Any]]) -> None:
    comm = communicator()
    tensor = meta(8, torch.float32)
    for work in (
        comm.send(tensor, 2, label="x"),
        comm.recv(tensor, 0, label="x"),
        comm.all_to_all(meta(8, torch.float32), tensor, label="x"),
        comm.broadcast(tensor, 0, label="x"),
        comm.all_gather(tensor, label="x"),
    ):
        assert work.wait() is not None
    assert comm.exchange(meta(3, torch.float32), label="x").wait().shape == (SIZE, 3)
    # A message alone is a batch too: torch warns of one that is not, and connects two ranks apart for it.
    messages = [name for each in ("isend", "irecv") for name in ("group start", each, "group end")]
    collectives = ["all_to_all_single", "broadcast", "all_gather", "all_gather"]
    assert [name for name, _ in calls] == messages + collectives


def test_a_batch_is_one_group_of_sends_and_receives(calls: list[tuple[str, Any]]) -> None:
    sent, received = meta(8, torch.float32), meta(8, torch.float32)
    messages = [Message("recv", received, 0, "x"), Message("send", sent, 2, "x"), Message("send", sent, 0, "y")]
    assert communicator().batch(messages).wait() is received
    assert [name for name, _ in calls] == ["group start", "isend", "isend", "irecv", "group end"]


def test_after_the_watch_has_found_a_failure_every_wait_raises_it(calls: list[tuple[str, Any]]) -> None:
    first_error = FirstError()
    comm = communicator(first_error)
    waiting = comm.all_gather(meta(8, torch.float32), label="x")
    first_error.keep(RankFailedError(3, "OutOfMemoryError"))
    for call in (waiting.wait, lambda: comm.all_reduce(meta(8, torch.float32), label="y")):
        with pytest.raises(RankFailedError, match="OutOfMemoryError") as error:
            call()
        assert error.value.failed_rank == 3
    assert len(calls) == 1


def test_values_that_the_host_has_read_after_a_failure_are_not_used(
    calls: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To abort a group ends the kernel that the host waits for; what it should have written is of any value."""
    first_error = FirstError()
    comm = communicator(first_error)

    def read(tensor: torch.Tensor, *, when_fake: float) -> list[float]:
        first_error.keep(RankFailedError(3, "OutOfMemoryError"))
        return [float("nan")] * tensor.numel()

    device = torch.device("meta")
    monkeypatch.setattr("shoal.comm.protocol.read_vector", read)
    for use in (
        lambda: status._exchange(comm, [1.0, 2.0], device),
        lambda: exchange_counts(comm, 1, device, label="rows"),
    ):
        first_error.error = None
        with pytest.raises(RankFailedError, match="OutOfMemoryError"):
            use()


def test_ncclls_own_error_is_explained_once() -> None:
    comm = backend()
    work: Any = FakeWork(dist.DistBackendError("connection reset"))
    for _ in range(2):
        with pytest.raises(RankFailedError, match="connection reset"):
            NcclWork(comm, "all_reduce 'x'", work, torch.ones(1)).wait()


class Joined:
    """The groups that a transport makes: ranks, seconds, priority, channels and the rest of NCCL's;
    of Gloo the size of each axis and the ranks to connect to.

    Attributes: ``aborting``: how many of NCCL's groups are told to abort before the call for the first one returns, as
        where each waits for the kernels of all others. ``ended``: what was done to each group, in order.
    """

    def __init__(self) -> None:
        self.aborting = threading.Barrier(1)
        self.ended: list[tuple[str, dist.ProcessGroup]] = []
        self.nccl: list[tuple[Any, ...]] = []
        self.gloo: list[tuple[int, set[int]]] = []
        self.names: set[str] = set()

    def ends_of(self, group: dist.ProcessGroup) -> list[str]:
        return [end for end, of in self.ended if of is group]


def connected(joined: Joined) -> set[int]:
    """The ranks that Gloo connects one rank with."""
    return set().union(*(ranks for _, ranks in joined.gloo))


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Joined:
    made = Joined()

    class Group(dist.ProcessGroup):
        def __init__(self) -> None:
            super().__init__(0, 2)  # type: ignore[call-arg]

        def abort(self) -> None:
            made.aborting.wait(10.0)
            made.ended.append(("abort", self))

    def named_group(_store: Any, name: str, ranks: tuple[int, ...], **more: Any) -> dist.ProcessGroup:
        options, timeout = more.pop("options"), more.pop("timeout")
        assert options._timeout == timeout
        made.names.add(name)
        made.nccl.append(
            (ranks, timeout.total_seconds(), options.is_high_priority_stream, options.config.max_ctas, more)
        )
        group = Group()
        monkeypatch.setitem(dist.distributed_c10d._world.pg_map, group, ("nccl", None))
        return group

    def destroy(group: dist.ProcessGroup) -> None:
        made.ended.append(("destroy", group))
        del dist.distributed_c10d._world.pg_map[group]

    options = SimpleNamespace(
        Options=lambda is_high_priority_stream: SimpleNamespace(
            is_high_priority_stream=is_high_priority_stream, config=SimpleNamespace(max_ctas=None), _timeout=None
        )
    )
    monkeypatch.setattr(dist, "ProcessGroupNCCL", options, raising=False)
    monkeypatch.setattr("shoal.comm.nccl.named_group", named_group)
    monkeypatch.setattr(dist, "destroy_process_group", destroy)

    def connect(_links: Any, ranks: tuple[int, ...], peers: list[int]) -> None:
        made.gloo.append((len(ranks), {ranks[peer] for peer in peers}))

    monkeypatch.setattr(GlooLinks, "connect", connect)
    monkeypatch.setattr(ProcessTransport, "_meet", lambda transport, name: None)
    return made


DEVICE = torch.device("cuda", 1)


def test_groups_have_streams_of_high_priority_and_axes_of_the_same_ranks_share_one(joined: Joined) -> None:
    transport = ProcessTransport(dist.HashStore(), 0, 4, DEVICE, 60.0, watch_seconds=3600.0)
    whole, halves, tied = ((0, 1, 2, 3),), ((0, 1), (2, 3)), ((0,), (1, 2), (3,))
    assert isinstance(transport.open("dp", whole), NcclCommunicator)
    transport.open("world", whole)
    transport.open("tp", halves)
    assert transport.open("tied:1,2", tied).size == 1
    transport.open("world", whole, 1)  # its group has all channels already
    more = {"backend": "nccl", "device": DEVICE}
    assert joined.nccl == [(ranks, 60.0, True, None, more) for ranks in ((0, 1, 2, 3), (0, 1), (0,))]
    inner = ((0, 2), (1, 3))
    assert isinstance(transport.open("dp", inner, 0), GlooCommunicator)
    assert len(joined.nccl) == 3
    transport.open("world", inner, 1)
    transport.open("world", inner, 1)
    transport.open("dp", inner)
    transport.open("expert_dp", inner, 8)
    assert [each[:4] for each in joined.nccl[3:]] == [((0, 2), 60.0, True, 1), ((0, 2), 60.0, True, None)]
    assert len(joined.names) == len(joined.nccl) == 5
    assert joined.gloo[:3] == [(4, {1, 2, 3}), (4, {1, 2, 3}), (2, {1})]  # as far as there is no connection yet
    transport.close()
    assert [end for end, _ in joined.ended] == ["destroy"] * 5


def test_all_groups_are_aborted_at_once_and_not_destroyed_before(joined: Joined) -> None:
    """To abort one communicator waits for kernels of the others, and to destroy one for its own."""
    transport = ProcessTransport(dist.HashStore(), 0, 4, DEVICE, 60.0, watch_seconds=3600.0)
    for groups in (((0, 1, 2, 3),), ((0, 1), (2, 3)), ((0, 2), (1, 3))):
        transport.open("dp", groups)
    groups = list(transport._nccl.values())
    joined.aborting = threading.Barrier(3)
    transport._abort(RankFailedError(1, "why"))
    assert [end for end, _ in joined.ended] == ["abort"] * 3
    transport.close()
    assert all(joined.ends_of(group) == ["abort", "abort", "destroy"] for group in groups)


@pytest.mark.parametrize("has_failed", [True, False])
def test_no_rank_waits_in_nccl_for_one_that_has_not_come(has_failed: bool) -> None:
    transport = ProcessTransport(dist.HashStore(), 0, 2, DEVICE, 30.0 if has_failed else 0.05, watch_seconds=0.01)
    if has_failed:
        transport._failures.report(1, "OutOfMemoryError")
    with pytest.raises(CommError, match="OutOfMemoryError" if has_failed else r"1 of 2 ranks .* within 0.05 s"):
        transport.open("dp", ((0, 1),))
    transport.close()


def test_a_group_is_made_when_all_ranks_have_come(joined: Joined, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessTransport, "_meet", MEET)
    store = dist.HashStore()
    transports = [ProcessTransport(store, rank, 2, DEVICE, 30.0, watch_seconds=3600.0) for rank in range(2)]
    threads = [threading.Thread(target=each.open, args=("dp", ((0, 1),))) for each in transports]
    threads[0].start()
    threads[0].join(0.1)
    assert joined.nccl == []
    threads[1].start()
    for thread in threads:
        thread.join()
    assert len(joined.nccl) == 2
    for each in transports:
        each.close()


def test_the_rank_that_fails_aborts_its_groups_when_it_ends(joined: Joined) -> None:
    transport = ProcessTransport(dist.HashStore(), 1, 2, DEVICE, 60.0, watch_seconds=3600.0)
    transport.open("dp", ((0, 1),))
    transport.report_failure(1, "why", RuntimeError("why"))
    transport.close()
    assert [end for end, _ in joined.ended] == ["abort", "destroy"]


def test_groups_that_the_script_has_destroyed_are_left_alone(joined: Joined, monkeypatch: pytest.MonkeyPatch) -> None:
    transport = ProcessTransport(dist.HashStore(), 0, 2, DEVICE, 60.0, watch_seconds=3600.0)
    comm = transport.open("dp", ((0, 1),))
    assert isinstance(comm, NcclCommunicator)
    known = ["pool"]

    def deregister(pool: str) -> None:
        known.remove(pool)
        raise dist.DistBackendError("NCCL communicator was aborted")

    backend, pool = SimpleNamespace(deregister_mem_pool=deregister), SimpleNamespace(native="pool")
    comm._registered.append(cast(Any, (lambda: pool, backend)))
    for group in transport._nccl.values():
        monkeypatch.delitem(dist.distributed_c10d._world.pg_map, group)
    comm.close()
    transport.close()
    assert joined.ended == [] and known == []


def test_torch_makes_a_group_of_what_it_is_given_and_warns_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through torch's own code, with Gloo in the place of ProcessGroupNCCL."""
    c10d = dist.distributed_c10d
    made: list[Any] = []

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self._timeout, self.config = timedelta(minutes=10), SimpleNamespace()
            self.is_high_priority_stream = is_high_priority_stream

    class Nccl(type):
        def __call__(cls, store: dist.Store, rank: int, size: int, options: Options) -> Any:
            made.append(options)
            return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=10))

        def __instancecheck__(cls, backend: Any) -> bool:
            return True

    backend_class = Nccl("ProcessGroupNCCL", (), {"Options": Options})
    for place in (dist, c10d):
        monkeypatch.setattr(place, "ProcessGroupNCCL", backend_class, raising=False)
    monkeypatch.setattr(c10d, "is_nccl_available", lambda: True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = nccl.new_group(dist.HashStore(), "name", [0], DEVICE, timedelta(seconds=60), 1)
        assert group.bound_device_id == DEVICE and group.group_name == "name" and is_open(group)
        assert (made[0]._timeout.total_seconds(), made[0].config.max_ctas) == (60.0, 1)
        destroy_groups([group], has_failed=False)
        assert not is_open(group)
    finally:
        dist.destroy_process_group()


def test_registered_memory_is_a_pool_of_torch_with_segments_that_are_not_divided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[tuple[Any, ...]] = []
    snapshot, use, make = torch.cuda.MemPool.snapshot, torch.cuda.use_mem_pool, torch.cuda.MemPool.__init__

    class Pool:
        def __init__(self, *args: Any, **keys: Any) -> None:
            signature(make).bind(self, *args, **keys)  # of this version of torch
            found.append((args, keys))

        def snapshot(self, **keys: Any) -> list[dict[str, int]]:
            signature(snapshot).bind(self, **keys)
            return [{"total_size": 8, "active_size": 8}, {"total_size": 6, "active_size": 0}]

    @contextmanager
    def used(*args: Any) -> Iterator[None]:
        signature(use).bind(*args)
        found.append(args)
        yield

    group = SimpleNamespace(
        mem_allocator="ncclMemAlloc",
        register_mem_pool=lambda pool: found.append(("registered", pool)),
        deregister_mem_pool=lambda pool: found.append(("deregistered", pool)),
        _get_backend=lambda device: group,
    )
    monkeypatch.setattr(torch.cuda, "MemPool", Pool)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", used)
    comm = backend()
    comm._group = cast(Any, group)
    pool, other = (comm.new_pool(DEVICE, is_symmetric=False) for _ in range(2))
    with pool.allocating():
        assert pool.free_nbytes == 6
    native = pool.native
    del other  # its engine has ended
    comm.close()
    made = (("ncclMemAlloc",), {"no_split": True})
    registered = [each for each in found if each[0] == "registered"]
    assert registered[0] == ("registered", native) and len(registered) == 2
    others = [each for each in found if each not in registered]
    assert others == [made, made, (native, DEVICE), ("deregistered", native)]


def test_memory_that_torch_does_not_register_is_an_error() -> None:
    comm = backend()
    comm._group = cast(Any, SimpleNamespace(_get_backend=lambda device: SimpleNamespace()))
    with pytest.raises(CommError, match=r"cannot register memory with NCCL on axis 'dp': .*mem_allocator"):
        comm.new_pool(DEVICE, is_symmetric=True)


def with_symmetric_memory(monkeypatch: pytest.MonkeyPatch, *gathered: list[Any], has_access: bool = True) -> list[str]:
    """What a rank finds in memory that it opens, of which the hosts tell ``gathered``, one call after the other.

    An element that is ``...`` is what this rank tells.
    """
    rows = iter(gathered)

    def gather(value: Any, *, label: str) -> list[Any]:
        return [value if each is ... else each for each in next(rows)]

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: has_access)
    opened: list[str] = []

    def workspace(name: str, min_size: int) -> None:
        signature(get_workspace).bind(name, min_size=min_size)
        symmetric_memory._group_name_to_workspace_tensor[cast(Any, name)] = torch.empty(min_size, dtype=torch.uint8)
        opened.append(name)

    get_workspace = symmetric_memory.get_symm_mem_workspace
    monkeypatch.setattr(symmetric_memory, "get_symm_mem_workspace", workspace)
    comm = backend()
    comm._group, comm._host.gather_objects = cast(Any, SimpleNamespace(group_name="tp group")), gather  # type: ignore[method-assign]
    assert comm.open_symmetric_memory(torch.device("cuda", 1))
    assert "tp group" in symmetric_memory._group_name_to_workspace_tensor
    comm.close()
    assert "tp group" not in symmetric_memory._group_name_to_workspace_tensor
    return opened


NODES = [["node", index] for index in range(SIZE)]
NO_PROBLEM = [...] * SIZE


def test_symmetric_memory_is_opened_once_and_freed_with_the_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_symmetric_memory(monkeypatch, NODES, NO_PROBLEM, NO_PROBLEM) == ["tp group"]


@pytest.mark.parametrize(
    ("gathered", "has_access", "reason"),
    [
        ([[["node", 0], ["node", 1], ["other", 0], ["other", 1]]], True, "its ranks are on 2 nodes"),
        ([[["node", 0]] * SIZE], True, "devices 0, 0, 0, 0, and torch needs different"),
        ([NODES, NO_PROBLEM], False, "rank 1 of the axis: GPU 1 has no access to the memory of GPU 0"),
        ([NODES, ["", "", "on rank 2 of the axis: why", ""]], True, "rank 2 of the axis: why"),
        (
            [NODES, NO_PROBLEM, ["", "", "", "on rank 3 of the axis: pidfd_open"]],
            True,
            "rank 3 of the axis: pidfd_open",
        ),
    ],
)
def test_where_symmetric_memory_cannot_be_used_every_rank_says_why(
    monkeypatch: pytest.MonkeyPatch, gathered: list[list[Any]], has_access: bool, reason: str
) -> None:
    with pytest.raises(CommError, match=rf"symmetric memory cannot be used on axis 'dp': .*{reason}") as caught:
        with_symmetric_memory(monkeypatch, *gathered, has_access=has_access)
    assert caught.value.code == "symmetric-memory"


@pytest.mark.parametrize(
    ("degrees", "groups"),
    [
        # Of 8 axes dp is used by the host only, and the ranks along world exchange a few numbers.
        (
            {"cp": 2, "sp": 2, "tp": 2, "ep": 4},
            ["loss", "world", "tp", "sp", "cp", "ep", "expert_dp"],
        ),
        # Experts are divided over the ranks of tp, and sharded over those of loss.
        ({"cp": 2, "sp": 2, "tp": 2, "ep": 2}, ["loss", "world", "tp", "sp", "cp"]),
        # Outputs and gradients of pipeline stages have a group each.
        ({"pp": 2, "tp": 2}, ["dp", "world", "tp", "pp", "pp", "pipeline_stage"]),
        ({}, ["dp"]),
    ],
)
def test_the_axes_of_a_mesh_have_so_many_groups(joined: Joined, degrees: dict[str, int], groups: list[str]) -> None:
    mesh = Mesh.of(16, **degrees)
    transport = ProcessTransport(dist.HashStore(), 0, 16, DEVICE, 60.0, watch_seconds=3600.0)
    with closing(World(0, 16, 0, DEVICE, "nccl", transport)) as world:
        world.communicator("world", Mesh.of(16), max_ctas=0)
        axes_of(mesh, partial(world.communicator, mesh=mesh))
        assert [(each[0], each[3]) for each in joined.nccl] == [
            (mesh.ranks_along(axis, 0), 1 if axis == "world" else None) for axis in groups
        ]
        assert len(connected(joined)) <= 9  # of 15


@pytest.mark.parametrize(
    ("size", "degrees", "most"),
    [
        (512, {}, 17),  # dp
        (512, {"tp": 8, "pp": 4}, 25),
        (512, {"tp": 8, "sp": 2, "cp": 2, "ep": 8}, 19),
        (4096, {"tp": 8, "pp": 8}, 33),
    ],
)
def test_a_rank_of_many_connects_over_gloo_to_a_few(
    joined: Joined, size: int, degrees: dict[str, int], most: int
) -> None:
    mesh = Mesh.of(size, **degrees)
    counts = []
    for rank in (0, size // 3, size - 1):
        joined.gloo.clear()
        transport = ProcessTransport(dist.HashStore(), rank, size, DEVICE, 60.0, watch_seconds=3600.0)
        with closing(World(rank, size, rank, DEVICE, "nccl", transport)) as world:
            axes_of(mesh, partial(world.communicator, mesh=mesh))
        counts.append(len(connected(joined)))
        assert counts[-1] <= sum(2 * math.ceil(math.log2(num_ranks)) for num_ranks, _ in joined.gloo)
    assert max(counts) == most


def test_an_axis_of_the_host_refuses_memory_of_a_device() -> None:
    nccl_backend = backend()
    nccl_backend.max_ctas = 0
    with pytest.raises(
        UsageError, match="all_reduce 'x' of device memory on axis 'dp', which was opened with max_ctas=0"
    ):
        Communicator(nccl_backend, Recorder()).all_reduce(meta(8, torch.float32), label="x")


def test_a_closed_communicator_does_not_use_torchs_default_group(calls: list[tuple[str, Any]]) -> None:
    nccl_backend = backend()
    comm = Communicator(nccl_backend, Recorder())
    nccl_backend.close()
    with pytest.raises(CommError, match=r"all_reduce 'x' on axis 'dp': the communicator is closed"):
        comm.all_reduce(meta(8, torch.float32), label="x")
    assert calls == []

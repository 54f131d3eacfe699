"""A hang is reported after one time-out, however many works are under way; a thread watches for failed ranks."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from shoal.comm import waiting
from shoal.comm.failure import FailureReports, FailureWatch, FirstError
from shoal.comm.protocol import Communicator, Work
from shoal.comm.threads import run_ranks
from shoal.comm.torch_dist import ProcessTransport
from shoal.comm.world import World, current_world
from shoal.errors import CommError, RankFailedError
from shoal.mesh import Mesh
from tests.helpers.comm_cases import current_dp

Gloo = Callable[..., list[Any]]
TIMEOUT_SECONDS = 1.0
NUM_WORKS = 12


def wait_for_all(works: list[Work]) -> tuple[float, list[str]]:
    """Wait for every work, as a recovery does. Returns: the seconds of it, and the codes of the errors."""
    codes = []
    began = time.monotonic()
    for work in works:
        try:
            work.wait()
        except CommError as error:
            codes.append(error.code)
    return time.monotonic() - began, codes


def start(world: World) -> list[Communicator]:
    """The communicators of two axes, once every rank has them."""
    comms = [world.communicator(axis, Mesh.of(world.size)) for axis in ("dp", "world")]
    for comm in comms:
        comm.barrier(label="start")
    return comms


def issue_some(world: World) -> list[Work]:
    """Works on two axes, which rank 1 does not join."""
    comms = start(world)
    return [comms[index % 2].all_gather(torch.ones(4 * world.size), label=f"{index}") for index in range(NUM_WORKS)]


def test_thread_ranks_wait_for_one_timeout_in_all() -> None:
    waited: list[tuple[float, list[str]]] = []
    may_end = threading.Event()

    def hang() -> None:
        world = current_world()
        if world.rank == 1:
            start(world)
            may_end.wait(30)
            return
        try:
            waited.append(wait_for_all(issue_some(world)))
        finally:
            may_end.set()

    run_ranks(2, hang, wait_timeout=TIMEOUT_SECONDS)
    seconds, codes = waited[0]
    assert TIMEOUT_SECONDS <= seconds < NUM_WORKS / 2 * TIMEOUT_SECONDS
    assert codes == ["comm-timeout"] * NUM_WORKS


def hang(rank: int, size: int, shared_memory: bool) -> list[Any]:
    store = PrefixStore(f"test/hang/{shared_memory}", dist.distributed_c10d._get_default_store())
    transport = ProcessTransport(store, rank, size, torch.device("cpu"), TIMEOUT_SECONDS, shared_memory=shared_memory)
    world = World(rank, size, rank, torch.device("cpu"), "gloo", transport)
    if rank == 1:
        start(world)
        result: list[Any] = []
    else:
        result = list(wait_for_all(issue_some(world)))
    store.set(f"done/{rank}", "1")
    store.wait(["done/0"])
    began = time.monotonic()
    world.close()
    return [*result, time.monotonic() - began]


@pytest.mark.parametrize("shared_memory", [True, False])
def test_processes_wait_for_one_timeout_in_all(gloo: Gloo, shared_memory: bool) -> None:
    seconds, codes, closing = gloo(2, hang, shared_memory)[0]
    assert 0.9 * TIMEOUT_SECONDS <= seconds < NUM_WORKS / 2 * TIMEOUT_SECONDS
    assert codes == ["comm-timeout"] * NUM_WORKS
    assert closing < 2.0


def kept_log() -> tuple[logging.Handler, list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shoal").addHandler(handler)
    return handler, lines


def wait_for_a_slow_rank(store: Any, comm: Communicator) -> list[str]:
    """Rank 1 comes late to a collective. Returns: what was logged here meanwhile."""
    handler, lines = kept_log()
    comm.barrier(label="start")
    if comm.rank == 1:
        store.wait(["logged"])
    work = comm.all_reduce(torch.ones(4), label="late")
    if comm.rank == 0:
        threading.Thread(target=lambda: (until(lambda: bool(lines)), store.set("logged", "1"))).start()
    assert torch.equal(work.wait(), torch.full((4,), 2.0))
    logging.getLogger("shoal").removeHandler(handler)
    return lines


def until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.01)


def wait_in_a_process(rank: int, size: int, shared_memory: bool) -> list[str]:
    waiting.SILENT_SECONDS = 0.3
    store = PrefixStore(f"test/slow/{shared_memory}", dist.distributed_c10d._get_default_store())
    transport = ProcessTransport(store, rank, size, torch.device("cpu"), 60.0, shared_memory=shared_memory)
    world = World(rank, size, rank, torch.device("cpu"), "gloo", transport)
    try:
        return wait_for_a_slow_rank(store, world.communicator("dp", Mesh.of(size)))
    finally:
        world.close()
        waiting.SILENT_SECONDS = 30.0


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_rank_that_waits_long_says_for_whom_and_in_which_call(gloo: Gloo, shared_memory: bool) -> None:
    first, second = gloo(2, wait_in_a_process, shared_memory)
    assert re.match(r"rank 0 on axis 'dp' has been waiting for \d s in all_reduce 'late' of 4 .*for rank 1", first[0])
    assert second == []


def test_a_rank_that_is_a_thread_says_for_whom_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "SILENT_SECONDS", 0.3)
    store = dist.HashStore()
    lines = run_ranks(2, lambda: wait_for_a_slow_rank(store, current_dp()))[0]
    assert "in all_reduce 'late' of 4 x float32 (call 1) for rank 1. Last issued on this axis: rank 0:" in lines[0]


def test_after_a_failed_rank_every_wait_raises_its_traceback_at_once() -> None:
    seen: list[tuple[float, list[str]]] = []

    def fail() -> None:
        if current_world().rank == 1:
            start(current_world())
            raise ZeroDivisionError("on purpose")
        seen.append(wait_for_all(issue_some(current_world())))
        raise RuntimeError("a consequence")

    with pytest.raises(ZeroDivisionError):
        run_ranks(2, fail)
    assert seen[0][1] == ["rank-failed"] * NUM_WORKS
    assert seen[0][0] < 20.0  # the timeout is 60


def test_a_rank_that_has_reported_its_own_failure_waits_for_nothing() -> None:
    def fail() -> str:
        comm = current_dp()
        if comm.rank == 0:
            work = comm.all_reduce(torch.ones(4), label="never joined")
            current_world().report_failure(MemoryError("here"))
            with pytest.raises(RankFailedError, match="MemoryError: here"):
                work.wait()
        return "done"

    with pytest.raises(MemoryError, match="here"):
        run_ranks(2, fail)


def test_the_first_error_is_stored_without_the_frames_that_it_was_raised_in() -> None:
    first_error = FirstError()
    first_error.check()
    try:
        raise RankFailedError(3, "why")
    except RankFailedError as error:
        first_error.keep(error)
    first_error.keep(CommError("a later one"))
    assert first_error.error is not None
    assert first_error.error.__traceback__ is None
    for _ in range(2):
        with pytest.raises(RankFailedError, match="rank 3 failed") as raised:
            first_error.check()
        assert raised.value.remote_traceback == "why"


class BlockingGroup:
    """A NCCL group whose kernels run until it is aborted."""

    def __init__(self) -> None:
        self.is_aborted = threading.Event()

    def abort(self) -> None:
        self.is_aborted.set()


def blocked(rank: int, size: int) -> list[Any]:
    """Rank 1 fails; rank 0 is blocked where only an aborted kernel lets it go on."""
    store = PrefixStore("test/watch", dist.distributed_c10d._get_default_store())
    transport = ProcessTransport(store, rank, size, torch.device("cpu"), 60.0, watch_seconds=0.1)
    world = World(rank, size, rank, torch.device("cpu"), "gloo", transport)
    comm = world.communicator("dp", Mesh.of(size))
    comm.barrier(label="start")
    result: list[Any] = []
    if rank == 1:
        transport._failures.report(1, "CUDA error: device-side assert")
        store.wait(["told"])
    else:
        group: Any = BlockingGroup()
        transport._nccl[((0, 1),)] = group
        began = time.monotonic()
        assert group.is_aborted.wait(30.0)
        try:
            comm.all_reduce(torch.empty(4), label="the next one").wait()
        except RankFailedError as error:
            result = [error.failed_rank, error.remote_traceback, time.monotonic() - began]
        transport._nccl.clear()
        store.set("told", "1")
    world.close()
    return result


def test_the_watch_ends_what_a_rank_is_blocked_in(gloo: Gloo) -> None:
    failed, text, seconds = gloo(2, blocked)[0]
    assert (failed, text) == (1, "CUDA error: device-side assert")
    assert seconds < 10.0


def test_the_watch_acts_once_and_ends_with_its_world() -> None:
    failures = FailureReports(dist.HashStore(), 0)
    found: list[RankFailedError] = []
    watch = FailureWatch(failures, found.append, 0.01)
    time.sleep(0.05)
    assert not found
    failures.report(2, "why")
    deadline = time.monotonic() + 5.0
    while not found and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [error.failed_rank for error in found] == [2]
    watch.stop()
    watch = FailureWatch(failures, found.append, 3600.0)
    watch.stop()
    assert len(found) == 1

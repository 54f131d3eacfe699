"""Collectives among threads, and what happens when a rank fails or hangs."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shoal.comm.memory_group import GroupCall, Mark
from shoal.comm.threads import ThreadGroup, ThreadWorld, run_ranks
from shoal.comm.world import current_world
from shoal.errors import CommError, RankFailedError, UsageError
from shoal.mesh import Mesh
from tests.helpers.comm_cases import check_all, check_any_order, check_two_axes, current_dp
from tests.helpers.fake_streams import FakeStreams


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_every_collective_is_bit_equal_to_the_plain_formula(size: int) -> None:
    run_ranks(size, lambda: check_all(current_dp()))


@pytest.mark.parametrize("size", [2, 4])
def test_works_may_be_waited_for_in_any_order(size: int) -> None:
    run_ranks(size, lambda: check_any_order(current_dp()))


@pytest.mark.parametrize("is_in_forward", [False, True])
def test_a_policy_of_recomputation_sees_no_step_of_a_collective_that_is_under_way(is_in_forward: bool) -> None:
    """A rank that waits for one collective takes the steps of the others that are ready, too."""

    def job() -> torch.Tensor:
        comm, works = current_dp(), []

        def begin() -> None:
            works.append(comm.all_reduce(torch.ones(10), label="under way"))

        def function(x: torch.Tensor) -> torch.Tensor:
            x = x.sin()
            comm.barrier(label="inside")
            return x.cos()

        def policy(*_args: object, **_kwargs: object) -> CheckpointPolicy:
            return CheckpointPolicy.PREFER_RECOMPUTE

        x = torch.linspace(0, 1, 5).requires_grad_()
        if is_in_forward:
            begin()
        contexts = partial(create_selective_checkpoint_contexts, policy)
        out = checkpoint(function, x, use_reentrant=False, context_fn=contexts)
        if not is_in_forward:
            begin()
        out.sum().backward()
        works[0].wait()
        assert x.grad is not None
        return x.grad

    x = torch.linspace(0, 1, 5).requires_grad_()
    (expected,) = torch.autograd.grad(x.sin().cos().sum(), x)
    assert all(torch.equal(found, expected) for found in run_ranks(2, job))


def test_two_axes_may_be_waited_for_in_opposite_orders() -> None:
    run_ranks(4, lambda: check_two_axes(current_world()))


def test_results_come_back_in_rank_order() -> None:
    assert run_ranks(3, lambda text: f"{text}{current_world().rank}", "rank ") == ["rank 0", "rank 1", "rank 2"]


def test_a_run_on_four_threads_takes_milliseconds() -> None:
    def step() -> None:
        for index in range(5):
            current_dp().all_reduce(torch.ones(64), label=f"{index}").wait()

    def timed() -> float:
        start = time.process_time()  # does not count what other processes do meanwhile
        run_ranks(4, step)
        return time.process_time() - start

    assert min(timed() for _ in range(5)) < 0.05


def test_the_first_exception_stops_all_ranks_and_is_raised_as_it_was() -> None:
    seen: list[RankFailedError] = []

    def fail() -> None:
        comm = current_dp()
        if comm.rank == 1:
            raise ZeroDivisionError("on purpose")
        try:
            comm.all_reduce(torch.ones(4), label="gradient").wait()
        except RankFailedError as error:
            seen.append(error)
            raise

    start = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        run_ranks(4, fail)
    assert time.monotonic() - start < 5
    assert [error.failed_rank for error in seen] == [1, 1, 1]
    assert all("ZeroDivisionError: on purpose" in error.remote_traceback for error in seen)


def test_a_failure_that_is_reported_stops_the_others_before_the_rank_itself_ends() -> None:
    others_have_stopped = threading.Event()

    def fail() -> None:
        if current_world().rank == 0:
            error = ValueError("reported")
            current_world().report_failure(error)
            assert others_have_stopped.wait(5)
            raise error
        with pytest.raises(RankFailedError, match="ValueError: reported"):
            current_dp().barrier(label="wait")
        others_have_stopped.set()

    with pytest.raises(ValueError, match="reported"):
        run_ranks(2, fail)


@pytest.mark.parametrize(
    ("odd", "named"),
    [
        (lambda comm, x: comm.all_reduce(x, label="other"), "all_reduce 'other' of 8 x float32"),
        (lambda comm, x: comm.all_reduce(x[:6], label="same"), "all_reduce 'same' of 6 x float32"),
        (lambda comm, x: comm.all_reduce(x.half(), label="same"), "all_reduce 'same' of 8 x float16"),
        (lambda comm, x: comm.all_gather(x, label="same"), "all_gather 'same' of 8 x float32"),
    ],
)
def test_ranks_that_issue_different_calls_get_both_names(odd: Callable[..., Any], named: str) -> None:
    def disagree() -> None:
        comm = current_dp()
        tensor = torch.ones(8)
        work = odd(comm, tensor) if comm.rank == 1 else comm.all_reduce(tensor, label="same")
        work.wait()

    with pytest.raises(CommError, match="disagree about call 0") as error:
        run_ranks(2, disagree)
    assert named in str(error.value)
    assert "all_reduce 'same' of 8 x float32" in str(error.value)


def test_a_rank_that_returns_early_is_named() -> None:
    def leave() -> None:
        comm = current_dp()
        comm.barrier(label="last one of rank 1")
        if comm.rank == 0:
            comm.barrier(label="one too many")

    with pytest.raises(CommError, match="rank 1 has returned") as error:
        run_ranks(2, leave)
    assert "'last one of rank 1'" in str(error.value)


def test_a_rank_that_hangs_fails_within_the_timeout_and_the_message_says_where_all_are() -> None:
    released = threading.Event()

    def hang() -> None:
        comm = current_dp()
        comm.barrier(label="start")
        if comm.rank == 2:
            released.wait(30)
            return
        comm.all_reduce(torch.ones(4), label="gradient").wait()

    start = time.monotonic()
    try:
        with pytest.raises(CommError, match=r"ranks \[0, 1, 2\] of 3 were not done after 0.5 s") as error:
            run_ranks(3, hang, timeout=0.5)
    finally:
        released.set()
    assert time.monotonic() - start < 5
    assert "rank 0: call 1 on 'dp', all_reduce 'gradient' of 4 x float32" in str(error.value)
    assert "rank 2: call 0 on 'dp', barrier 'start'" in str(error.value)


def test_sources_are_released_once_all_ranks_have_read_them() -> None:
    def gather() -> Any:
        comm = current_dp()
        shard = torch.ones(4)
        gone = weakref.ref(shard)
        comm.all_gather(torch.empty(8), shard, label="gather").drain()
        del shard
        comm.barrier(label="all are done")
        comm.drain()
        return gone

    assert [gone() for gone in run_ranks(2, gather)] == [None, None]


def test_one_communicator_serves_the_same_ranks() -> None:
    def same() -> bool:
        world = current_world()
        mesh = Mesh.of(world.size, dp_replicate=2)
        return world.communicator("dp_shard", mesh) is world.communicator("dp_shard", mesh)

    assert run_ranks(4, same) == [True] * 4


def test_bad_requests_say_what_to_do() -> None:
    with pytest.raises(UsageError, match="asked for 0 ranks"):
        run_ranks(0, print)
    with pytest.raises(UsageError, match="pad the full tensor"):
        run_ranks(2, lambda: current_dp().all_gather(torch.ones(3), label="odd").wait())
    with pytest.raises(UsageError, match="has 3 ranks and the world 2"):
        run_ranks(2, lambda: current_world().communicator("dp", Mesh.of(3)))
    with pytest.raises(UsageError, match="a set cannot be sent"):
        run_ranks(2, lambda: current_dp().gather_objects({1}, label="set"))


def test_ranks_on_one_accelerator_run_backward_themselves_and_read_a_source_after_its_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meta = torch.device("meta")  # no CPU: its streams are those of a GPU that is not there
    flags = run_ranks(2, lambda: (current_world().device, torch._C._is_multithreading_enabled()), device=meta)
    assert flags == [(meta, False), (meta, False)]
    streams = FakeStreams(monkeypatch)
    shared = ThreadWorld(2, timeout=1.0)
    sender, reader = (ThreadGroup(shared, "dp", (0, 1), "0", rank) for rank in (0, 1))
    copies = torch.Stream(meta)
    call = GroupCall("all_gather", "x", 4, torch.float32)
    with copies:
        sender.post(0, call, torch.empty(2, device=meta))
    reader.source(0, 0, torch.float32)
    assert streams.log == [f"event 1 on {copies.name}", f"compute waits for {copies.name} at 1"]
    sender.mark(0, Mark.REDUCED)
    reader.source(0, 0, torch.float32)
    assert streams.log[2:] == ["event 2 on compute", "compute waits for compute at 2"]

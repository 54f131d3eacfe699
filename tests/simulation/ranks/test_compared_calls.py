"""``debug.collective_check`` over NCCL's code: of ranks that issue different calls all stop, with every rank's call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import shoal
from shoal.comm.nccl import ComparedCommunicator
from shoal.comm.protocol import Call, Communicator, Message, Work
from shoal.comm.threads import run_ranks
from shoal.comm.world import current_world
from shoal.errors import CommError
from shoal.mesh import Mesh
from tests.helpers.composition import settings_of
from tests.helpers.models import Plain
from tests.helpers.stream_matrix import STREAM_AXES, checks_of_run, reports
from tests.helpers.training import config, run_steps, start

Issue = Callable[[Communicator, torch.Tensor], Any]


def said_by(run: Callable[[Communicator], object], size: int = 3) -> list[str]:
    """The error of each rank."""

    def rank() -> str:
        world = current_world()
        world.compares_calls = True
        with shoal.check_streams(raises=False):
            comm = world.communicator("dp", Mesh.of(world.size))
            assert isinstance(comm, ComparedCommunicator)
            try:
                run(comm)
            except CommError as error:
                return str(error)
        return "no error"

    return run_ranks(size, rank, timeout=20)


def all_reduce(comm: Communicator, x: torch.Tensor) -> Work:
    return comm.all_reduce(x, label="same")


@pytest.mark.parametrize(
    ("usual", "odd", "named"),
    [
        (all_reduce, lambda comm, x: comm.reduce_scatter(x, x[:4], label="same"), "reduce_scatter 'same' of 12"),
        (all_reduce, lambda comm, x: comm.all_reduce(x, label="other"), "all_reduce 'other' of 12 x float32"),
        (all_reduce, lambda comm, x: comm.all_reduce(x[:6], label="same"), "all_reduce 'same' of 6 x float32"),
        (all_reduce, lambda comm, x: comm.all_reduce(x.half(), label="same"), "all_reduce 'same' of 12 x float16"),
        (all_reduce, lambda comm, x: comm.exchange(x, label="same"), "exchange 'same' of 12 x float32"),
        (
            lambda comm, x: comm.broadcast(x, 0, label="same"),
            lambda comm, x: comm.broadcast(x, 2, label="same"),
            "broadcast 'same' from 2 of 12 x float32",
        ),
        (
            lambda comm, x: comm.all_reduce(x, label="long " * 40 + "a"),
            lambda comm, x: comm.all_reduce(x, label="long " * 40 + "b"),
            "all_reduce 'long long ",
        ),
    ],
)
def test_a_rank_that_issues_another_call_stops_all_before_it_begins(usual: Issue, odd: Issue, named: str) -> None:
    def run(comm: Communicator) -> None:
        x = torch.ones(12)
        all_reduce(comm, x).wait()
        try:
            (odd if comm.rank == 1 else usual)(comm, x)
        finally:
            assert x.tolist() == [3.0] * 12

    for text in said_by(run):
        assert "the ranks of axis 'dp' disagree about call 1: ranks 0 and 2 on the axis issued " in text
        assert f", rank 1 issued {named}" in text


def test_calls_in_another_order_and_one_call_fewer_are_named() -> None:
    def other_order(comm: Communicator) -> None:
        for label in "ba" if comm.rank == 2 else "ab":
            comm.all_reduce(torch.ones(2), label=label)

    def one_fewer(comm: Communicator) -> None:
        for label in "ac" if comm.rank == 2 else "abc":
            comm.all_reduce(torch.ones(2), label=label)

    for run, number, theirs, odd in ((other_order, 0, "a", "b"), (one_fewer, 1, "b", "c")):
        for text in said_by(run):
            assert f"disagree about call {number}: ranks 0 and 1 on the axis issued all_reduce '{theirs}'" in text
            assert f", rank 2 issued all_reduce '{odd}' of 2 x float32" in text


def test_a_call_fewer_at_the_end_is_a_wait_of_the_others_in_that_call() -> None:
    def run(comm: Communicator) -> None:
        all_reduce(comm, torch.ones(2))
        if comm.rank:
            assert comm.recorder.last[-1].op == "all_reduce"
            comm.all_gather(torch.ones(3), label="one more")

    first, *others = said_by(run)
    assert first == "no error" and all("rank 0 has returned" in text for text in others)


def test_splits_that_do_not_fit_stop_all_ranks() -> None:
    def run(comm: Communicator) -> None:
        sizes = [1, 2, 3]
        parts = torch.ones(6)
        outs = [1, 1, 1] if comm.rank == 0 else [2] * 3 if comm.rank == 1 else [3, 2, 3]
        comm.all_to_all(torch.ones(sum(outs)), parts, out_splits=outs, source_splits=sizes, label="tokens")

    for text in said_by(run):
        assert "all_to_all 'tokens' on axis 'dp': rank 1 sends 3 elements to rank 2, which expects 2" in text


def test_messages_are_compared_by_pair() -> None:
    def run(comm: Communicator) -> None:
        x, received = torch.ones(4), torch.zeros(4)
        ahead, behind = (comm.rank + 1) % 3, (comm.rank - 1) % 3
        for label in ("first", "second"):
            sent = x.half() if (comm.rank, label) == (1, "second") else x
            messages = [Message("send", sent, ahead, label), Message("recv", received, behind, label)]
            work = comm.batch(messages)
            if (comm.rank, label) != (2, "second"):
                work.wait()
                assert received.tolist() == [1.0] * 4
        work.wait()

    texts = said_by(run)
    assert texts[:2] == ["no error"] * 2
    assert (
        "disagree about a message: rank 2 on the axis issued send 'second' of 4 x float32, rank 1 issued send 'second'"
        " of 4 x float16" in texts[2]
    )


@pytest.mark.parametrize(
    "axes",
    [
        {"stage": "3", "experts": "ep 2", "ranks": "2", "hybrid": "mics", "units": "blocks"},
        {"stage": "1", "pp": "2", "schedule": "zb_h1", "sp": "2", "ranks": "1", "wire": "yes", "accumulation": "2"},
        {"stage": "3", "ranks": "2", "cp": "2", "between": "exception", "recompute": "offload"},
    ],
    ids=str,
)
def test_runs_of_all_kinds_pass_it(axes: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0
    begin = ComparedCommunicator.begin

    def count(comm: ComparedCommunicator, call: Call) -> Work:
        nonlocal compared
        compared += 1
        return begin(comm, call)

    monkeypatch.setattr(ComparedCommunicator, "begin", count)
    settings, run = settings_of({axis: axes.get(axis, next(iter(of))) for axis, of in STREAM_AXES.items()}, STREAM_AXES)
    settings["debug"] = {"collective_check": True}
    assert reports(checks_of_run(settings, replace(run, steps=2))) == ""
    assert compared > 50


def test_where_the_transport_compares_nothing_is_added() -> None:
    def rank() -> list[str]:
        engine = start(Plain, config(3, debug={"collective_check": True}))
        with engine.world.recorder.recording() as entries:
            run_steps(engine, 1)
        assert engine.world.compares_calls and type(engine.axes.world) is Communicator
        engine.destroy()
        return [entry.op for entry in entries]

    assert all(run_ranks(2, rank))

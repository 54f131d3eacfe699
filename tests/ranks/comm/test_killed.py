"""A killed process is noticed by the failure watch alone: no rank waits in a collective that would show it."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from shoal.comm.failure import NextRank
from shoal.comm.torch_dist import ProcessTransport
from tests.helpers.dying import Nursery
from tests.ranks.comm.test_failures import free_port

SIZE = 4
LIMIT_SECONDS = 10.0


@pytest.fixture(scope="module")
def nursery() -> Nursery:
    return Nursery()


def meet(folder: Path, name: str, rank: int, others: set[int]) -> None:
    (folder / f"{name}-{rank}").touch()
    while not all((folder / f"{name}-{other}").exists() for other in others):
        time.sleep(0.01)


def run_rank(rank: int, folder: str, port: int, doomed: int, how: str) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=30)
    tcp = dist.TCPStore("127.0.0.1", port, SIZE, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
    store = PrefixStore("killed", tcp)
    transport = ProcessTransport(store, rank, SIZE, torch.device("cpu"), 60.0, shared_memory=False, watch_seconds=0.2)
    assert transport._watch is not None
    while transport._watch._next_rank._next is None:  # type: ignore[union-attr]
        time.sleep(0.01)
    out = Path(folder)
    meet(out, "connected", rank, set(range(SIZE)))  # by files, since the store may end with its process
    if rank == doomed:
        if how == "killed, with a worker" and os.fork() == 0:
            time.sleep(4.0)
            os._exit(0)
        (out / f"rank-{rank}").write_text(f"{os.getpid()} {time.time()}")
        if how == "closed":
            transport.close()
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
    deadline = time.monotonic() + (1.5 if how in ("closed", "stopped") else LIMIT_SECONDS)
    while transport._first_error.error is None and time.monotonic() < deadline:
        time.sleep(0.02)
    (out / f"rank-{rank}").write_text(f"{time.time()} {transport._first_error.error}")
    if how == "stopped" and rank == 0:
        os.kill(int((out / f"rank-{doomed}").read_text().split()[0]), signal.SIGKILL)
    meet(out, "done", rank, set(range(SIZE)) - {doomed})  # rank 0's process has the store
    os._exit(0)


def run(nursery: Nursery, folder: Path, doomed: int, how: str) -> dict[int, tuple[float, str]]:
    """Of each other rank: seconds until it knew, and the error."""
    port = free_port()
    nursery._run_all(run_rank, [(rank, str(folder), port, doomed, how) for rank in range(SIZE)], 40.0)
    ended = float((folder / f"rank-{doomed}").read_text().split()[1])
    found = {}
    for rank in set(range(SIZE)) - {doomed}:
        at, error = (folder / f"rank-{rank}").read_text().split(" ", 1)
        found[rank] = (float(at) - ended, error)
    return found


@pytest.mark.parametrize(("doomed", "how"), [(2, "killed"), (2, "killed, with a worker"), (0, "killed")])
def test_every_rank_knows_of_a_killed_process_within_seconds(
    nursery: Nursery, tmp_path: Path, doomed: int, how: str
) -> None:
    for seconds, error in run(nursery, tmp_path, doomed, how).values():
        assert error.startswith(f"[rank-failed] rank {doomed} failed")
        assert "has ended" in error
        assert seconds < LIMIT_SECONDS


@pytest.mark.parametrize("how", ["closed", "stopped"])
def test_an_orderly_end_and_a_process_that_stands_still_are_no_failures(
    nursery: Nursery, tmp_path: Path, how: str
) -> None:
    assert {error for _, error in run(nursery, tmp_path, 2, how).values()} == {"None"}


def test_the_next_rank_says_goodbye_once_and_a_lost_connection_is_an_end() -> None:
    store = dist.HashStore()
    for is_orderly in (True, False):
        one, other = (NextRank(store, rank, 2) for rank in range(2))
        assert not one.has_ended()
        assert not other.has_ended()
        other.close() if is_orderly else other._forget()
        other.close()
        time.sleep(0.05)
        assert one.has_ended() is not is_orderly
        assert not one.has_ended()  # said once
        one.close()


def test_a_next_rank_that_cannot_be_reached_is_not_watched() -> None:
    store = dist.HashStore()
    one = NextRank(store, 0, 2)
    assert not one.has_ended()  # the next has not said where it is
    store.set("next/1", f"127.0.0.1 {free_port()}")
    assert not one.has_ended()
    assert one._is_over
    one.close()

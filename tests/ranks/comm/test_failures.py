"""A process that raises, or is killed, stops its peers within seconds, and they say why."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from shoal.comm.torch_dist import ProcessTransport
from shoal.comm.world import World
from shoal.errors import RankFailedError
from shoal.mesh import Mesh
from tests.helpers.forking import forking

SIZE = 3
DOOMED = 1
LIMIT_SECONDS = 10.0


def run_rank(rank: int, folder: str, port: int, shared_memory: bool, how: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=SIZE)
    store = PrefixStore("failures", dist.distributed_c10d._get_default_store())
    transport = ProcessTransport(store, rank, SIZE, torch.device("cpu"), 60.0, shared_memory=shared_memory)
    world = World(rank, SIZE, rank, torch.device("cpu"), "gloo", transport)
    comm = world.communicator("dp", Mesh.of(SIZE))
    full = comm.empty(3000, torch.float32, torch.device("cpu")).fill_(1.0)
    comm.all_reduce(full, label="good").drain()
    out = Path(folder)
    if rank == DOOMED:
        (out / f"rank-{rank}").write_text(str(time.time()))
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how.startswith("left"):
            world.close()
            return
        try:
            raise ArithmeticError("on purpose")
        except ArithmeticError as error:
            world.report_failure(error)
        time.sleep(LIMIT_SECONDS)  # the process itself lives on
        os._exit(1)
    if how == "left before":
        time.sleep(1.5)  # the connection is closed before this rank issues the call
    try:
        comm.all_reduce(full, label="never done").wait()
        answer = "no error"
    except RankFailedError as error:
        world.report_failure(error)
        answer = f"{time.time()} {error.failed_rank} {error}"
    except Exception as error:
        answer = f"{time.time()} {type(error).__name__} {error}"
    (out / f"rank-{rank}").write_text(answer)
    sys.stdout.flush()
    os._exit(0)  # the store's host may be gone: nothing orderly is left to do


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raised", "ArithmeticError: on purpose"),
        ("killed", "ended without a report"),
        ("left", "left the world"),
        ("left before", "left the world"),
    ],
)
def test_a_rank_that_fails_stops_the_others(tmp_path: Path, shared_memory: bool, how: str, said: str) -> None:
    if not shared_memory and how != "raised":
        said = "never done"  # a closed connection shows that a rank is gone, not why; the call is named
    context = forking()
    port = free_port()
    processes: list[Any] = [
        context.Process(target=run_rank, args=(rank, str(tmp_path), port, shared_memory, how)) for rank in range(SIZE)
    ]
    for process in processes:
        process.start()
    try:
        for rank, process in enumerate(processes):
            if rank != DOOMED:
                process.join(40)
                assert not process.is_alive(), f"rank {rank} still waits"
        failed_at = float((tmp_path / f"rank-{DOOMED}").read_text())
        for rank in set(range(SIZE)) - {DOOMED}:
            seen_at, kind, text = (tmp_path / f"rank-{rank}").read_text().split(" ", 2)
            assert said in text
            assert float(seen_at) - failed_at < LIMIT_SECONDS
            if shared_memory or how == "raised":
                assert kind == str(DOOMED)
    finally:
        for process in processes:
            process.kill()
            process.join(10)

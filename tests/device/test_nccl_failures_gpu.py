"""On two or more GPUs: a rank that fails ends what is under way over NCCL, on itself and on the others, in seconds."""

from __future__ import annotations

import os
import socket
import time

import pytest
import torch
from torch import multiprocessing

from shoal.comm.world import current_world
from shoal.errors import RankFailedError
from shoal.mesh import Mesh

pytestmark = pytest.mark.device

SECONDS = 20.0


def fail_while_others_wait(rank: int, size: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.cuda.set_device(rank)
    world = current_world()
    comms = [world.communicator("dp", Mesh.of(size), max_ctas) for max_ctas in (1, 2, None)]  # a group of NCCL each
    values = [torch.ones(1 << 20, device=f"cuda:{rank}") for _ in comms]
    for comm, value in zip(comms, values, strict=True):
        comm.all_reduce(value, label="warm-up").wait()
    torch.cuda.synchronize()
    began = time.monotonic()
    if rank == size - 1:
        comms[0].all_reduce(values[0], label="that no other rank joins")
        world.report_failure(ValueError("it fails"))
    else:
        sums = [comm.all_reduce(value, label="sum").wait() for comm, value in zip(comms[1:], values[1:], strict=True)]
        assert [float(each[0]) for each in sums]  # the host waits for both, until the groups are aborted
        with pytest.raises(RankFailedError, match="it fails"):
            comms[1].check()
    world.close()
    assert time.monotonic() - began < SECONDS


def test_a_rank_that_fails_ends_the_kernels_of_all_groups_on_all_ranks() -> None:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"needs two GPUs; there is {count}")
    size = min(count, 8)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.spawn(fail_while_others_wait, (size, port), nprocs=size)  # type: ignore[no-untyped-call]

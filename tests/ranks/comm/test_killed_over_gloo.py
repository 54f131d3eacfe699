"""A killed process is named by every other one over Gloo, also by those that share no axis with it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shoal.comm.torch_dist
import shoal.hang
from shoal.comm.world import current_world
from shoal.errors import CommError
from shoal.mesh import Mesh
from tests.helpers.forking import forking
from tests.ranks.comm.test_failures import free_port

SIZE = 4
LIMIT_SECONDS = 5.0


def run_rank(rank: int, size: int, folder: str, port: int, killed: int, has_own_machine: bool) -> None:
    torch.set_num_threads(1)
    shoal.comm.torch_dist.is_supported = lambda: False  # shared memory
    if has_own_machine:
        shoal.hang.boot = lambda: f"machine {rank}"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    world = current_world()
    mesh = Mesh.of(size, tp=2)
    comms = [world.communicator(axis, mesh) for axis in ("tp", "dp")]
    if size > SIZE:  # ranks that pass rows on, and of which two are not connected to the one that is killed
        comms = [world.communicator("world", mesh, max_ctas=1)]
    for comm in comms:
        comm.barrier(label="start")
    if rank == killed:
        Path(folder, "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    # Where rank 3 is killed, rank 2 waits for it on tp and rank 1 on dp. Rank 0 waits on dp for rank 2, which closes
    # its connections because of the failure.
    try:
        if size > SIZE:
            comms[0].exchange(torch.ones(8), label="never done").wait()
        else:
            comms[rank // 2 != killed // 2].all_reduce(torch.ones(8), label="never done").wait()
        answer = "no error"
    except CommError as error:
        answer = f"{error.code} {getattr(error, 'failed_rank', None)} {error}"
        Path(folder, f"{rank}.new").write_text(answer)
        Path(folder, f"{rank}.new").rename(Path(folder, str(rank)))
        world.report_failure(error)
    os._exit(0)  # the store's host may be gone: nothing orderly is left to do


@pytest.mark.parametrize(
    ("killed", "has_own_machine", "size"),
    [(3, False, SIZE), (3, True, SIZE), (0, False, SIZE), (3, True, 8)],
    ids=["neighbour", "machine", "store", "few connections"],
)
def test_a_killed_rank_is_named_by_all_others_within_seconds(
    killed: int, has_own_machine: bool, size: int, tmp_path: Path
) -> None:
    context = forking()
    port = free_port()
    processes: list[Any] = [
        context.Process(target=run_rank, args=(rank, size, str(tmp_path), port, killed, has_own_machine))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(40)
            assert not process.is_alive()
        began = (tmp_path / "killed").stat().st_mtime
        for rank in set(range(size)) - {killed}:
            answer = (tmp_path / str(rank)).read_text()
            assert answer.startswith(f"rank-failed {killed} "), (rank, answer)
            assert "has ended without a report: killed, or out of memory" in answer
            seconds = (tmp_path / str(rank)).stat().st_mtime - began
            print(f"rank {rank}: {seconds:.1f} s")
            assert seconds < LIMIT_SECONDS
    finally:
        for process in processes:
            process.kill()
            process.join(10)

"""The time of a collective on one host: shared memory, Gloo by direct exchange, Gloo's own algorithms.

    python -m benchmarks.comm --ranks 2 --mib 64 --precision fp32

Every rank has one thread. A round is one call of each kind in turn, so that a noisy machine disturbs all alike; the
table gives the least and the median time of rank 0, from issue until its result is there and its source free again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from shoal.comm.protocol import Communicator
from shoal.comm.torch_dist import ProcessTransport
from shoal.comm.world import World
from shoal.mesh import Mesh

CPU = torch.device("cpu")
OPERATIONS = ("reduce_scatter", "all_gather", "all_reduce", "exchange")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=64, help="size of the full tensor in fp32; half of it in bf16")
    parser.add_argument("--precision", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    results: Any = context.SimpleQueue()
    processes = [
        context.Process(target=run_rank, args=(rank, port, results, arguments), daemon=True)
        for rank in range(arguments.ranks)
    ]
    for process in processes:
        process.start()
    rows = results.get()
    for process in processes:
        process.join()
    print(f"{arguments.ranks} ranks, one thread each, {arguments.rounds} rounds; milliseconds, least | median")
    for row in rows:
        print("  ".join(f"{cell:<26}" for cell in row).rstrip())


def run_rank(rank: int, port: int, results: Any, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    size = arguments.ranks
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    worlds = [make_world(rank, size, shared_memory) for shared_memory in (True, False)]
    comms = [world.communicator("dp", Mesh.of(size)) for world in worlds]
    rows = [["", "shared memory", "gloo, direct exchange", "gloo's own"]]
    for precision in arguments.precision:
        numel = arguments.mib * 2**20 // 4 // size * size
        for operation in OPERATIONS:
            numel_here = numel if operation != "exchange" else 4
            calls = [call_of(comm, operation, numel_here, DTYPES[precision]) for comm in comms]
            calls.append(native_call(operation, numel_here, DTYPES[precision], rank, size))
            times: list[list[float]] = [[] for _ in calls]
            for round_ in range(arguments.rounds + 2):
                for call, kept in zip(calls, times, strict=True):
                    dist.barrier()
                    start = time.perf_counter()
                    call()
                    if round_ >= 2:
                        kept.append(1000 * (time.perf_counter() - start))
            mib = numel_here * DTYPES[precision].itemsize / 2**20
            name = f"{operation} {precision} {mib:.0f} MiB" if operation != "exchange" else f"exchange {precision} x 4"
            rows.append([name, *(f"{min(kept):.2f} | {median(kept):.2f}" for kept in times)])
    if rank == 0:
        results.put(rows)
    for world in worlds:
        world.close()
    dist.barrier()
    dist.destroy_process_group()


def make_world(rank: int, size: int, shared_memory: bool) -> World:
    store = PrefixStore(f"bench/{shared_memory}", dist.distributed_c10d._get_default_store())
    transport = ProcessTransport(store, rank, size, CPU, 300.0, shared_memory=shared_memory)
    return World(rank, size, rank, CPU, "gloo", transport)


def call_of(comm: Communicator, operation: str, numel: int, dtype: torch.dtype) -> Callable[[], None]:
    full = comm.empty(numel, dtype, CPU).fill_(1.0)
    shard = comm.empty(max(1, numel // comm.size), dtype, CPU).fill_(1.0)
    scale = 1.0 / comm.size

    def call() -> None:
        if operation == "reduce_scatter":
            work = comm.reduce_scatter(full, shard, scale=scale, label="bench")
        elif operation == "all_gather":
            work = comm.all_gather(full, shard, label="bench")
        elif operation == "all_reduce":
            work = comm.all_reduce(full, scale=scale, label="bench")
        else:
            work = comm.exchange(full, label="bench")
        work.wait()
        work.drain()

    return call


def native_call(operation: str, numel: int, dtype: torch.dtype, rank: int, size: int) -> Callable[[], None]:
    full = torch.ones(numel, dtype=dtype)
    shard = torch.ones(max(1, numel // size), dtype=dtype)
    row = torch.ones(numel * size, dtype=dtype)
    scale = 1.0 / size
    # Newer versions of torch have new names for both.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def call() -> None:
        if operation == "reduce_scatter":
            reduce_scatter(shard, full)
            shard.mul_(scale)
        elif operation == "all_gather":
            all_gather(full, shard)
        elif operation == "all_reduce":
            dist.all_reduce(full)
            full.mul_(scale)
        else:
            all_gather(row, full)

    return call


if __name__ == "__main__":
    main()

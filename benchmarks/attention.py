"""The time of attention, forward and backward, over ranks that hold parts of a sequence.

    python -m benchmarks.attention --ranks 2 --positions 4096 --out runs/attention.json

Contenders: Shoal's ring, its all-gather of keys and values, and Ulysses; and torch's context parallelism (the ring of
torch.distributed.tensor.experimental.context_parallel), whose keys and values move by all-gather, its default, or by
all-to-all; and DeepSpeed's Ulysses (DistributedAttention), whose tensors are [rows, positions, heads, size] as it wants
them. torch registers its ring for CUDA's kernels only: here its functions are called with torch's CPU kernel, as torch
calls them with CUDA's. All compute with the same kernel, causal; rings in balanced chunks.

Every rank has one thread. A round is one call of each in turn, so that a noisy machine disturbs all alike. A call's
time is that of the slowest rank. Ratios are the medians over rounds of the ratio to torch's default; where DeepSpeed is
among the contenders, the last line is that of DeepSpeed's Ulysses to Shoal's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.arena import machine, table
from shoal.comm.world import current_world
from shoal.mesh import Mesh
from shoal.parallel.sequence.attention import attention
from shoal.parallel.sequence.context import SequenceContext

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TORCHS = {"torch-all-gather": "allgather", "torch-all-to-all": "alltoall"}
DEEPSPEED = "deepspeed-ulysses"
CONTENDERS = ["shoal-ring", "shoal-all-gather", "shoal-ulysses", *TORCHS, DEEPSPEED]
BASE = "torch-all-gather"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--positions", type=int, default=4096, help="of the whole sequence")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--precision", choices=list(DTYPES), default="fp32")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    times, processor = measure(given)
    base = times.get(BASE, times[given.contenders[0]])
    rows = [
        {
            "contender": name,
            "least_seconds": min(seconds),
            "median_seconds": median(seconds),
            "ratio": median(mine / theirs for mine, theirs in zip(seconds, base, strict=True)),
            "least_processor_seconds": min(processor[name]),
            "seconds": seconds,
            "processor_seconds": processor[name],
        }
        for name, seconds in times.items()
    ]
    print(
        f"{given.ranks} ranks, one thread each, {given.precision}, {given.rows} x {given.positions} positions, "
        f"{given.heads} heads of {given.head_size}, {given.rounds} rounds; milliseconds, forward and backward"
    )
    cells = []
    for row in rows:
        least, middle, busy = (
            f"{1000 * row[key]:.1f}" for key in ("least_seconds", "median_seconds", "least_processor_seconds")
        )
        cells.append([row["contender"], least, middle, f"{row['ratio']:.2f}", busy])
    print(table([["", "least", "median", "ratio", "processor"], *cells]))
    if {DEEPSPEED, "shoal-ulysses"} <= times.keys():
        pairs = zip(times[DEEPSPEED], times["shoal-ulysses"], strict=True)
        first, middle, third = quantiles((theirs / ours for theirs, ours in pairs), n=4)
        print(f"DeepSpeed's Ulysses over Shoal's: {middle:.2f} ({first:.2f} to {third:.2f})")
    if given.out:
        options = {key: value for key, value in vars(given).items() if key != "out"}
        given.out.write_text(json.dumps({"machine": machine(), "options": options, "rows": rows}, indent=1) + "\n")


def measure(given: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """The seconds of each contender's rounds, of the slowest rank; and the processor seconds."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    results: Any = context.SimpleQueue()
    processes = [
        context.Process(target=run_rank, args=(rank, port, results, given), daemon=True) for rank in range(given.ranks)
    ]
    for process in processes:
        process.start()
    every = [results.get() for _ in processes]
    for process in processes:
        process.join()
    failed = [text for text in every if isinstance(text, str)]
    if failed:
        raise RuntimeError(failed[0])
    elapsed, processor = (
        {name: _slowest([of[kind][name] for of in every]) for name in given.contenders} for kind in (0, 1)
    )
    return elapsed, processor


def _slowest(of_ranks: list[list[float]]) -> list[float]:
    return [max(times) for times in zip(*of_ranks, strict=True)]


def run_rank(rank: int, port: int, results: Any, given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=given.ranks)
    try:
        results.put(times_of_rank(given))
    except Exception as error:
        results.put(f"rank {rank}: {error!r}")
        raise
    current_world().close()
    dist.destroy_process_group()


def times_of_rank(given: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    comm = current_world().communicator("dp", Mesh.of(given.ranks))
    ring, ulysses = SequenceContext(cp=comm), SequenceContext(sp=comm)
    contexts = {
        "shoal-all-gather": SequenceContext(cp=comm, exchange="all_gather"),
        "shoal-ulysses": ulysses,
        DEEPSPEED: ulysses,
    }
    deepspeeds = _deepspeeds() if DEEPSPEED in given.contenders else None
    generator = torch.Generator().manual_seed(0)
    shape = given.rows, given.heads, given.positions, given.head_size
    whole = [torch.randn(shape, generator=generator).to(DTYPES[given.precision]) for _ in range(4)]
    gradients: dict[bool, dict[str, tuple[torch.Tensor, ...]]] = {False: {}, True: {}}
    kept: dict[str, list[float]] = {name: [] for name in given.contenders}
    processor: dict[str, list[float]] = {name: [] for name in given.contenders}
    for round_ in range(given.rounds + 2):
        for name in given.contenders:
            context = contexts.get(name, ring)
            *leaves, gradient = (context.shard(tensor, 2) for tensor in whole)
            call = _torchs(TORCHS[name]) if name in TORCHS else _shoals(context)
            if name == DEEPSPEED and deepspeeds is not None:
                call = deepspeeds
                *leaves, gradient = (tensor.transpose(1, 2).contiguous() for tensor in (*leaves, gradient))
            for leaf in leaves:
                leaf.requires_grad_()
            dist.barrier()
            start, busy = time.perf_counter(), time.process_time()
            found = torch.autograd.grad(call(*leaves), leaves, gradient)
            seconds, busy = time.perf_counter() - start, time.process_time() - busy
            if round_ >= 2:
                kept[name].append(seconds)
                processor[name].append(busy)
            else:
                gradients[context.cp is None][name] = (
                    tuple(each.transpose(1, 2) for each in found) if name == DEEPSPEED else found
                )
    for of_kind in gradients.values():
        reference = next(iter(of_kind.values()), ())
        for name, found in of_kind.items():
            for one, other in zip(found, reference, strict=True):
                difference = (one - other).float().norm() / other.float().norm()
                assert difference < (1e-5 if given.precision == "fp32" else 3e-2), f"{name}: {difference}"
    return kept, processor


def _shoals(context: SequenceContext) -> Callable[..., torch.Tensor]:
    def call(*tensors: torch.Tensor) -> torch.Tensor:
        return attention(*tensors, is_causal=True, context=context)

    return call


def _deepspeeds() -> Callable[..., torch.Tensor]:
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention

    deepspeed.init_distributed("gloo")

    def local(*tensors: torch.Tensor) -> torch.Tensor:
        heads_first = (tensor.transpose(1, 2) for tensor in tensors)
        return torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)

    layer = DistributedAttention(local, dist.group.WORLD, scatter_idx=2, gather_idx=1)

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = layer(*tensors, batch_dim_idx=0)
        return out

    return call


def _torchs(method: str) -> Callable[..., torch.Tensor]:
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(method)
    return _TorchRing.apply


class _TorchRing(torch.autograd.Function):
    """torch's ring with torch's CPU kernel."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = _attention._templated_ring_attention(
            dist.group.WORLD, 2, kernel, query, key, value, is_causal=True, dropout_p=0.0
        )
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        query, key, value, out, lse = ctx.saved_tensors
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return _attention._templated_ring_attention_backward(
            dist.group.WORLD, 2, kernel, gradient, "grad_out", query, key, value, out, lse, True, dropout_p=0.0
        )


if __name__ == "__main__":
    main()

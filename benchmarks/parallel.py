"""Model parallelism beside its peers on CPU ranks: one step of the same model, both in every process, in turn.

    python -m benchmarks.parallel --ranks 2                       # all cases
    python -m benchmarks.parallel --cases tensor --rounds 30 --out runs/parallel.json

A case builds Shoal's step and the peer's from the same weights; a step is forward and backward. Every rank has one
thread. A round is one step of each, so that a noisy machine disturbs both alike; the ratio is the median of the rounds'
ratios (the peer's time over Shoal's), with their quartiles; beside it the ratio of the least times, and the processor
time of rank 0, which other processes disturb less. Losses must agree. A new case is a function in CASES.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.arena import machine, table
from benchmarks.comm import make_world
from benchmarks.parallel_peers import Step, autotp, dtensor, step_of
from shoal.comm.protocol import Communicator
from shoal.mesh import Mesh

DTENSOR, AUTOTP = "DTensor parallelize_module", "DeepSpeed AutoTP"


@dataclass(frozen=True)
class Shape:
    """The sizes of the model and of a batch."""

    layers: int = 4
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 4
    vocab: int = 8192
    batch: int = 2
    length: int = 128


@dataclass(frozen=True)
class Pair:
    """The two steps of a case, and the names of both sides."""

    shoal: Step
    peer: Step
    peer_name: str
    rtol: float = 1e-4


class Norm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.hidden // shape.heads
        self.q_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, 3 * shape.hidden, bias=False)
        self.up_proj = nn.Linear(shape.hidden, 3 * shape.hidden, bias=False)
        self.down_proj = nn.Linear(3 * shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = Norm(shape.hidden), Norm(shape.hidden)
        self.attention, self.feed_forward = Attention(shape), FeedForward(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class Decoder(nn.Module):
    """Llama's shape, without positions: every layer is a module that each peer's plan can name."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden)
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        self.loss_function = mean_loss  # parallelize() replaces it where the loss is computed from split logits

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits if targets is None else self.loss_function(logits, targets)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


PLAN = {
    "embedding": "vocab", "lm_head": "vocab_head",
    "layers.*.attention": "prepare_input", "layers.*.feed_forward": "prepare_input",
    **{f"layers.*.attention.{name}": "column" for name in ("q_proj", "k_proj", "v_proj")},
    **{f"layers.*.feed_forward.{name}": "column" for name in ("gate_proj", "up_proj")},
    "layers.*.attention.o_proj": "row", "layers.*.feed_forward.down_proj": "row",
}  # fmt: skip


def tensor(
    comm: Communicator, shape: Shape, *, peer: str, sequence_parallel: bool = False, loss_parallel: bool = False
) -> Pair:
    """Tensor parallelism beside a peer's."""
    from shoal.parallel.tensor import parallelize

    torch.manual_seed(0)
    ours = Decoder(shape)
    theirs = copy.deepcopy(ours)
    tokens = torch.randint(0, shape.vocab, (shape.batch, shape.length))
    targets = tokens.roll(-1, 1)
    parallelize(ours, comm, PLAN, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)

    def forward() -> Tensor:
        return ours(tokens, targets)

    if peer == DTENSOR:
        options = {"sequence_parallel": sequence_parallel, "loss_parallel": loss_parallel}
        return Pair(step_of(ours, forward), dtensor(theirs, tokens, targets, comm.size, **options), peer)
    step = autotp(theirs, tokens, targets, comm.size, loss_parallel=loss_parallel)
    return Pair(step_of(ours, forward), step, peer)


def overlap(comm: Communicator, shape: Shape) -> Pair:
    """``tp_overlap_comm`` beside the same model without it."""
    from shoal.parallel.tensor import parallelize

    torch.manual_seed(0)
    models = [Decoder(shape)]
    models.append(copy.deepcopy(models[0]))
    tokens = torch.randint(0, shape.vocab, (shape.batch, shape.length))
    for model, overlaps in zip(models, (True, False), strict=True):
        plan = {name: style for name, style in PLAN.items() if name != "layers.*.feed_forward"}
        parallelize(model, comm, plan, overlap=overlaps)

    def forward(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())

    ours, plain = (step_of(model, partial(forward, model)) for model in models)
    return Pair(ours, plain, "Shoal without overlap")


CASES: dict[str, Callable[[Communicator, Shape], Pair]] = {
    "tensor": partial(tensor, peer=DTENSOR),
    "tensor, loss parallel": partial(tensor, peer=DTENSOR, loss_parallel=True),
    "tensor, sequence and loss parallel": partial(tensor, peer=DTENSOR, sequence_parallel=True, loss_parallel=True),
    "AutoTP": partial(tensor, peer=AUTOTP),
    "AutoTP, loss parallel": partial(tensor, peer=AUTOTP, loss_parallel=True),
    "tensor, overlap": overlap,
}
"""By name: a function that builds both steps of a case; it is called on every rank."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    for name, value in vars(Shape()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = run(arguments)
    print(f"{arguments.ranks} ranks, one thread each, {arguments.rounds} rounds; milliseconds a step, median")
    print(
        table(
            [
                ["case", "Shoal", "peer", "ratio", "quartiles", "of least", "processor: Shoal", "peer"],
                *(row_of(row) for row in rows),
            ]
        )
    )
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({"machine": machine(), "cases": rows}, indent=2) + "\n")


def row_of(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [f"{row['case']}: {row['error']}", *[""] * 7]
    return [
        f"{row['case']} / {row['peer']}", f"{row['shoal_ms']:.1f}", f"{row['peer_ms']:.1f}", f"{row['ratio']:.2f}",
        f"{row['quartiles'][0]:.2f} to {row['quartiles'][1]:.2f}", f"{row['least_ratio']:.2f}",
        f"{row['shoal_processor_ms']:.1f}", f"{row['peer_processor_ms']:.1f}",
    ]  # fmt: skip


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rank 0's results of all cases."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results: Any = context.SimpleQueue()
    processes = [
        context.Process(target=run_rank, args=(rank, port, results, arguments), daemon=True)
        for rank in range(arguments.ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    rows: list[dict[str, Any]] = []
    while not results.empty():
        rows.append(results.get())
    return rows


def run_rank(rank: int, port: int, results: Any, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    size = arguments.ranks
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    world = make_world(rank, size, True)
    comm = world.communicator("tp", Mesh.of(size, tp=size))
    shape = Shape(**{name: getattr(arguments, name) for name in vars(Shape())})
    for case in arguments.cases:
        row = {"case": case, **measure(CASES[case](comm, shape), arguments.rounds)}
        if rank == 0:
            results.put(row)
    dist.barrier()
    world.close()
    dist.destroy_process_group()


def measure(pair: Pair, rounds: int) -> dict[str, Any]:
    """Both steps in turn; a time begins and ends with all ranks together."""
    times: dict[str, list[float]] = {"shoal": [], "peer": []}
    processor: dict[str, list[float]] = {"shoal": [], "peer": []}
    losses = {"shoal": 0.0, "peer": 0.0}
    for number in range(rounds + 3):
        for name, step in (("shoal", pair.shoal), ("peer", pair.peer)):
            dist.barrier()
            begin, busy = time.perf_counter(), time.process_time()
            losses[name] = step()
            used = time.process_time() - busy
            dist.barrier()
            if number >= 3:
                times[name].append(1000 * (time.perf_counter() - begin))
                processor[name].append(1000 * used)
    if abs(losses["shoal"] - losses["peer"]) > pair.rtol * abs(losses["peer"]):
        return {"error": f"losses differ: {losses}"}
    ratios = [peer / shoal for shoal, peer in zip(times["shoal"], times["peer"], strict=True)]
    first, _, third = quantiles(ratios, n=4)
    return {
        "peer": pair.peer_name,
        "shoal_ms": median(times["shoal"]),
        "peer_ms": median(times["peer"]),
        "ratio": median(ratios),
        "quartiles": [first, third],
        "least_ratio": min(times["peer"]) / min(times["shoal"]),
        "shoal_processor_ms": median(processor["shoal"]),
        "peer_processor_ms": median(processor["peer"]),
        "loss": losses["shoal"],
    }


if __name__ == "__main__":
    main()

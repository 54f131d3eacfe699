"""Expert layers beside their peers on CPU ranks: one step of the same layer, both in every process, in turn.

    python -m benchmarks.experts --cases deepspeed                     # DeepSpeed's MoE, 2 ranks
    python -m benchmarks.experts --cases transformers                  # Transformers' grouped experts, 1 rank
    python -m benchmarks.experts --cases products "products, 2 ranks"  # the experts alone, on rows that are sorted
    python -m benchmarks.experts --cases overlap beside                # communication beside computing, 2 ranks

A step is forward and backward of one layer without an optimizer; both sides have the same weights and the same routing,
nothing is dropped. Times and ratios are those of `parallel.py`; a ratio is the peer's time over Shoal's, so that of
``products`` is the share of the experts' own work in the step. Losses must agree. What a step frees stays with the
process, as in an engine of Shoal (`shoal/host_heap.py`), for both sides. DeepSpeed and Transformers are imported by
their cases only.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.arena import machine, table
from benchmarks.comm import make_world
from benchmarks.parallel import Pair, measure, row_of
from benchmarks.parallel_peers import Step
from shoal.comm.protocol import Communicator
from shoal.host_heap import keep_freed
from shoal.mesh import Mesh
from shoal.parallel.expert.dispatch import run_experts
from shoal.parallel.expert.grouped import grouped_linear
from shoal.parallel.expert.held import ExpertsHeld
from shoal.parallel.expert.route import route


@dataclass(frozen=True)
class Sizes:
    """Of the layer, and the tokens of a rank.

    Args:
        skew: how large what all tokens have in common is beside what each has of its own; it makes some experts the
            first choice of many.
    """

    experts: int = 8
    choices: int = 2
    hidden: int = 512
    inner: int = 2048
    tokens: int = 4096
    skew: float = 0.0


class Gate(nn.Module):
    """Softmax over experts, the first choices, their weights with sum 1, and the loss that balances first choices."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.linear = nn.Linear(sizes.hidden, sizes.experts, bias=False)
        self.choices = sizes.choices

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gates = F.softmax(self.linear(hidden), 1)
        weights, index = gates.topk(self.choices, 1)
        first = F.one_hot(index[:, 0], gates.shape[1]).float().mean(0)
        balance = (gates.mean(0) * first).sum() * gates.shape[1]
        return index, weights / weights.sum(1, keepdim=True), balance


class Experts(nn.Module):
    """This rank's experts: two linears and ReLU between them, over all experts of the layer before ``keep``."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.inner = nn.Parameter(torch.randn(sizes.experts, sizes.hidden, sizes.inner) * sizes.hidden**-0.5)
        self.outer = nn.Parameter(torch.randn(sizes.experts, sizes.inner, sizes.hidden) * sizes.inner**-0.5)

    def keep(self, ids: Sequence[int]) -> None:
        self.inner = nn.Parameter(self.inner.detach()[list(ids)].clone())
        self.outer = nn.Parameter(self.outer.detach()[list(ids)].clone())

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        return grouped_linear(F.relu(grouped_linear(rows, self.inner, counts)), self.outer, counts)


class Layer(nn.Module):
    """A gate and experts, of which this rank holds its part."""

    def __init__(self, gate: Gate, experts: Experts, comm: Communicator | None, **options: Any) -> None:
        super().__init__()
        self.gate, self.experts, self.options = gate, experts, options
        self.held = ExpertsHeld(len(experts.inner), 1 if comm is None else comm.size)
        self.held.set_ranks(comm)
        experts.keep(self.held.ids)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        index, weights, balance = self.gate(hidden)
        return run_experts(hidden, index, weights, self.experts, self.held, may_drop=False, **self.options), balance


def parts(sizes: Sizes, rank: int) -> tuple[Gate, Experts, Tensor]:
    """Gate and experts, the same on every rank, and the rank's tokens."""
    torch.manual_seed(0)
    gate, experts = Gate(sizes), Experts(sizes)
    common = torch.randn(sizes.hidden)
    generator = torch.Generator().manual_seed(1 + rank)
    return gate, experts, torch.randn(sizes.tokens, sizes.hidden, generator=generator) + sizes.skew * common


def fullest(sizes: Sizes, num_ranks: int) -> float:
    """The most rows of one rank for one expert, as a multiple of the mean."""
    counts = []
    for rank in range(num_ranks):
        gate, _, hidden = parts(sizes, rank)
        counts.append(torch.bincount(gate(hidden)[0].flatten(), minlength=sizes.experts).max())
    return float(torch.stack(counts).max()) * sizes.experts / (sizes.tokens * sizes.choices)


def step_of(hidden: Tensor, modules: Sequence[nn.Module], forward: Callable[[Tensor], Tensor]) -> Step:
    """Forward and backward to the tokens and to all parameters."""
    hidden = hidden.clone().requires_grad_()

    def step() -> float:
        loss = forward(hidden)
        loss.backward()
        for tensor in (hidden, *(parameter for module in modules for parameter in module.parameters())):
            tensor.grad = None
        return float(loss.detach())

    return step


def layer_step(layer: Layer, hidden: Tensor) -> Step:
    def forward(hidden: Tensor) -> Tensor:
        output, balance = layer(hidden)
        return output.square().mean() + 0.01 * balance

    return step_of(hidden, [layer], forward)


def deepspeed(comm: Communicator, sizes: Sizes) -> Pair:
    """DeepSpeed's MoE, whose experts have room for the rows of the fullest one, and Shoal's of the same signature."""
    import deepspeed as library
    from deepspeed.moe.layer import MoE as Theirs

    from shoal.parallel.expert.layer import MoE

    gate, _, hidden = parts(sizes, comm.rank)
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))  # DeepSpeed reads it
    library.init_distributed("gloo")
    expert = nn.Sequential(
        nn.Linear(sizes.hidden, sizes.inner, bias=False), nn.ReLU(), nn.Linear(sizes.inner, sizes.hidden, bias=False)
    )
    options = {"drop_tokens": False, "top2_2nd_expert_sampling": False}
    given = (sizes.hidden, expert, sizes.experts, comm.size, sizes.choices)
    theirs: nn.Module = Theirs(*given, **options)
    theirs.set_deepspeed_parallelism()  # type: ignore[operator]  # nn.Module's attributes are unions
    ours = MoE(*given, **options)
    ours.deepspeed_moe.experts.deepspeed_experts.experts_held.set_ranks(comm)
    for name, parameter in theirs.named_parameters():
        with torch.no_grad():
            parameter.copy_(gate.linear.weight if "gate" in name else torch.randn_like(parameter) * 0.02)
    ours.load_state_dict(theirs.state_dict())

    def forward(layer: nn.Module, hidden: Tensor) -> Tensor:
        output, balance, _ = layer(hidden)
        loss: Tensor = output.square().mean() + 0.01 * balance
        return loss

    steps = (step_of(hidden, [layer], partial(forward, layer)) for layer in (ours, theirs))
    return Pair(*steps, "DeepSpeed MoE")


def transformers(comm: Communicator, sizes: Sizes) -> Pair:
    """Mixtral's experts as Transformers runs them: gate and up projection in one product, SiLU."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    gate, _, hidden = parts(sizes, comm.rank)
    config: Any = MixtralConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        num_local_experts=sizes.experts,
        num_experts_per_tok=sizes.choices,
    )
    config._experts_implementation = "grouped_mm"
    theirs = MixtralExperts(config)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.02)
    ours = copy.deepcopy(theirs)
    held = ExpertsHeld(sizes.experts)

    def compute(rows: Tensor, counts: Sequence[int]) -> Tensor:
        into, up = grouped_linear(rows, ours.gate_up_proj.transpose(1, 2), counts).chunk(2, -1)
        return grouped_linear(F.silu(into) * up, ours.down_proj.transpose(1, 2), counts)

    def forward(hidden: Tensor, is_ours: bool) -> Tensor:
        index, weights, _ = gate(hidden)
        if is_ours:
            return run_experts(hidden, index, weights, compute, held, may_drop=False).square().mean()
        output: Tensor = theirs(hidden, index, weights)
        return output.square().mean()

    steps = (
        step_of(hidden, [experts, gate], partial(forward, is_ours=is_ours))
        for experts, is_ours in ((ours, True), (theirs, False))
    )
    return Pair(*steps, f"Transformers {config._experts_implementation}")


def products(comm: Communicator, sizes: Sizes) -> Pair:
    """The layer beside its experts alone, on the rows that they get."""
    gate, experts, hidden = parts(sizes, comm.rank)
    ours = Layer(gate, experts, comm)
    with torch.no_grad():
        index, weights, _ = gate(hidden)
        got: list[Tensor] = []
        run_experts(hidden, index, weights, lambda rows, counts: (got.append(rows), rows)[1], ours.held)
        counts = list(route(index, ours.held)[0].counts)
    rows = got[0].clone()

    def whole(hidden: Tensor) -> Tensor:
        return run_experts(hidden, index, weights, experts, ours.held, may_drop=False).sum()

    def alone(rows: Tensor) -> Tensor:
        output: Tensor = experts(rows, counts)
        return output.sum()

    return Pair(
        step_of(hidden, [experts], whole), step_of(rows, [experts], alone), "the experts alone", rtol=float("inf")
    )


def overlap(comm: Communicator, sizes: Sizes) -> Pair:
    """Two parts of the tokens beside all at once."""
    gate, experts, hidden = parts(sizes, comm.rank)
    ours, plain = (Layer(copy.deepcopy(gate), copy.deepcopy(experts), comm, overlap=num_parts) for num_parts in (2, 1))
    return Pair(layer_step(ours, hidden), layer_step(plain, hidden), "Shoal without overlap")


def beside(comm: Communicator, sizes: Sizes) -> Pair:
    """A shared expert that runs while rows are sent, beside one that runs before."""
    gate, experts, hidden = parts(sizes, comm.rank)
    layer = Layer(gate, experts, comm)
    shared = nn.Sequential(nn.Linear(sizes.hidden, sizes.inner), nn.ReLU(), nn.Linear(sizes.inner, sizes.hidden))

    def forward(hidden: Tensor, is_beside: bool) -> Tensor:
        kept: list[Tensor] = [] if is_beside else [shared(hidden)]
        layer.options = {"meanwhile": lambda: kept.append(shared(hidden))} if is_beside else {}
        output, _ = layer(hidden)
        loss: Tensor = (output + kept[0]).square().mean()
        return loss

    steps = (step_of(hidden, [layer, shared], partial(forward, is_beside=is_beside)) for is_beside in (True, False))
    return Pair(*steps, "the shared expert first")


CASES: dict[str, tuple[int, Callable[[Communicator, Sizes], Pair]]] = {
    "deepspeed": (2, deepspeed),
    "transformers": (1, transformers),
    "products": (1, products),
    "products, 2 ranks": (2, products),
    "overlap": (2, overlap),
    "beside": (2, beside),
}
"""By name: the ranks, and a function that builds both steps; it is called on every rank."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=15)
    for name, value in vars(Sizes()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    sizes = Sizes(**{name: getattr(arguments, name) for name in vars(Sizes())})
    rows = run(arguments.cases, sizes, arguments.rounds)
    print(f"{sizes}, one thread a rank, {arguments.rounds} rounds; milliseconds a step, median")
    head = ["case", "Shoal", "peer", "ratio", "quartiles", "of least", "processor: Shoal", "peer", "fullest expert"]
    print(table([head, *([*row_of(row), f"{row['fullest']:.2f} of the mean"] for row in rows)]))
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({"machine": machine(), "cases": rows}, indent=2) + "\n")


def run(cases: Sequence[str], sizes: Sizes, rounds: int) -> list[dict[str, Any]]:
    """Rank 0's results of all cases. Raises: SystemExit: a process has failed."""
    context = multiprocessing.get_context("spawn")
    rows: list[dict[str, Any]] = []
    for case in cases:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        results: Any = context.SimpleQueue()
        processes = [
            context.Process(target=run_rank, args=(rank, port, results, case, sizes, rounds), daemon=True)
            for rank in range(CASES[case][0])
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit(f"{case}: exit codes of the ranks: {[process.exitcode for process in processes]}")
        rows.append(results.get())
    return rows


def run_rank(rank: int, port: int, results: Any, case: str, sizes: Sizes, rounds: int) -> None:
    torch.set_num_threads(1)
    keep_freed()
    size, build = CASES[case]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    world = make_world(rank, size, size > 1)
    row = {"case": case, **measure(build(world.communicator("dp", Mesh.of(size)), sizes), rounds)}
    row["fullest"] = fullest(sizes, size)
    if rank == 0:
        results.put(row)
    dist.barrier()
    world.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

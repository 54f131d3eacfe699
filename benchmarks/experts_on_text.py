"""A layer of experts beside DeepSpeed's MoE, with the routing that a GPT has while it trains on real text.

    python -m benchmarks.experts_on_text --steps 150 --every 15

Two ranks train a GPT with experts (Shoal's ``MoE`` of DeepSpeed's signature, ``ep_size`` 2, no token dropped, the
auxiliary loss with 0.01) on the text of the quickstart. At every 15th step each layer's inputs and weights are given to
a layer of both libraries, whose forward and backward are timed in turn, as in ``experts.py``. A ratio is DeepSpeed's
time over Shoal's; that of all is the sum of the times of all layers and steps. "fullest" is the most rows of one rank
for one expert, as a multiple of the mean: without drops DeepSpeed gives every expert room for as many.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.arena import machine, table
from benchmarks.experts import Sizes, step_of
from benchmarks.parallel import Pair, measure
from shoal.data import ByteTokenizer, Loader, RepeatingLoader, default_texts, split, tokenize
from shoal.host_heap import keep_freed
from shoal.models.gpt import GPT, GPTConfig
from shoal.parallel.expert.layer import MoE

VOCABULARY, LENGTH, BALANCE = 256, 256, 0.01


def expert_of(sizes: Sizes) -> nn.Module:
    return nn.Sequential(
        nn.Linear(sizes.hidden, sizes.inner, bias=False), nn.ReLU(), nn.Linear(sizes.inner, sizes.hidden, bias=False)
    )


def build_layer(kind: Any, sizes: Sizes, num_ranks: int) -> Any:
    options = {"drop_tokens": False, "top2_2nd_expert_sampling": False}
    return kind(sizes.hidden, expert_of(sizes), sizes.experts, num_ranks, sizes.choices, **options)


class FeedForward(nn.Module):
    """The feed-forward layer of a GPT's block; keeps its last input while ``keeps`` is set."""

    def __init__(self, config: GPTConfig, sizes: Sizes, num_ranks: int) -> None:
        super().__init__()
        self.moe: MoE = build_layer(MoE, sizes, num_ranks)
        for expert in self.moe.deepspeed_moe.experts.deepspeed_experts:
            for parameter in expert.parameters():
                nn.init.normal_(parameter, std=0.02)
        self.keeps = False
        self.kept: Tensor | None = None

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if self.keeps:
            self.kept = hidden.detach().flatten(0, -2).clone()
        output, balance, _ = self.moe(hidden)
        return output, BALANCE * balance


def run_layer(layer: nn.Module, hidden: Tensor) -> Tensor:
    output, balance, _ = layer(hidden)
    loss: Tensor = output.square().mean() + BALANCE * balance
    return loss


def train(sizes: Sizes, layers: int, steps: int, every: int, rounds: int) -> list[dict[str, Any]]:
    """Trains, and measures both libraries' layers. Returns: a row for each measured step and layer."""
    import deepspeed as library
    from deepspeed.moe.layer import MoE as Theirs

    import shoal

    shoal.init_distributed()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    shape = GPTConfig(VOCABULARY, LENGTH, layers, sizes.hidden, sizes.hidden // 64, num_experts=sizes.experts)
    model = GPT(shape, experts=partial(FeedForward, sizes=sizes, num_ranks=num_ranks))  # type: ignore[arg-type]
    found = [module for module in model.modules() if isinstance(module, FeedForward)]
    config = {
        "train_micro_batch_size_per_gpu": sizes.tokens // LENGTH,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "steps_per_print": 10**9,
    }
    engine, *_ = shoal.initialize(model=model, config=config)
    training, _ = split(tokenize(default_texts(), ByteTokenizer()), 0.01, LENGTH, seed=1 + rank)
    batches = RepeatingLoader(Loader(training, sizes.tokens // LENGTH))

    library.init_distributed("gloo")
    theirs, ours = build_layer(Theirs, sizes, num_ranks), build_layer(MoE, sizes, num_ranks)
    theirs.set_deepspeed_parallelism()
    ours.set_deepspeed_parallelism()
    rows: list[dict[str, Any]] = []
    for step in range(steps + 1):
        tokens, targets = next(batches)
        is_measured = step % every == 0
        for module in found:
            module.keeps = is_measured
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        for number, module in enumerate(found if is_measured else ()):
            state = {name: value.detach().clone() for name, value in module.moe.state_dict().items()}
            ours.load_state_dict(state)
            theirs.load_state_dict(state)
            assert module.kept is not None
            hidden, module.kept = module.kept, None
            pair = [step_of(hidden, [layer], partial(run_layer, layer)) for layer in (ours, theirs)]
            row = measure(Pair(pair[0], pair[1], "DeepSpeed MoE"), rounds)
            most = ours(hidden)[2].max().float().detach()
            dist.all_reduce(most, dist.ReduceOp.MAX)
            fullest = float(most) * sizes.experts / (sizes.tokens * sizes.choices)
            rows.append({"step": step, "layer": number, "train_loss": float(loss.detach()), "fullest": fullest, **row})
    return rows


def run_rank(rank: int, size: int, port: int, results: Any, arguments: argparse.Namespace) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    torch.set_num_threads(1)
    keep_freed()
    sizes = Sizes(**{name: getattr(arguments, name) for name in vars(Sizes())})
    rows = train(sizes, arguments.layers, arguments.steps, arguments.every, arguments.rounds)
    if rank == 0:
        results.put(rows)
    dist.barrier()
    os._exit(0)  # peers' destructors of process groups wait for each other


def show(rows: list[dict[str, Any]]) -> str:
    lines = [["step", "training loss", "fullest expert, by layer", "Shoal ms", "DeepSpeed ms", "ratio"]]
    for step in sorted({row["step"] for row in rows}):
        own = [row for row in rows if row["step"] == step]
        lines.append([str(step), f"{own[0]['train_loss']:.3f}", *_sums(own)])
    lines.append(["all", "", *_sums(rows)])
    return table(lines)


def _sums(rows: list[dict[str, Any]]) -> list[str]:
    wrong = [row["error"] for row in rows if "error" in row]
    if wrong:
        return ["", "", "", wrong[0]]
    ours, theirs = (sum(row[name] for row in rows) for name in ("shoal_ms", "peer_ms"))
    fullest = [row["fullest"] for row in rows]
    shown = " ".join(f"{each:.2f}" for each in fullest) if len(rows) < 9 else f"median {median(fullest):.2f}"
    return [shown, f"{ours:.0f}", f"{theirs:.0f}", f"{theirs / ours:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--every", type=int, default=15, help="steps from one measurement to the next")
    parser.add_argument("--rounds", type=int, default=5)
    for name, value in {**vars(Sizes()), "tokens": 2048}.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results: Any = context.SimpleQueue()
    processes = [context.Process(target=run_rank, args=(rank, 2, port, results, arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(f"exit codes of the ranks: {[process.exitcode for process in processes]}")
    rows = results.get()
    print(f"{arguments.layers} layers, {arguments.tokens} tokens a rank, one thread a rank; sums over the layers")
    print(show(rows))
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()

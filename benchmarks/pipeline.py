"""Pipelines beside their peers on CPU ranks, and the bubble of each schedule beside its formula.

    python -m benchmarks.pipeline --ranks 2 4                     # Shoal, torch.distributed.pipelining, DeepSpeed
    python -m benchmarks.pipeline --ranks 4 --data-parallel 2     # two pipelines of two stages
    python -m benchmarks.pipeline --ranks 4 --bubble              # stages that sleep a known time
    python -m benchmarks.pipeline --ranks 2 --profile shoal-1     # where rank 0's processor time goes

All contenders train the same stack of blocks under 1F1B with AdamW; a rank is one process with one thread and has one
pipeline stage. They share these processes: a round is one step of each, so that a noisy machine disturbs all alike.
A ratio is the median of the rounds' ratios (the peer's time over Shoal's with ZeRO-1), with quartiles; beside it the
ratio of the least times, and the processor time of all ranks, which other processes disturb less. What memory a process
happens to get changes its ratios by several percent, so ``--launches`` repeats all in new processes and shows the least
and the largest of their medians. Losses must agree. DeepSpeed is left out where it is not installed.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import importlib.util
import json
import multiprocessing
import os
import pstats
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.arena import machine, table
from benchmarks.contenders import BETAS, EPS, LEARNING_RATE, WEIGHT_DECAY, adamw
from benchmarks.parallel import Block, Shape
from shoal.pipeline.schedule import build_schedule
from shoal.pipeline.simulate import simulate
from shoal.pipeline.timeline import TimedAction, Timeline

Step = Callable[[], float]  # a step of all micro-batches; returns the mean loss, NaN where it is not known
Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Sizes:
    """The sizes of the model and of a step; ``data_parallel`` pipelines, each with its own micro-batches."""

    layers: int = 8
    hidden: int = 256
    length: int = 32
    batch: int = 2
    micro: int = 8
    data_parallel: int = 1


def build_blocks(sizes: Sizes) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block(Shape(hidden=sizes.hidden)) for _ in range(sizes.layers)]


def build_batches(sizes: Sizes, replica: int) -> Batches:
    generator = torch.Generator().manual_seed(1 + replica)
    shape = (sizes.micro, 2, sizes.batch, sizes.length, sizes.hidden)
    return [(inputs, targets) for inputs, targets in torch.randn(shape, generator=generator)]


def mean_squares(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def shoal(blocks: list[nn.Module], batches: Batches, rank: int, size: int, num_stages: int, stage: int) -> Step:
    import shoal as library

    config = {
        "train_micro_batch_size_per_gpu": len(batches[0][0]),
        "gradient_accumulation_steps": len(batches),
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "betas": list(BETAS), "eps": EPS, "weight_decay": WEIGHT_DECAY},
        },
        "pipeline": {"stages": num_stages, "schedule": "1f1b"},
    }
    model = library.PipelineModule(blocks, num_stages=num_stages, loss_fn=mean_squares)
    initialize: Any = library.initialize
    engine, *_ = initialize(model=model, config=config)
    return lambda: float(engine.train_batch(iter(batches)))


def torch_pipelining(blocks: list[nn.Module], batches: Batches, rank: int, size: int, num_stages: int) -> Step:
    """Bare pipelines; with data parallelism their gradients are averaged as one tensor, as by hand."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    replicas = size // num_stages
    index, replica = divmod(rank, replicas)
    of_stage = len(blocks) // num_stages
    module = nn.Sequential(*blocks[index * of_stage : (index + 1) * of_stage])
    # Every rank makes every group.
    pipelines = [dist.new_group(list(range(each, size, replicas))) for each in range(replicas)]
    copies = [dist.new_group(list(range(each * replicas, (each + 1) * replicas))) for each in range(num_stages)]
    stage = PipelineStage(module, index, num_stages, torch.device("cpu"), group=pipelines[replica])
    schedule = Schedule1F1B(stage, len(batches), loss_fn=mean_squares)
    optimizer = adamw(module.parameters())
    inputs, targets = (torch.cat(tensors) for tensors in zip(*batches, strict=True))

    def mean_of_replicas(tensor: Tensor) -> Tensor:
        if replicas > 1:
            dist.all_reduce(tensor, group=copies[index])
            tensor /= replicas
        return tensor

    def step() -> float:
        losses: list[Tensor] = []
        if index == 0:
            schedule.step(inputs)
        elif index == num_stages - 1:
            schedule.step(target=targets, losses=losses)
        else:
            schedule.step()
        if replicas > 1:
            gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
            flat = mean_of_replicas(torch.cat([gradient.flatten() for gradient in gradients]))
            parts = flat.split([gradient.numel() for gradient in gradients])
            torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])
        optimizer.step()
        optimizer.zero_grad()
        return float(mean_of_replicas(torch.stack(losses).detach().mean())) if losses else float("nan")

    return step


def deepspeed(blocks: list[nn.Module], batches: Batches, rank: int, size: int, num_stages: int) -> Step:
    import deepspeed as library
    from deepspeed.pipe import PipelineModule

    library.init_distributed("gloo")
    config = {
        "train_micro_batch_size_per_gpu": len(batches[0][0]),
        "gradient_accumulation_steps": len(batches),
        "gradient_clipping": 0,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    model = PipelineModule(blocks, num_stages=num_stages, loss_fn=mean_squares)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = library.initialize(model=model, optimizer=adamw(parameters), config=config)
    return lambda: float(engine.train_batch(iter(batches)))


CONTENDERS: dict[str, Callable[..., Step]] = {
    "shoal-1": partial(shoal, stage=1),
    "shoal-0": partial(shoal, stage=0),
    "torch": torch_pipelining,
    "deepspeed-1": deepspeed,
}


# the bubble


class _Sleep(torch.autograd.Function):
    """The identity, whose backward takes a known time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class SleepingStage(nn.Module):
    """A layer whose forward, backward to the input, and backward to the weight each take ``seconds``."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        if not x.requires_grad:  # the first pipeline stage, whose schedules do its whole backward in one action
            return x + _Sleep.apply(self.weight, 2 * self.seconds)  # type: ignore[no-untyped-call]
        passed: Tensor = _Sleep.apply(x, self.seconds)  # type: ignore[no-untyped-call]
        return passed + _Sleep.apply(self.weight, self.seconds)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Bubble:
    """A schedule, and its bubble by formula, with p ranks, v stages of each and m micro-batches.

    Args:
        is_own: the bubble of each rank's own time (``Timeline.own_bubble``).
    """

    schedule: str
    virtual_stages: int
    formula: Callable[[int, int, int], float]
    is_own: bool = False

    def of(self, timeline: Timeline) -> float:
        return timeline.own_bubble if self.is_own else timeline.bubble


BUBBLES = (
    Bubble("gpipe", 1, lambda p, v, m: (p - 1) / (v * m + p - 1)),
    Bubble("1f1b", 1, lambda p, v, m: (p - 1) / (v * m + p - 1)),
    Bubble("interleaved_1f1b", 2, lambda p, v, m: (p - 1) / (v * m + p - 1)),
    Bubble("zb_h1", 1, lambda p, v, m: (p - 1) / (3 * m + p - 1)),
    Bubble("interleaved_zero_bubble", 2, lambda p, v, m: (p - 1) / (3 * v * m + p - 1)),
    Bubble("zbv", 2, lambda p, v, m: 0.0, is_own=True),
    Bubble("dualpipev", 2, lambda p, v, m: (p - 1) / (6 * m + p - 1)),
)


def measure_bubble(bubble: Bubble, rank: int, size: int, micro: int, seconds: float, steps: int) -> dict[str, Any]:
    """Steps of sleeping stages. Returns: the bubbles of the steps, the median beside the simulation's and formula's."""
    import shoal as library

    virtual = bubble.virtual_stages
    model = library.PipelineModule(
        [SleepingStage(seconds) for _ in range(size * virtual)],
        num_stages=size,
        virtual_stages=virtual,
        stage_to_rank="v" if bubble.schedule in ("zbv", "dualpipev") else "loop",
        partition_method="uniform",
        loss_fn=mean_squares,
    )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "pipeline": {"stages": size, "schedule": bubble.schedule, "virtual_stages": virtual},
    }
    initialize: Any = library.initialize
    engine, *_ = initialize(model=model, config=config)
    batches = [(torch.ones(1, 4), torch.zeros(1, 4)) for _ in range(micro)]
    engine.train_batch(iter(batches))
    found = []
    for _ in range(steps):
        engine._runner.timeline = own = []
        engine.train_batch(iter(batches))
        orders: list[Any] = [None] * size
        dist.all_gather_object(orders, [(timed.action, timed.start, timed.end) for timed in own])
        ranks = (tuple(TimedAction(*timed) for timed in order if timed[0].kind in "FBIW") for order in orders)
        found.append(bubble.of(Timeline(bubble.schedule, tuple(ranks))))
    simulated = simulate(build_schedule(bubble.schedule, size, micro, virtual_stages=virtual))
    return {
        "schedule": bubble.schedule,
        "micro": micro,
        "measured": median(found),
        "least": min(found),
        "most": max(found),
        "simulated": bubble.of(simulated),
        "formula": bubble.formula(size, virtual, micro),
        "is_own": bubble.is_own,
    }


# processes and rounds


def measure(
    names: Sequence[str], sizes: Sizes, rank: int, size: int, rounds: int, profile: str
) -> dict[str, dict[str, list[float]]]:
    """All contenders in turn; a time begins and ends with all ranks together.

    Returns: seconds, processor seconds of all ranks, and losses of each contender's steps.
    """
    num_stages = size // sizes.data_parallel
    batches, blocks = build_batches(sizes, rank % sizes.data_parallel), build_blocks(sizes)
    steps = {name: CONTENDERS[name](copy.deepcopy(blocks), batches, rank, size, num_stages) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    processor: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    profiler = cProfile.Profile()
    for number in range(rounds + 2):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            dist.barrier()
            begin, busy = time.perf_counter(), time.process_time()
            is_profiled = name == profile and number >= 2
            losses[name].append(profiler.runcall(steps[name]) if is_profiled else steps[name]())
            used = torch.tensor([time.process_time() - busy])
            dist.all_reduce(used)
            if number >= 2:
                seconds[name].append(time.perf_counter() - begin)
                processor[name].append(float(used))
    if profile and rank == 0:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
    last: list[Any] = [None] * size
    dist.all_gather_object(last, losses)
    return {"seconds": seconds, "processor": processor, "losses": last[-1]}


def rows_of(launches: Sequence[dict[str, dict[str, list[float]]]], names: Sequence[str]) -> list[dict[str, Any]]:
    """A row a contender, over the rounds of all launches."""
    seconds, processor, losses = (
        {name: [value for launch in launches for value in launch[kind][name]] for name in names}
        for kind in ("seconds", "processor", "losses")
    )
    ours = names[0]
    return [
        row_of(name, ours, seconds, processor)
        | {"launches": [row_of(name, ours, each["seconds"], each["processor"])["ratio"] for each in launches]}
        | disagreement(losses[name], losses[ours])
        for name in names
    ]


def row_of(name: str, ours: str, seconds: dict[str, list[float]], processor: dict[str, list[float]]) -> dict[str, Any]:
    ratios = [peer / own for peer, own in zip(seconds[name], seconds[ours], strict=True)]
    first, _, third = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        "contender": name,
        "ms": 1000 * median(seconds[name]),
        "ratio": median(ratios),
        "quartiles": [first, third],
        "least_ratio": min(seconds[name]) / min(seconds[ours]),
        "processor_ms": 1000 * median(processor[name]),
        "processor_ratio": median(processor[name]) / median(processor[ours]),
    }


def disagreement(losses: list[float], ours: list[float]) -> dict[str, Any]:
    """The loss after the same steps, with an error where it is not Shoal's."""
    wrong = [n for n, (a, b) in enumerate(zip(losses, ours, strict=True)) if not abs(a - b) <= 1e-4 * abs(b)]
    row: dict[str, Any] = {"loss": losses[-1]}
    if wrong:
        row["error"] = f"the loss of step {wrong[0]} is {losses[wrong[0]]}, and Shoal's {ours[wrong[0]]}"
    return row


def launch(arguments: argparse.Namespace, size: int) -> Any:
    """Rank 0's result, from ``size`` new processes. Raises: SystemExit: a process has failed."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results: Any = context.SimpleQueue()
    processes = [
        context.Process(target=run_rank, args=(rank, size, port, results, arguments), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(f"exit codes of the ranks: {[process.exitcode for process in processes]}")
    return results.get()


def run_rank(rank: int, size: int, port: int, results: Any, arguments: argparse.Namespace) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    torch.set_num_threads(1)
    import shoal as library

    library.init_distributed()
    if arguments.bubble:
        result: Any = [
            measure_bubble(bubble, rank, size, arguments.micro, arguments.seconds, arguments.rounds)
            for bubble in BUBBLES
            if bubble.schedule in (arguments.schedules or bubble.schedule)
        ]
    else:
        sizes = Sizes(**{name: getattr(arguments, name) for name in asdict(Sizes())})
        result = measure(arguments.contenders, sizes, rank, size, arguments.rounds, arguments.profile)
    if rank == 0:
        results.put(result)
    dist.barrier()
    os._exit(0)  # peers' destructors of process groups wait for each other


def show(rows: list[dict[str, Any]], is_bubble: bool) -> str:
    if is_bubble:
        head = ["schedule", "measured", "least to most", "simulated", "formula", "measured / formula"]
        return table(
            [
                head,
                *(
                    [
                        f"{row['schedule']}{' (own time)' if row['is_own'] else ''}", f"{row['measured']:.2%}",
                        f"{row['least']:.2%} to {row['most']:.2%}", f"{row['simulated']:.2%}", f"{row['formula']:.2%}",
                        f"{row['measured'] / row['formula']:.3f}" if row["formula"] else "",
                    ]
                    for row in rows
                ),
            ]
        )  # fmt: skip
    head = ["contender", "ms", "ratio", "quartiles", "of launches", "of least", "processor ms", "ratio", "loss"]
    return table(
        [
            head,
            *(
                [
                    row["contender"], f"{row['ms']:.1f}", f"{row['ratio']:.2f}",
                    f"{row['quartiles'][0]:.2f} to {row['quartiles'][1]:.2f}",
                    f"{min(row['launches']):.2f} to {max(row['launches']):.2f}", f"{row['least_ratio']:.2f}",
                    f"{row['processor_ms']:.1f}", f"{row['processor_ratio']:.2f}",
                    row.get("error", f"{row['loss']:.6f}"),
                ]
                for row in rows
            ),
        ]
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found = [name for name in CONTENDERS if name != "deepspeed-1" or importlib.util.find_spec("deepspeed")]
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=found, help="Shoal's first")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15, help="steps of each contender, or of each schedule")
    parser.add_argument("--launches", type=int, default=1, help="how often new processes do the rounds")
    for name, value in asdict(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--profile", default="", help="a contender whose steps run under cProfile on rank 0")
    parser.add_argument("--bubble", action="store_true")
    parser.add_argument("--schedules", nargs="+", choices=[bubble.schedule for bubble in BUBBLES])
    parser.add_argument("--seconds", type=float, default=0.05, help="of a sleeping stage's F, I and W")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    everything = {}
    for size in arguments.ranks:
        if arguments.bubble:
            rows = launch(arguments, size)
        else:
            rows = rows_of([launch(arguments, size) for _ in range(arguments.launches)], arguments.contenders)
        everything[size] = rows
        print(
            f"{size} ranks, {size // arguments.data_parallel} stages, one thread each, {arguments.micro} micro-batches,"
            f" {arguments.launches} x {arguments.rounds} rounds"
        )
        print(show(rows, arguments.bubble), flush=True)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({"machine": machine(), "ranks": everything}, indent=2) + "\n")


if __name__ == "__main__":
    main()
